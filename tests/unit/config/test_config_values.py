"""A value is of the type its setting declares, or an error says what was expected."""

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest

from utils.config.command_line import WrongValueError, checked_value
from utils.config.declarations import declared_settings


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Everything:
    integer: int
    number: float
    text: str
    switch: bool
    path: Path
    maybe: int | None
    texts: list[str]
    numbers: list[float] | None
    mapping: dict[str, Any] | str | None
    bare_mapping: dict
    named: Literal["a", "b"]
    named_or_null: Literal["a", "b"] | None
    colour: Colour | str
    chosen: str = dataclasses.field(metadata={"choices": ["x", "y"]})
    text_or_false: str | Literal[False] | None
    text_or_switch: str | bool


DECLARED = declared_settings([Everything])


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("integer", 3, 3),
        ("number", 3, 3.0),
        ("number", 0.5, 0.5),
        ("text", "", ""),
        ("switch", True, True),
        ("path", "a/b", Path("a/b")),
        ("maybe", None, None),
        ("maybe", 4, 4),
        ("texts", ["a"], ["a"]),
        ("texts", "a", ["a"]),
        ("texts", [], []),
        ("numbers", [1, 2.5], [1.0, 2.5]),
        ("numbers", None, None),
        ("mapping", {"a": [1]}, {"a": [1]}),
        ("mapping", '{"a": 1}', {"a": 1}),
        ("mapping", None, None),
        ("bare_mapping", {"a": 1}, {"a": 1}),
        ("named", "a", "a"),
        ("named_or_null", None, None),
        ("colour", "blue", "blue"),
        ("chosen", "x", "x"),
        ("text_or_false", False, False),
        ("text_or_false", "space", "space"),
        ("text_or_switch", True, True),
        ("text_or_switch", "all", "all"),
    ],
)
def test_values_of_the_declared_type_pass(name, given, expected):
    value = checked_value(DECLARED[name], given)
    assert (value, type(value)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("integer", 4.5, "expected an integer, got 4.5"),
        ("integer", 4.0, "expected an integer, got 4.0"),
        ("integer", True, "expected an integer, got true"),
        ("integer", "4", "expected an integer, got the string '4'"),
        ("integer", None, "expected an integer, got null"),
        ("integer", [4], r"expected an integer, got the list \[4\]"),
        ("number", "yes please", "expected a number, got the string 'yes please'"),
        ("number", False, "expected a number, got false"),
        ("text", 5, "expected a string, got 5"),
        ("text", ["a"], "expected a string, got the list"),
        ("text", {"a": 1}, 'expected a string, got the mapping {"a": 1}'),
        ("switch", 1, "expected true or false, got 1"),
        ("switch", "yes", "expected true or false, got the string 'yes'"),
        ("path", 3, "expected a path, got 3"),
        ("maybe", "x", "expected an integer or null, got"),
        ("texts", [1], r"expected a list of strings, got the list \[1\]"),
        ("texts", {"a": "b"}, "expected a list of strings, got the mapping"),
        ("texts", None, "expected a list of strings, got null"),
        ("numbers", ["x"], "expected a list of numbers or null, got"),
        ("mapping", "x.json", "expected a mapping or null, got the string 'x.json'"),
        ("mapping", "[1]", "expected a mapping or null"),
        ("mapping", [1], "expected a mapping or null"),
        ("named", "c", "expected one of a, b; got the string 'c'"),
        ("named", None, "expected one of a, b; got null"),
        ("named", True, "expected one of a, b; got true"),
        ("colour", "green", "expected one of red, blue; got the string 'green'"),
        ("chosen", ["z"], "expected one of x, y; got"),
        ("text_or_false", True, "expected a string or false or null, got true"),
    ],
)
def test_other_values_are_refused_with_what_was_expected(name, given, message):
    with pytest.raises(WrongValueError, match=message):
        checked_value(DECLARED[name], given)


def test_a_list_does_not_pass_for_one_of_the_choices_of_a_scalar():
    with pytest.raises(WrongValueError, match="expected one of x, y"):
        checked_value(DECLARED["chosen"], ["x"])
