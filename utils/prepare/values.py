"""Records of source files, their locations, errors for unusable records, and checks of values."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from utils.config.preparation import MESSAGE_KEYS, MESSAGE_ROLES

ASSISTANT = "assistant"  # the role that is trained on
FILTERED = "filtered"  # reason of a record that the user's filter or function leaves out
OVERLONG = "overlong"
REPAIR = "repair it, or skip such rows with --on_bad_row skip"
MEDIA_KINDS = ("image", "video", "audio")
MEDIA = tuple(
    kind + suffix for kind in MEDIA_KINDS for suffix in ("", "s", "_path", "_paths", "_file")
)
EMPTY_VALUES: tuple[Any, ...] = (None, "", [], {})
MASKS = ("assistant_masks", "completion_mask")
# Windows line ends, control and zero-width characters, traces of wrong decoding or of HTML.
ODD_CHARACTERS = re.compile(
    "[\r\x00-\x08\x0b\x0c\x0e-\x1f\u200b\ufeff\ufffd]|â€|&(?:amp|lt|gt|quot|nbsp|#39);"
)
LOCATIONS = b"locations"  # the key of packed locations in the metadata of a record batch

# Pieces of a document in order: (text or token ids, whether the piece is trained on).
Pieces = list[tuple[str | list[int], bool]]


@dataclass(frozen=True)
class Location:
    """The location of a record in a file.

    unit: "line", "row", "record" (a JSON value), or "" for a whole file. number: the number of the
    line, row or JSON value. Lines are counted from 1, rows and JSON values from 0. offset: the byte
    from which lines are counted. Printing a location adds the lines before this byte.
    """

    path: str
    unit: str = ""
    number: int = 0
    offset: int = 0

    def __str__(self) -> str:
        if self.unit != "line":
            return f"{self.path} {self.unit} {self.number}" if self.unit else self.path
        number, left = self.number, self.offset
        if left:
            with Path(self.path).open("rb") as stream:
                while block := stream.read(min(1 << 20, left)):
                    number, left = number + block.count(b"\n"), left - len(block)
        return f"{self.path}:{number}"


def pack_locations(locations: Sequence[Location]) -> str:
    """Return locations as JSON text: a list of [path, unit, offset, [numbers]].

    Consecutive locations in one file share an entry.
    """
    groups = groupby(locations, key=lambda each: (each.path, each.unit, each.offset))
    packed = [
        [str(Path(path).absolute()), unit, offset, [each.number for each in own]]
        for (path, unit, offset), own in groups
    ]
    return json.dumps(packed)


def unpack_locations(text: str | bytes) -> list[Location]:
    """Return the record locations in the JSON text that `pack_locations` made."""
    return [
        Location(path, unit, number, offset)
        for path, unit, offset, numbers in json.loads(text)
        for number in numbers
    ]


@dataclass(frozen=True)
class Record:
    """One record of a source. left_out: columns of a Parquet or Arrow file that were not read."""

    fields: Mapping[str, Any]
    location: Location
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class BadRow:
    """A record that is not used. reason: the name under which such records are counted."""

    reason: str
    message: str
    location: Location

    def __str__(self) -> str:
        return f"{self.location}: {self.message}"


class UnusableRowError(ValueError):
    """Error for a row that cannot become a document. reason: the name for counting such rows."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason

    def at(self, location: Location) -> BadRow:
        """Return this error as the BadRow of the record at `location`."""
        return BadRow(self.reason, str(self), location)


def wrong_type_error(what: str, wanted: str, value: Any) -> UnusableRowError:
    """Return the error "WHAT must be WANTED, found TYPE", where TYPE is the type of `value`."""
    message = f"{what} must be {wanted}, found {type(value).__name__}"
    return UnusableRowError("wrong_type", message)


def duplicate_keys_error(where: str, *names: str) -> UnusableRowError:
    """Return the error for a message that has the same content under two keys (`names`)."""
    problem = f"{where} has {' and '.join(map(repr, names))}: keep one of them"
    return UnusableRowError("wrong_type", problem)


def as_json(where: str, result: Any) -> str:
    """Return a tool's result as JSON text. Raises UnusableRowError if JSON cannot express it."""
    try:
        return json.dumps(result, ensure_ascii=False)
    except TypeError as error:  # bytes or dates of Arrow
        problem = f"{where} has a result that is no text and no JSON ({error})"
        raise UnusableRowError("not_text", problem) from error


def join_text_parts(said: Any) -> Any:
    """Join a list of texts or text parts (Mistral, OpenAI). Return other values unchanged."""
    if not isinstance(said, list):
        return said
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in said]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else said


def split_thought(text: Any) -> tuple[str, Any]:
    """Split a text into the thought at its start, with <think> and </think>, and the rest.

    Returns "" and `text` if the text does not start with a thought.
    """
    if not str(text).lstrip().startswith("<think>"):
        return "", text
    thought, end, rest = text.partition("</think>")
    return thought + end, rest


def check_text(what: str, text: Any) -> None:
    """Raise UnusableRowError unless `text` is a string that can be encoded as UTF-8.

    what: the text's name in the error.
    """
    if isinstance(text, bytes):  # Arrow's bytes that records.py could not decode as UTF-8
        raise UnusableRowError("invalid_utf8", f"{what} is not UTF-8")
    if not isinstance(text, str):
        raise wrong_type_error(what, "a string", text)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{what} holds half a surrogate pair at character {error.start}"
        raise UnusableRowError("invalid_utf8", message) from None


