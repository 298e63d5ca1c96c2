"""Documents: records checked against one format, ready to be tokenized."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from utils.data.prepare.records import LARGEST_DOCUMENT_BYTES, BadRow, Location, Record
from utils.data.prepare.rows import DOCUMENT_FORMATS, RowSettings, UnusableRowError, document_fields

Message = Mapping[str, Any]
FILTERED = "filtered"  # left out because the recipe says so: no fault


@dataclass(frozen=True)
class TextDocument:
    """Plain text, every token of it trained on. `part` > 0 continues the document before it."""

    text: str
    location: Location
    part: int = 0


@dataclass(frozen=True)
class ChatDocument:
    """A conversation; the assistant's turns from message `first_trained` on are trained on.

    tools: JSON schemas. template_options: more variables for the chat template.
    """

    messages: Sequence[Message]
    location: Location
    tools: Sequence[Mapping[str, Any]] | None = None
    template_options: Mapping[str, Any] | None = None
    first_trained: int = 0


@dataclass(frozen=True)
class CompletionDocument:
    """A prompt and its completion as strings; as messages they are a ChatDocument."""

    prompt: str
    completion: str
    location: Location


Document = TextDocument | ChatDocument | CompletionDocument


def parse_documents(record: Record, rows: RowSettings) -> Iterator[Document | BadRow]:
    """Yield the document of a record (a very long text: several), or what is wrong with it."""
    try:
        if not rows.selects(record.fields):
            yield BadRow(FILTERED, "not selected by the filter", record.location)
            return
        fields = document_fields(rows.renamed(record.fields), rows.row_format)
        document_format = DOCUMENT_FORMATS.get(rows.row_format, rows.row_format)
        if document_format == "text":
            yield from _texts(fields["text"], record)
        elif document_format == "messages":
            _check_messages("messages", fields["messages"])
            yield ChatDocument(fields["messages"], record.location, *_extras(fields))
        else:
            yield _completion(fields, record.location)
    except UnusableRowError as error:
        yield BadRow(error.reason, str(error), record.location)


def content_digest(document: Document, seed: int) -> int:
    """Return 64 bits of a keyed hash of what the document says, wherever it stands."""
    if isinstance(document, TextDocument):
        content = document.text
    else:
        parts = (
            [document.messages, document.tools]
            if isinstance(document, ChatDocument)
            else [document.prompt, document.completion]
        )
        content = json.dumps(parts, sort_keys=True, default=str)
    key = seed.to_bytes(16, "little", signed=True)
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8, key=key).digest(), "big")


def texts_of(document: Document) -> list[str]:
    """Return the strings a document holds (of messages: their contents), in order."""
    if isinstance(document, TextDocument):
        return [document.text]
    if isinstance(document, CompletionDocument):
        return [document.prompt, document.completion]
    texts: list[str] = []
    for message in document.messages:
        content = message.get("content") or ""
        parts = [content] if isinstance(content, str) else [p.get("text", "") for p in content]
        texts.extend(parts)
        if reasoning := message.get("reasoning_content"):
            texts.append(reasoning)
        if calls := message.get("tool_calls"):
            texts.append(json.dumps(calls, ensure_ascii=False))
    return texts


def _texts(text: Any, record: Record) -> Iterator[TextDocument]:
    """Cut a very long text behind line ends, so that a worker's memory stays bounded."""
    _check_text("text", text)
    if not text.strip() and record.part == 0:
        raise UnusableRowError("empty", "empty document: 'text' has no text")
    limit, start, part = LARGEST_DOCUMENT_BYTES, 0, record.part
    while len(text) - start > limit:
        stop = text.rfind("\n", start, start + limit) + 1 or start + limit
        yield TextDocument(text[start:stop], record.location, part)
        start, part = stop, part + 1
    yield TextDocument(text[start:], record.location, part)


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str):
        kind = type(text).__name__
        raise UnusableRowError("wrong_type", f"{name!r} must be a string, found {kind}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{name!r} holds half a surrogate pair at character {error.start}"
        raise UnusableRowError("invalid_utf8", message) from None


def _check_messages(name: str, messages: Any) -> None:
    if not isinstance(messages, list):
        kind = type(messages).__name__
        raise UnusableRowError("wrong_type", f"{name!r} must be a list of messages, found {kind}")
    if not messages:
        raise UnusableRowError("empty", f"empty document: {name!r} has no messages")
    for turn, message in enumerate(messages):
        if not isinstance(message, dict):
            text = f"message {turn} of {name!r} must be an object, found {type(message).__name__}"
            raise UnusableRowError("wrong_type", text)
        for key in ("role", "content"):
            if message.get(key) is None and (key == "role" or not message.get("tool_calls")):
                text = f"message {turn} of {name!r} has no {key!r}"
                raise UnusableRowError("missing_field", text)
        for key, text in _strings_of(message):
            _check_text(f"{key} of message {turn} of {name}", text)


def _strings_of(message: Message) -> Iterator[tuple[str, Any]]:
    yield "role", message["role"]
    for key in ("content", "reasoning_content"):
        value = message.get(key)
        if key == "content" and isinstance(value, list):
            for part in value:
                yield key, part.get("text") if isinstance(part, dict) else part
        elif value is not None:
            yield key, value


def _completion(fields: Mapping[str, Any], location: Location) -> Document:
    prompt, completion = fields["prompt"], fields["completion"]
    for name, value in (("prompt", prompt), ("completion", completion)):
        if isinstance(value, list):
            _check_messages(name, value)
        else:
            _check_text(name, value)
    if isinstance(prompt, str) != isinstance(completion, str):
        message = "'prompt' and 'completion' must both be strings or both be lists of messages"
        raise UnusableRowError("wrong_type", message)
    if isinstance(prompt, list):
        return ChatDocument([*prompt, *completion], location, *_extras(fields), len(prompt))
    if not completion.strip():
        raise UnusableRowError("empty", "empty document: 'completion' has no text")
    if any(_extras(fields)):
        message = "'tools' and 'chat_template_kwargs' go with messages, but 'prompt' is a text"
        raise UnusableRowError("wrong_type", message)
    return CompletionDocument(prompt, completion, location)


def _extras(fields: Mapping[str, Any]) -> tuple[Any, Any]:
    return fields["tools"], fields["chat_template_kwargs"]
