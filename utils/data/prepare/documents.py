"""Documents: records checked against one format, ready to be tokenized."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from utils.data.prepare.records import LARGEST_DOCUMENT_BYTES, BadRow, Place, Record
from utils.data.prepare.rows import DOCUMENT_FORMATS, UnusableRowError, document_fields

Message = Mapping[str, Any]


@dataclass(frozen=True)
class TextDocument:
    """Plain text: every token bears loss. `part` > 0 continues the document before it."""

    text: str
    place: Place
    part: int = 0


@dataclass(frozen=True)
class ChatDocument:
    """A conversation; the assistant's turns from message `first_trained` on are trained on.

    tools: JSON schemas. template_options: more variables for the chat template.
    """

    messages: Sequence[Message]
    place: Place
    tools: Sequence[Mapping[str, Any]] | None = None
    template_options: Mapping[str, Any] | None = None
    first_trained: int = 0


@dataclass(frozen=True)
class CompletionDocument:
    """A prompt and its completion as strings; as messages they are a ChatDocument."""

    prompt: str
    completion: str
    place: Place


Document = TextDocument | ChatDocument | CompletionDocument


def parse_documents(record: Record, row_format: str) -> Iterator[Document | BadRow]:
    """Yield the document of a record (a very long text: several), or what is wrong with it."""
    try:
        fields = document_fields(record.fields, row_format)
    except UnusableRowError as error:
        yield BadRow(error.reason, str(error), record.place)
        return
    document_format = DOCUMENT_FORMATS.get(row_format, row_format)
    if document_format == "text":
        yield from _texts(record)
    elif document_format == "messages":
        problem = _messages_problem("messages", fields["messages"], record.place)
        yield problem or _chat(fields, record.place, fields["messages"])
    else:
        yield _completion(fields, record.place)


def content_digest(document: Document, seed: int) -> int:
    """Return 64 bits of a keyed hash of what the document says, wherever it stands."""
    if isinstance(document, TextDocument):
        content: Any = document.text
    elif isinstance(document, ChatDocument):
        content = [document.messages, document.tools]
    else:
        content = [document.prompt, document.completion]
    if not isinstance(content, str):
        content = json.dumps(content, sort_keys=True, default=str)
    key = seed.to_bytes(16, "little", signed=True)
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8, key=key).digest(), "big")


def texts_of(document: Document) -> list[str]:
    """Return the strings a document holds (of messages: their contents), in order."""
    if isinstance(document, TextDocument):
        return [document.text]
    if isinstance(document, ChatDocument):
        return [text for message in document.messages for text in _texts_of_message(message)]
    return [document.prompt, document.completion]


def _texts_of_message(message: Message) -> list[str]:
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    if reasoning := message.get("reasoning_content"):
        texts.append(reasoning)
    if calls := message.get("tool_calls"):
        texts.append(json.dumps(calls, ensure_ascii=False))
    return texts


def _texts(record: Record) -> Iterator[Document | BadRow]:
    text = record.fields["text"]
    problem = _text_problem("text", text, record.place)
    if problem:
        yield problem
    elif not text.strip() and record.part == 0:
        yield BadRow("empty", "empty document: 'text' has no text", record.place)
    else:
        for part, piece in enumerate(_cut(text), start=record.part):
            yield TextDocument(piece, record.place, part)


def _cut(text: str) -> Iterator[str]:
    """Cut a very long text behind line ends, so that a worker's memory stays bounded."""
    limit, start = LARGEST_DOCUMENT_BYTES, 0
    while len(text) - start > limit:
        stop = text.rfind("\n", start, start + limit) + 1 or start + limit
        yield text[start:stop]
        start = stop
    yield text[start:]


def _text_problem(name: str, text: Any, place: Place) -> BadRow | None:
    if not isinstance(text, str):
        kind = type(text).__name__
        return BadRow("wrong_type", f"{name!r} must be a string, found {kind}", place)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{name!r} holds half a surrogate pair at character {error.start}"
        return BadRow("invalid_utf8", message, place)
    return None


def _messages_problem(name: str, messages: Any, place: Place) -> BadRow | None:
    if not isinstance(messages, list):
        kind = type(messages).__name__
        return BadRow("wrong_type", f"{name!r} must be a list of messages, found {kind}", place)
    if not messages:
        return BadRow("empty", f"empty document: {name!r} has no messages", place)
    for turn, message in enumerate(messages):
        if not isinstance(message, dict):
            kind = type(message).__name__
            text = f"message {turn} of {name!r} must be an object, found {kind}"
            return BadRow("wrong_type", text, place)
        for key in ("role", "content"):
            if message.get(key) is None and (key == "role" or not message.get("tool_calls")):
                text = f"message {turn} of {name!r} has no {key!r}"
                return BadRow("missing_field", text, place)
        for what, text in _strings_of_message(message):
            problem = _text_problem(f"{what} of message {turn} of {name}", text, place)
            if problem:
                return problem
    return None


def _strings_of_message(message: Message) -> Iterator[tuple[str, Any]]:
    yield "role", message["role"]
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            yield "content", part.get("text") if isinstance(part, dict) else part
    elif content is not None:
        yield "content", content
    if message.get("reasoning_content") is not None:
        yield "reasoning_content", message["reasoning_content"]


def _completion(fields: Mapping[str, Any], place: Place) -> Document | BadRow:
    prompt, completion = fields["prompt"], fields["completion"]
    for name, value in (("prompt", prompt), ("completion", completion)):
        if isinstance(value, list):
            problem = _messages_problem(name, value, place)
        else:
            problem = _text_problem(name, value, place)
        if problem:
            return problem
    if isinstance(prompt, str) != isinstance(completion, str):
        message = "'prompt' and 'completion' must both be strings or both be lists of messages"
        return BadRow("wrong_type", message, place)
    if isinstance(prompt, list):
        return _chat(fields, place, [*prompt, *completion], first_trained=len(prompt))
    if not completion.strip():
        return BadRow("empty", "empty document: 'completion' has no text", place)
    if fields["tools"] or fields["chat_template_kwargs"]:
        message = "'tools' and 'chat_template_kwargs' go with messages, and 'prompt' is a text"
        return BadRow("wrong_type", message, place)
    return CompletionDocument(prompt, completion, place)


def _chat(
    fields: Mapping[str, Any], place: Place, messages: Sequence[Message], first_trained: int = 0
) -> ChatDocument:
    tools, options = fields["tools"], fields["chat_template_kwargs"]
    return ChatDocument(messages, place, tools, options, first_trained)
