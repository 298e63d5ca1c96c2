"""Documents: records checked against one format, ready to be tokenized."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from utils.config.errors import ConfigurationError
from utils.data.prepare.messages import check_answers
from utils.data.prepare.records import BadRow, Location, Record
from utils.data.prepare.rows import RowSettings, UnusableRowError, document_fields

Message = Mapping[str, Any]
FILTERED = "filtered"  # left out because the recipe says so: no fault


@dataclass(frozen=True)
class TextDocument:
    """Plain text, every token of it trained on; `column` is its name in the file."""

    text: str
    location: Location
    column: str = "text"


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
    """A prompt and its completion as strings; as messages they are a ChatDocument.

    column: the name of the completion in the file.
    """

    prompt: str
    completion: str
    location: Location
    column: str = "completion"


Document = TextDocument | ChatDocument | CompletionDocument


def parse_documents(record: Record, rows: RowSettings) -> Iterator[Document | BadRow]:
    """Yield the document of a record, or what is wrong with it."""
    try:
        yield _parsed(record, rows)
    except UnusableRowError as error:
        yield BadRow(error.reason, str(error), record.location)


def _parsed(record: Record, rows: RowSettings) -> Document | BadRow:
    place = record.location
    if not rows.selects(record.fields):
        return BadRow(FILTERED, "not selected by the filter", place)
    fields = document_fields(record.fields, rows.row_format, rows.columns)
    column = rows.answers_column
    if rows.row_format == "text":
        if not fields["text"].strip():
            raise UnusableRowError("empty", f"empty document: {column!r} has no text")
        return TextDocument(fields["text"], place, column)
    options = {**(rows.chat_template_kwargs or {}), **(fields["chat_template_kwargs"] or {})}
    extras = fields["tools"], options or None
    if "messages" in fields:
        check_answers(fields["messages"], column=repr(column))
        return ChatDocument(fields["messages"], place, *extras)
    if isinstance(prompt := fields["prompt"], list):
        messages = [*prompt, *fields["completion"]]
        check_answers(messages, len(prompt), repr(column))
        return ChatDocument(messages, place, *extras, len(prompt))
    return CompletionDocument(prompt, fields["completion"], place, column)


def refuse_bad_row(row: BadRow, on_bad_row: str) -> None:
    """Raise ConfigurationError at a bad row, unless such rows are skipped."""
    if on_bad_row == "error" and row.reason != FILTERED:
        raise ConfigurationError(f"{row}; repair it, or skip such rows with --on_bad_row skip")


def content_digest(document: Document, seed: int) -> int:
    """Return 64 bits of a keyed hash of what the document says, wherever it stands."""
    if isinstance(document, TextDocument):
        content = document.text
    elif isinstance(document, ChatDocument):
        content = json.dumps([document.messages, document.tools], sort_keys=True, default=str)
    else:
        content = json.dumps([document.prompt, document.completion])
    key = seed.to_bytes(16, "little", signed=True)
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8, key=key).digest(), "big")


def texts_of(document: Document) -> list[str]:
    """Return the strings a document holds (of messages: what they say and call), in order."""
    if isinstance(document, TextDocument):
        return [document.text]
    if isinstance(document, CompletionDocument):
        return [document.prompt, document.completion]
    texts: list[str] = []
    for message in document.messages:
        texts += [message["content"], message.get("reasoning_content") or ""]
        if calls := message.get("tool_calls"):
            texts.append(json.dumps(calls, ensure_ascii=False))
    return texts
