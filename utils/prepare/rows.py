"""Rows of published datasets, checked and converted to documents: texts, chats or completions."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from utils.config.preparation import check_template_variables
from utils.prepare.messages import are_messages, check_answers, messages_of, tool_calls_of
from utils.prepare.values import (
    ASSISTANT,
    FILTERED,
    MASKS,
    MEDIA,
    BadRow,
    Location,
    Pieces,
    Record,
    UnusableRowError,
    check_text,
    decode_json,
    read_segments,
    read_tokens,
    refuse_media,
    renamed,
    split_thought,
    tools_of,
    wrong_type_error,
)

# The columns that each row format needs. OPTIONAL lists further columns that a format may have.
REQUIRED: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages",),  # objects with role and content (OpenAI, Hugging Face)
    "sharegpt": ("conversations",),  # with from and value (ShareGPT, LLaMA-Factory, axolotl)
    "alpaca": ("instruction", "output"),  # Stanford Alpaca
    "prompt_completion": ("prompt", "completion"),  # both texts, or both messages (TRL)
    "segments": ("segments",),  # objects with label and text (axolotl's input_output)
    "tokens": ("input_ids",),  # token ids, with labels or a mask
}
_CHAT_COLUMNS = ("tools", "functions", "system", "system_prompt", "chat_template_kwargs", *MEDIA)
OPTIONAL: dict[str, tuple[str, ...]] = {
    "text": MEDIA,
    "messages": _CHAT_COLUMNS,
    "sharegpt": _CHAT_COLUMNS,
    "alpaca": ("input", "history", "reasoning_content", *_CHAT_COLUMNS),
    "prompt_completion": ("history", "reasoning_content", *_CHAT_COLUMNS),
    "segments": ("special_tokens",),  # true: add BOS and EOS
    "tokens": ("labels", "attention_mask", *MASKS),
}
# {row format: the format of its documents}
DOCUMENT_FORMATS = {
    "text": "text",
    **dict.fromkeys(("messages", "sharegpt", "alpaca"), "messages"),
    **dict.fromkeys(("prompt_completion", "segments", "tokens"), "prompt_completion"),
}
PIECES = {"segments": read_segments, "tokens": read_tokens}  # formats of a PiecesDocument
_MEDIA_TAGS = re.compile("<(image|video|audio)>")  # as LLaMA-Factory and others write them

Message = Mapping[str, Any]


@dataclass(frozen=True)
class TextDocument:
    """A plain text. Every token is trained on. column: the name of its column in the file."""

    text: str
    location: Location
    column: str = "text"


@dataclass(frozen=True)
class ChatDocument:
    """A conversation. Only the assistant's turns in messages[first_trained:] are trained on.

    tools: JSON schemas. template_options: further variables for the chat template.
    """

    messages: Sequence[Message]
    location: Location
    tools: Sequence[Mapping[str, Any]] | None = None
    template_options: Mapping[str, Any] | None = None
    first_trained: int = 0


@dataclass(frozen=True)
class CompletionDocument:
    """A prompt and its completion as texts. Only the completion is trained on.

    If the prompt is a list of messages, the row becomes a ChatDocument instead. column: the name of
    the completion's column in the file.
    """

    prompt: str
    completion: str
    location: Location
    column: str = "completion"


@dataclass(frozen=True)
class PiecesDocument:
    """A document in pieces: texts that are tokenized one by one, or token ids.

    pieces: (text or token ids, whether trained on). special_tokens: add BOS and EOS if missing.
    """

    pieces: Pieces
    location: Location
    special_tokens: bool = False


Document = TextDocument | ChatDocument | CompletionDocument | PiecesDocument


@dataclass(frozen=True)
class RowSettings:
    """Settings for the rows of one source: how to read them, and how many to use.

    columns: pairs (name in the file, name in preparation.COLUMNS).
    filters: pairs (name in the file, kept values): a value, a list, or {"min": ..., "max": ...}.
    weight: copies of each document. A weight of 2.3 gives 30 % of the documents a third copy.
    max_tokens: the most tokens from the source. None means no limit.
    chat_template_kwargs: template variables, for rows that do not set them.
    own_format: the user's function for records. own_sha256: the hash of the function's file.
    """

    row_format: str
    columns: tuple[tuple[str, str], ...] = ()
    filters: tuple[tuple[str, Any], ...] = ()
    weight: float = 1.0
    max_tokens: int | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    own_format: str = ""
    own_sha256: str = ""

    @property
    def read_columns(self) -> list[str]:
        """The names of the columns to read: those of the row format, then those of the filters."""
        own = map(self.name_of, (*REQUIRED[self.row_format], *OPTIONAL[self.row_format]))
        return list(dict.fromkeys([*own, *dict(self.filters)]))

    def name_of(self, column: str) -> str:
        """Return a column's name in the file. column: its name in REQUIRED or OPTIONAL."""
        return next((name for name, ours in self.columns if ours == column), column)

    @property
    def answers_column(self) -> str:
        """The name in the file of the column with the answers, for error messages."""
        # An empty Alpaca output is refused earlier, so later errors are about the history.
        alpaca = self.row_format == "alpaca"
        return self.name_of("history" if alpaca else REQUIRED[self.row_format][-1])

    def selects(self, fields: Mapping[str, Any]) -> bool:
        """Return whether the filters keep a row. Raises UnusableRowError for a missing column."""
        for name, _ in self.filters:
            if name not in fields:
                message = f"no {name!r}, which the filter asks for ({_columns_found(fields)})"
                raise UnusableRowError("missing_field", message)
        return all(_matches(wanted, fields[name]) for name, wanted in self.filters)


