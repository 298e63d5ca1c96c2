"""Check one value of a recipe or flag against the type that its setting declares."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from utils.config.reading.declarations import Declaration, union_members

_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    dict: "a mapping",
    Path: "a path",
    NoneType: "null",
}
# Defaults that mean "nothing": null says the same.
NOTHING: tuple[Any, ...] = (None, [], {}, "", "no", "none", False, 0, -1)
_PLURALS = {str: "strings", int: "integers", float: "numbers", Path: "paths"}


class WrongValueError(ValueError):
    """A value that its setting cannot take; the text says what was expected and what came."""


def checked_value(declaration: Declaration, value: Any) -> Any:
    """Return the value as the type of the setting, raise WrongValueError where it is none.

    Nothing is converted that could hide a mistake: an integer may stand for a number and one
    value for a list of one, but 4.0 is no integer, 1 is not true, and "3" is no number. Null
    empties what has a default of nothing: an empty list, 0, false, -1 of max_steps.
    """
    members = union_members(declaration.hint)
    if value is None and NoneType in members:
        return None
    if value is None and not declaration.required:
        if declaration.default in NOTHING:
            return declaration.default
        raise WrongValueError(f"it cannot be null; leave it out for {declaration.default}")
    if declaration.choices is not None:
        several = isinstance(value, list) and list in map(_origin, members)
        for item in value if several else [value]:
            _check_choice(declaration.choices, item)
        return value
    if dict in map(_origin, members):
        # transformers writes `dict | str`, the string being JSON or a file: JSON alone is taken.
        members = tuple(member for member in members if member is not str)
    for member in members:
        matched, converted = _match(member, value)
        if matched:
            return converted
    expected = " or ".join(dict.fromkeys(map(_describe, members)))
    raise WrongValueError(f"expected {expected}, got {shown(value)}")


def shown(value: Any) -> str:
    """Write a value as a recipe would, with its type where that is not plain to see."""
    if isinstance(value, str):
        return f"the string {value!r}"
    if isinstance(value, Mapping | list):
        kind = "mapping" if isinstance(value, Mapping) else "list"
        return f"the {kind} {json.dumps(value, default=str)}"
    return json.dumps(value, default=str)


def _check_choice(choices: tuple[Any, ...], value: Any) -> None:
    # 1 and true are equal, and one of them is no choice of the other.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        words = (json.dumps(each) if isinstance(each, bool) else str(each) for each in choices)
        allowed = ", ".join(words)
        raise WrongValueError(f"expected one of {allowed}; got {shown(value)}")


def _origin(hint: Any) -> Any:
    return get_origin(hint) or hint


def _match(hint: Any, value: Any) -> tuple[bool, Any]:
    """Whether the value is of the hinted type, and the value as that type."""
    origin = _origin(hint)
    if origin is list:
        return _match_list(get_args(hint), value)
    if origin is dict:
        return _match_mapping(value)
    if origin is Literal:
        return value in get_args(hint), value
    if isinstance(value, bool):
        return origin is bool, value
    if (origin, type(value)) in ((float, int), (Path, str)):
        return True, origin(value)
    return isinstance(value, origin), value


def _match_list(element_hints: tuple[Any, ...], value: Any) -> tuple[bool, Any]:
    """Match a list of the hinted elements, or one element alone."""
    element_hint = element_hints[0] if element_hints else str
    items = value if isinstance(value, list) else [value]
    matches = [_match_any(union_members(element_hint), item) for item in items]
    return all(matched for matched, _ in matches), [converted for _, converted in matches]


def _match_any(hints: tuple[Any, ...], value: Any) -> tuple[bool, Any]:
    matches = (_match(hint, value) for hint in hints)
    return next((match for match in matches if match[0]), (False, value))


def _match_mapping(value: Any) -> tuple[bool, Any]:
    """Match a mapping, or on the command line its JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            return False, None
    return isinstance(value, Mapping), value


def _describe(hint: Any) -> str:
    origin = _origin(hint)
    if origin is list:
        element = get_args(hint)[0] if get_args(hint) else str
        return f"a list of {_PLURALS.get(element, 'values')}"
    if origin is Literal:
        return " or ".join(map(shown, get_args(hint)))
    return _NAMES.get(origin, getattr(origin, "__name__", str(origin)))
