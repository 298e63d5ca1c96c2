"""Records, their locations, errors for unusable records, and checks of single values."""

import ast
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ASSISTANT = "assistant"  # the role that is trained on
FILTERED = "filtered"  # a filter of the recipe left the record out, which is no fault
OVERLONG = "overlong"
REPAIR = "repair it, or skip such rows with --on_bad_row skip"
MEDIA_KINDS = ("image", "video", "audio")
MEDIA = tuple(
    kind + suffix for kind in MEDIA_KINDS for suffix in ("", "s", "_path", "_paths", "_file")
)
NOTHING: tuple[Any, ...] = (None, "", [], {})


@dataclass(frozen=True)
class Location:
    """The file of a record, and the number of its line (from 1), row or JSON value (from 0).

    A work unit that begins inside a file counts lines from byte `offset` on. The lines before this
    byte are counted only when the location is printed.
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


@dataclass(frozen=True)
class Record:
    """The fields of one record.

    left_out: the columns of a Parquet file or datasets folder that were not read.
    """

    fields: Mapping[str, Any]
    location: Location
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class BadRow:
    """A record that cannot be used. reason: the name under which such records are counted."""

    reason: str
    message: str
    location: Location

    def __str__(self) -> str:
        return f"{self.location}: {self.message}"


class UnusableRowError(ValueError):
    """A row that cannot become a document. reason: the name under which such rows are counted."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason

    def at(self, location: Location) -> BadRow:
        """Return this error as a BadRow with its location."""
        return BadRow(self.reason, str(self), location)


def wrong_type(what: str, wanted: str, value: Any) -> UnusableRowError:
    """Return the error for a value of the wrong type."""
    message = f"{what} must be {wanted}, found {type(value).__name__}"
    return UnusableRowError("wrong_type", message)


def check_text(what: str, text: Any) -> None:
    """Raise UnusableRowError unless a value is a string that can be encoded as UTF-8."""
    if isinstance(text, bytes):  # Arrow's bytes that records.py could not decode as UTF-8
        raise UnusableRowError("invalid_utf8", f"{what} is not UTF-8")
    if not isinstance(text, str):
        raise wrong_type(what, "a string", text)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{what} holds half a surrogate pair at character {error.start}"
        raise UnusableRowError("invalid_utf8", message) from None


def decoded(value: Any) -> Any:
    """Decode a string that holds a JSON object or list; return any other value unchanged.

    Python's notation is decoded as well, because pandas writes objects into CSV in that form.
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


def refuse_media(where: str, fields: Mapping[str, Any]) -> None:
    """Raise UnusableRowError if a row or message has images, video or audio."""
    if held := [name for name in fields if name in MEDIA and decoded(fields[name]) not in NOTHING]:
        message = (
            f"{where} has {', '.join(map(repr, held))}: text alone is trained on; remove what the "
            "text can do without"
        )
        raise UnusableRowError("not_text", message)