def _matches(wanted: Any, value: Any) -> bool:
    if isinstance(wanted, Mapping):
        try:
            return wanted.get("min", -math.inf) <= float(value) <= wanted.get("max", math.inf)
        except (TypeError, ValueError):
            return False
    values = wanted if isinstance(wanted, list) else [wanted]
    # In a CSV file, all values are strings.
    return value in values or (isinstance(value, str) and value in map(str, values))


def _columns_found(names: Iterable[str]) -> str:
    return f"columns found: {', '.join(sorted(names)) or 'none'}"


def parse_document(record: Record, rows: RowSettings) -> Document | BadRow:
    """Return the document in a record, or a BadRow if the record is faulty or filtered out."""
    location, column = record.location, rows.answers_column
    try:
        if not rows.selects(record.fields):
            return BadRow(FILTERED, "not selected by the filter", location)
        fields = document_fields(record.fields, rows.row_format, rows.columns)
        if rows.row_format == "text":
            return TextDocument(fields["text"], location, column)
        if rows.row_format in PIECES:
            return PiecesDocument(fields["pieces"], location, fields["special_tokens"])
        prompt = fields.get("prompt", [])
        if isinstance(prompt, str):
            return CompletionDocument(prompt, fields["completion"], location, column)
        messages = [*prompt, *fields["completion"]] if prompt else fields["messages"]
        check_answers(messages, len(prompt), repr(column))
    except UnusableRowError as error:
        return error.at(location)
    options = {**(rows.chat_template_kwargs or {}), **(fields["chat_template_kwargs"] or {})}
    return ChatDocument(messages, location, fields["tools"], options or None, len(prompt))


class _Row(dict[str, Any]):
    """A row's fields under Stoker's column names."""

    def __init__(self, given: Mapping[str, Any], columns: Sequence[tuple[str, str]]):
        super().__init__(renamed(given, columns))
        self._file_names = {ours: theirs for theirs, ours in columns}
        self._columns = columns

    def quoted(self, name: str) -> str:
        """Return a column's name in the file, in quotes."""
        return repr(self._file_names.get(name, name))

    def messages(self, name: str) -> list[dict[str, Any]]:
        """Return the messages in a column, with keys and roles renamed as --columns says."""
        return messages_of(self.quoted(name), self[name], self._columns)

    def either(self, *names: str) -> tuple[str, Any]:
        """Return (name, value) of the first column that is set, or (names[0], None).

        names: two columns with the same meaning. Raises UnusableRowError if their values differ.
        """
        found = {name: self[name] for name in names if decode_json(self.get(name))}
        if len(found) == 2 and decode_json(found[names[0]]) != decode_json(found[names[1]]):
            both = " and ".join(map(self.quoted, names))
            reason = "two_systems" if "system" in names else "wrong_type"
            raise UnusableRowError(reason, f"{both} differ: keep one of them")
        return next(iter(found.items()), (names[0], None))


