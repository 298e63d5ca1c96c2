"""Values of rows: checked texts, JSON that is kept as text, and what is no text."""

import ast
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

ASSISTANT = "assistant"  # the role that is trained on
MEDIA_KINDS = ("image", "video", "audio")
MEDIA = tuple(
    kind + suffix for kind in MEDIA_KINDS for suffix in ("", "s", "_path", "_paths", "_file")
)

NOTHING: tuple[Any, ...] = (None, "", [], {})


class UnusableRowError(ValueError):
    """A row that cannot become a document; `reason` is the name it is counted under."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


def wrong_type(what: str, wanted: str, value: Any) -> UnusableRowError:
    """Return the error for a value of another type."""
    message = f"{what} must be {wanted}, found {type(value).__name__}"
    return UnusableRowError("wrong_type", message)


def check_text(what: str, text: Any) -> None:
    """Raise UnusableRowError unless a value is a string that UTF-8 can write."""
    if isinstance(text, bytes):  # of Arrow, which its reader could not decode
        raise UnusableRowError("invalid_utf8", f"{what} is not UTF-8")
    if not isinstance(text, str):
        raise wrong_type(what, "a string", text)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{what} holds half a surrogate pair at character {error.start}"
        raise UnusableRowError("invalid_utf8", message) from None


def decoded(value: Any) -> Any:
    """Return what a JSON text of an object or a list stands for; anything else as it is.

    pandas writes objects into CSV as Python does, with other quotes.
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
    """Raise UnusableRowError where a row or message comes with pictures, films or sound."""
    if held := [name for name in fields if name in MEDIA and decoded(fields[name]) not in NOTHING]:
        message = (
            f"{where} has {', '.join(map(repr, held))}: text alone is trained on; remove what the "
            "text can do without"
        )
        raise UnusableRowError("not_text", message)