def tools_of(column: str, value: Any) -> list[Any] | None:
    """Return a row's tools in OpenAI's form. None means that the row has no tools.

    column: the column's name in errors. Raises UnusableRowError if `value` is no list of JSON
    schemas.
    """
    tools = decode_json(value)
    if not tools or (isinstance(tools, str) and not tools.strip()):
        return None
    found = []
    for item in map(decode_json, tools if isinstance(tools, list) else [tools]):
        if not isinstance(item, Mapping):
            raise wrong_type_error(column, "a list of JSON schemas", value)
        tool = dict(item)
        if "input_schema" in tool and "parameters" not in tool:  # Anthropic
            tool = {"parameters" if key == "input_schema" else key: tool[key] for key in tool}
        if "function" not in tool and "name" in tool:
            tool = {"type": "function", "function": tool}
        function = tool.get("function")
        if isinstance(function, Mapping) and "parameters" in function:
            function = {**function, "parameters": decode_json(function["parameters"])}
            tool = {**tool, "function": function}
        found.append(tool)
    return found


def read_segments(column: str, fields: Mapping[str, Any]) -> Pieces:
    """Return pairs (text, whether trained on) of a row in axolotl's `input_output` format.

    column: the column's name in errors. Raises UnusableRowError for malformed segments.
    """
    segments = decode_json(fields["segments"])
    if not isinstance(segments, list) or not segments:
        raise wrong_type_error(column, "a list of {label: true or false, text: ...}", segments)
    for number, each in enumerate(segments):
        where = f"segment {number} of {column}"
        if not isinstance(each, Mapping) or not isinstance(each.get("label"), bool):
            raise wrong_type_error(where, "{label: true or false, text: ...}", each)
        check_text(f"'text' of {where}", each.get("text"))
    if not any(each["label"] and each["text"].strip() for each in segments):
        problem = f"empty document: no segment of {column} with label true has a text"
        raise UnusableRowError("empty", problem)
    return [(each["text"], each["label"]) for each in segments]


def read_tokens(column: str, fields: Mapping[str, Any]) -> Pieces:
    """Return a tokenized row as [(token ids, whether trained on)], cut where the mask changes.

    column: the column's name in errors. Raises UnusableRowError for padding, and for labels that
    are neither -100 nor the token's id.
    """
    ids = fields["input_ids"]
    given = {name: fields[name] for name in ("labels", *MASKS) if fields.get(name) is not None}
    for row in (ids, *given.values()):
        are_integers = isinstance(row, list) and all(isinstance(each, int) for each in row)
        if not are_integers or len(row) != len(ids) or not ids:
            what = " and ".join(map(repr, (column.strip("'"), *given)))
            message = f"{what} must be lists of whole numbers, equally long"
            raise UnusableRowError("wrong_type", message)
    if 0 in (fields.get("attention_mask") or ()):
        raise UnusableRowError("wrong_type", "'attention_mask' has a 0: take the padding out")
    labels = given.get("labels", ids)
    if any(label not in (-100, token) for label, token in zip(labels, ids, strict=True)):
        message = "'labels' must be -100, or the token's id at the same index"
        raise UnusableRowError("wrong_type", message)
    masks = [given[name] for name in MASKS if name in given]
    mask = masks[0] if masks else [label != -100 for label in labels]
    runs = groupby(zip(mask, ids, strict=True), lambda pair: bool(pair[0]))
    return [([token for _, token in run], is_trained) for is_trained, run in runs]


def decode_json(value: Any) -> Any:
    """Return the object or list in a JSON string. Return any other value unchanged.

    Python's notation ({'a': None}) is also decoded, because pandas writes it into CSV files.
    """
    if not isinstance(value, str):
        return value
    try:
        if value.lstrip()[:2].startswith(("{", "[", '"{', '"[')):
            return json.loads(value)
    except (ValueError, RecursionError):
        if value.lstrip().startswith(("{'", "[{'")):
            with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                return ast.literal_eval(value.strip())
    return value


def renamed(fields: Mapping[str, Any], columns: Sequence[tuple[str, str]]) -> Mapping[str, Any]:
    """Return fields with names changed by (old, new) pairs.

    A field is left out if another column is renamed to its name.
    """
    ours = dict(columns)
    taken = set(ours.values())
    return {
        ours.get(name, name): value
        for name, value in fields.items()
        if name in ours or name not in taken
    }


def renamed_message(given: Any, names: Sequence[tuple[str, str]]) -> Any:
    """Return a message with keys and role renamed. Return a value that is no message unchanged.

    names: pairs (name in the file, Stoker's name).
    """
    message = decode_json(given) if names else given
    if not names or not isinstance(message, Mapping):
        return given
    roles = {theirs: ours for theirs, ours in names if ours in MESSAGE_ROLES}
    keys = [(theirs, ours) for theirs, ours in names if ours in MESSAGE_KEYS]
    return {
        key: roles.get(str(value), value) if key in ("role", "from") else value
        for key, value in renamed(message, keys).items()
    }


def refuse_media(where: str, fields: Mapping[str, Any]) -> None:
    """Raise UnusableRowError for images, video or audio. where: the fields' name in the error."""
    if media := [
        name for name in fields if name in MEDIA and decode_json(fields[name]) not in EMPTY_VALUES
    ]:
        message = (
            f"{where} has {', '.join(map(repr, media))}: text alone is trained on; remove what the "
            "text can do without"
        )
        raise UnusableRowError("not_text", message)