def detect_formats(fields: Mapping[str, Any]) -> list[str]:
    """Return the row formats that fit: `fields` has all their REQUIRED columns.

    The formats in PIECES (segments, tokens) are returned only if no other format fits, because
    transcripts may have both a text and a column "segments".
    """
    found = [
        name for name, needed in REQUIRED.items() if all(column in fields for column in needed)
    ]
    return [name for name in found if name not in PIECES] or found


def becomes_chat(fields: Mapping[str, Any], row_format: str) -> bool:
    """Return whether a row becomes a ChatDocument. fields: the row under Stoker's names."""
    if row_format == "prompt_completion":
        return _is_chat(fields.get("prompt"))
    return DOCUMENT_FORMATS[row_format] == "messages"


def document_fields(
    given: Mapping[str, Any], row_format: str, columns: Sequence[tuple[str, str]] = ()
) -> Mapping[str, Any]:
    """Return the checked fields of a row's document. Raises UnusableRowError for a bad row."""
    fields = _Row(given, columns)
    missing = [fields.quoted(name) for name in REQUIRED[row_format] if fields.get(name) is None]
    if missing:
        names = _columns_found(name for name, value in given.items() if value is not None)
        message = f"no {' and no '.join(missing)}, which the format {row_format} needs ({names})"
        if others := detect_formats({k: v for k, v in fields.items() if v is not None}):
            message += (
                f". It is a row of the format {others[0]}: files of different formats go into a "
                "recipe, each as an entry of `sources`"
            )
        raise UnusableRowError("missing_field", message)
    if row_format == "text":
        _check_not_blank(fields, "text")
        if _MEDIA_TAGS.search(fields["text"]):
            refuse_media("the row", fields)
        return fields
    if row_format in PIECES:
        column = REQUIRED[row_format][0]
        pieces = PIECES[row_format](fields.quoted(column), fields)
        return {"pieces": pieces, "special_tokens": fields.get("special_tokens") is True}
    refuse_media("the row", fields)
    name, tools = fields.either("tools", "functions")
    extras = {
        "tools": tools_of(fields.quoted(name), tools),
        "chat_template_kwargs": _template_kwargs(fields),
    }
    if row_format == "prompt_completion":
        return _prompt_and_completion(fields) | extras
    if row_format == "alpaca":
        messages = list(_alpaca_turns(fields))
    else:
        messages = fields.messages(REQUIRED[row_format][0])
    return {"messages": _with_system(messages, fields), **extras}


def _check_not_blank(fields: _Row, name: str) -> None:
    check_text(fields.quoted(name), fields[name])
    if not fields[name].strip():
        raise UnusableRowError("empty", f"empty document: {fields.quoted(name)} has no text")


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) or are_messages(decode_json(value))


