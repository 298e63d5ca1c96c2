"""Documents: records checked against one format, ready to be tokenized."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from utils.data.preparation.records import LARGEST_DOCUMENT_BYTES, BadRow, Place, Record

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


# Columns that a chat may have besides its messages.
CHAT_EXTRAS = ("tools", "chat_template_kwargs")
Document = TextDocument | ChatDocument | CompletionDocument


def columns_of(document_format: str, text_column: str) -> list[str]:
    """Return the columns that a format reads."""
    return {
        "text": [text_column],
        "messages": ["messages", *CHAT_EXTRAS],
        "prompt_completion": ["prompt", "completion", *CHAT_EXTRAS],
    }[document_format]


def detect_format(fields: Mapping[str, Any], text_column: str) -> list[str]:
    """Return every format whose columns the record has (one, when the record is clear)."""
    found = []
    if text_column in fields:
        found.append("text")
    if "messages" in fields:
        found.append("messages")
    if "prompt" in fields and "completion" in fields:
        found.append("prompt_completion")
    return found


def parse_documents(
    record: Record, document_format: str, text_column: str
) -> Iterator[Document | BadRow]:
    """Yield the document of a record (a very long text: several), or what is wrong with it."""
    missing = [
        name
        for name in columns_of(document_format, text_column)
        if name not in CHAT_EXTRAS and record.fields.get(name) is None
    ]
    if missing:
        yield _missing(record, missing, document_format)
    elif document_format == "text":
        yield from _texts(record, text_column)
    elif document_format == "messages":
        problem = _messages_problem("messages", record.fields["messages"], record.place)
        yield problem or _chat(record, record.fields["messages"])
    else:
        yield _completion(record)


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


def _missing(record: Record, missing: list[str], document_format: str) -> BadRow:
    found = ", ".join(sorted(name for name, v in record.fields.items() if v is not None))
    return BadRow(
        "missing_field",
        f"no {' and no '.join(repr(name) for name in missing)}, which the format "
        f"{document_format} needs (columns found: {found or 'none'})",
        record.place,
    )


def _texts(record: Record, text_column: str) -> Iterator[Document | BadRow]:
    text = record.fields[text_column]
    problem = _text_problem(text_column, text, record.place)
    if problem:
        yield problem
    elif not text.strip() and record.part == 0:
        yield BadRow("empty", f"empty document: {text_column!r} has no text", record.place)
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


def _completion(record: Record) -> Document | BadRow:
    prompt, completion = record.fields["prompt"], record.fields["completion"]
    for name, value in (("prompt", prompt), ("completion", completion)):
        if isinstance(value, list):
            problem = _messages_problem(name, value, record.place)
        else:
            problem = _text_problem(name, value, record.place)
        if problem:
            return problem
    if isinstance(prompt, str) != isinstance(completion, str):
        message = "'prompt' and 'completion' must both be strings or both be lists of messages"
        return BadRow("wrong_type", message, record.place)
    if isinstance(completion, str) and not completion.strip():
        return BadRow("empty", "empty document: 'completion' has no text", record.place)
    if isinstance(prompt, list):
        return _chat(record, [*prompt, *completion], first_trained=len(prompt))
    return CompletionDocument(prompt, completion, record.place)


def _chat(record: Record, messages: Sequence[Message], first_trained: int = 0) -> ChatDocument:
    tools, options = (record.fields.get(name) for name in CHAT_EXTRAS)
    return ChatDocument(messages, record.place, tools, options, first_trained)