def _prompt_and_completion(fields: _Row) -> dict[str, Any]:
    """Return {"prompt", "completion"} of a row: two texts, or two lists of messages.

    Exception: after a prompt of messages, a completion may be a text. Raises UnusableRowError for
    other mixtures and for faulty values.
    """
    prompt, completion = fields["prompt"], fields["completion"]
    prompt_name, completion_name = map(fields.quoted, ("prompt", "completion"))
    if _is_chat(prompt):
        for name in ("history", "reasoning_content"):
            if fields.get(name) and (name == "history" or not isinstance(completion, str)):
                problem = f"{fields.quoted(name)} goes into the messages of {prompt_name} "
                problem += f"or {completion_name}"
                raise UnusableRowError("wrong_type", problem)
        if isinstance(completion, list) and any(isinstance(one, str) for one in completion):
            raise wrong_type_error(
                completion_name, "a text, or messages of role and content", completion
            )
        prompt_turns = fields.messages("prompt")
        if isinstance(completion, str) and not _is_chat(completion):  # an answer without a role
            answer_turns = messages_of(completion_name, [_answer_message(fields, completion)])
        else:
            answer_turns = fields.messages("completion")
        last, first = prompt_turns[-1], answer_turns[0]
        answer_begun = last["content"].strip() and "tool_calls" not in last
        if answer_begun and last["role"] == first["role"] == ASSISTANT:
            message = f"{prompt_name} ends with the assistant's words, which {completion_name} "
            message += "would continue (TRL); here a turn is trained as a whole: move them into "
            message += completion_name
            raise UnusableRowError("prompt_begins_answer", message)
        return {"prompt": _with_system(prompt_turns, fields), "completion": answer_turns}
    if _is_chat(completion):
        raise wrong_type_error(prompt_name, f"a list of messages, as {completion_name} is", prompt)
    check_text(prompt_name, prompt)
    _check_not_blank(fields, "completion")
    chat_columns = {*OPTIONAL["prompt_completion"]} - {*MEDIA}
    values = {name: decode_json(fields.get(name)) for name in sorted(chat_columns)}
    values["chat_template_kwargs"] = _template_kwargs(fields)
    if names := [fields.quoted(k) for k, value in values.items() if value and str(value).strip()]:
        raise UnusableRowError(
            "wrong_type",
            f"{' and '.join(names)} go with messages, but {prompt_name} is a text; chats are "
            f"made where --columns names {prompt_name} instruction and {completion_name} output",
        )
    return {"prompt": prompt, "completion": completion}


def _alpaca_turns(fields: _Row) -> Iterator[dict[str, Any]]:
    """Yield the messages of an Alpaca row. Join instruction and input as LLaMA-Factory does."""
    instruction, given, output = fields["instruction"], fields.get("input") or "", fields["output"]
    for name, text in (("instruction", instruction), ("input", given)):
        check_text(fields.quoted(name), text)
    _check_not_blank(fields, "output")
    if decode_json(fields.get("history")):
        yield from fields.messages("history")
    question = "\n".join(text for text in (instruction, given) if text)
    yield {"role": "user", "content": question}
    calls = decode_json(output) if fields.get("tools") else None  # as in xLAM's data
    are_calls = isinstance(calls, list) and all(
        isinstance(call, Mapping) and {"name", "arguments"} <= call.keys() for call in calls
    )
    if calls and are_calls:
        tool_calls = tool_calls_of(fields.quoted("output"), calls)
        yield {**_answer_message(fields, ""), "tool_calls": tool_calls}
    else:
        yield _answer_message(fields, output)


def _answer_message(fields: _Row, text: str) -> dict[str, Any]:
    """Return an assistant message. Add the row's thought unless `text` begins with a thought."""
    thought = fields.get("reasoning_content")
    if not str(thought or "").strip() or split_thought(text)[0]:
        return {"role": ASSISTANT, "content": text}
    check_text(fields.quoted("reasoning_content"), thought)
    return {"role": ASSISTANT, "content": text, "reasoning_content": thought}


def _with_system(messages: list[dict[str, Any]], fields: _Row) -> list[dict[str, Any]]:
    """Return messages, first the row's system text if any. UnusableRowError if two texts differ."""
    name, system = fields.either("system", "system_prompt")
    if not system or (isinstance(system, str) and not system.strip()):
        return messages
    if not isinstance(system, list | Mapping):  # messages_of checks lists and objects
        check_text(fields.quoted(name), system)
    message = dict(system) if isinstance(system, Mapping) else {"content": system}
    system_messages = messages_of(fields.quoted(name), [message | {"role": "system"}])
    if [each["role"] for each in system_messages] != ["system"]:  # a part is a tool's result
        raise wrong_type_error(fields.quoted(name), "a text", system)
    first = system_messages[0]
    if messages[0]["role"] != "system":
        return [first, *messages]
    if messages[0]["content"] != first["content"]:
        problem = f"{fields.quoted(name)} and the first message give different system texts"
        raise UnusableRowError("two_systems", f"{problem}: keep one")
    return messages


def _template_kwargs(fields: _Row) -> Mapping[str, Any] | None:
    variables = decode_json(fields.get("chat_template_kwargs")) or {}
    try:
        check_template_variables(variables, fields.quoted("chat_template_kwargs"))
    except ValueError as error:
        raise UnusableRowError("wrong_type", str(error)) from None
    return {key: value for key, value in variables.items() if value is not None} or None
