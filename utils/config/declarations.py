"""Settings: their declarations in argument classes, and their values with the source of each."""

import copy
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from utils.config.errors import ConfigurationError
from utils.config.unknown_names import REFUSED

# Defaults that mean "nothing". A setting with such a default may be set to null.
NOTHING: tuple[Any, ...] = (None, [], {}, "", "no", "none", False, 0, -1)
_TYPE_NAMES: dict[Any, str] = {
    bool: "true or false", int: "an integer", float: "a number", str: "a string",
    dict: "a mapping", list: "a list", NoneType: "null",
}  # fmt: skip
FLAGS_RANK = 10**6  # above any number of recipe files
Arguments = TypeVar("Arguments")


class UnusableSettingError(LookupError):
    """An attempt to read a setting that is missing or faulty. A check that does so ends."""


@dataclass(frozen=True)
class Declaration:
    """A setting: a field of an argument class.

    types: the members of its type hint, such as `int | None`. origins: the same, with list for
    `list[str]`. choices: the allowed values besides null; None: any value of these types. default:
    None if the setting is required.
    """

    name: str
    owner: type
    types: tuple[Any, ...]
    origins: list[Any]
    choices: tuple[Any, ...] | None
    required: bool
    default: Any
    help: str


def setting(default: Any = dataclasses.MISSING, help: str = "", **metadata: Any) -> Any:
    """Declare a setting in an argument class; without a default it is required."""
    metadata = {"help": help, **metadata}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def declared_settings(argument_classes: Iterable[type]) -> dict[str, Declaration]:
    """Return every setting the user may give, by name, in the order of the classes' fields.

    Fields in REFUSED are left out and keep their defaults. If two classes have a field of the same
    name, the first class declares the setting.
    """
    declared: dict[str, Declaration] = {}
    for owner in argument_classes:
        hints = get_type_hints(owner)
        for each in dataclasses.fields(owner):
            if each.init and each.name not in REFUSED and each.name not in declared:
                declared[each.name] = _declaration(owner, hints[each.name], each)
    return declared


def _declaration(owner: type, hint: Any, each: dataclasses.Field) -> Declaration:
    types, missing = _members(hint), dataclasses.MISSING
    default = each.default
    if each.default_factory is not missing:
        default = each.default_factory()
    choices = each.metadata.get("choices")
    for member in types:  # `SomeEnum | str`, as transformers writes it, means the enum's values
        if isinstance(member, type) and issubclass(member, Enum):
            choices = tuple(item.value for item in member)
    return Declaration(
        name=each.name,
        owner=owner,
        types=types,
        origins=[get_origin(member) or member for member in types],
        choices=choices,
        required=default is missing,
        default=None if default is missing else getattr(default, "value", default),
        help=str(each.metadata.get("help", "see --help")).replace("%%", "%"),  # argparse's escape
    )


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the members of `X | Y` or `Optional[X]`; for any other hint, the hint alone."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def checked_value(declaration: Declaration, value: Any) -> Any:
    """Return the value as the type of the setting; raise ValueError with what was expected.

    A conversion must not hide a mistake. An integer is accepted as a number, and one value as a
    list of one; but 4.0 is not an integer, 1 is not true, and "3" is not a number. null resets a
    setting whose default is empty: an empty list, 0, false, the -1 of max_steps.
    """
    choices, origins, got = declaration.choices, declaration.origins, json.dumps(value, default=str)
    if value is None and not declaration.required:
        if NoneType in origins or declaration.default in NOTHING:
            return None if NoneType in origins else declaration.default
        raise ValueError(f"it cannot be null; leave it out for {declaration.default}")
    if choices is not None:
        if any(type(value) is type(choice) and value == choice for choice in choices):
            return value
        raise ValueError(f"expected one of {', '.join(map(shown, choices))}; got {got}")
    types = declaration.types
    if dict in origins:  # transformers' `dict | str` may be a file name; here only JSON is allowed
        types = tuple(each for each in types if each is not str)
        if isinstance(value, str):
            with suppress(json.JSONDecodeError):
                value = json.loads(value)
    elif type(value) is int and float in origins:
        value = float(value)
    elif list in origins and str not in origins and not isinstance(value, list):
        value = [value]
    if any(_fits(value, hint) for hint in types):
        return value
    names = dict.fromkeys(_TYPE_NAMES.get(get_origin(hint) or hint, str(hint)) for hint in types)
    raise ValueError(f"expected {' or '.join(names)}, got {got}")


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(value, list) and get_origin(hint) is list:
        elements = _members(*get_args(hint))
        return all(any(_fits(item, element) for element in elements) for item in value)
    return type(value) is (get_origin(hint) or hint)  # true is no integer


def is_true(variable: str, environment: Mapping[str, str]) -> bool:
    """Return whether a variable has one of the words that mean true to accelerate."""
    words = ("1", "true", "yes", "on", "y", "t")  # accelerate/utils/environment.py, str_to_bool
    return environment.get(variable, "").lower() in words


def shown(value: Any) -> str:
    """Return a value as text for a message, written as in a recipe or after a flag."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return " ".join(map(shown, value)) or "null"
    return f"{value:.12g}" if isinstance(value, float) else json.dumps(value, default=str)


def placeholder(declaration: Declaration) -> str:
    """Return the placeholder of a setting's value in a command line: its choices, or its type."""
    if declaration.choices is not None:
        return "|".join(map(shown, declaration.choices))
    words = {bool: "true|false", int: "INTEGER", float: "NUMBER", dict: "JSON", list: "VALUE ..."}
    return next((word for each, word in words.items() if each in declaration.origins), "TEXT")


@dataclass(frozen=True)
class Given:
    """A value and its source: "recipes/demo.yaml:3", "--seed", or the reason of a derived value.

    rank: the strength of the source. 0: derived from other settings. 1 and more: recipe files in
    the order they were read. FLAGS_RANK: flags.
    """

    value: Any
    source: str
    rank: int = 0


DEFAULT = Given(None, "default")


@dataclass(eq=False)
class SettingValues(Mapping[str, Any]):
    """The values of all settings by name, before objects are built from them.

    unusable: missing or faulty settings; reading one raises UnusableSettingError. notes: lines to
    log on overruled and derived settings. environment: the variables of the launch. In a dry run
    they describe the launch that is planned.
    """

    declared: Mapping[str, Declaration]
    given: dict[str, Given]
    unusable: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def world_size(self) -> int:
        """Return the number of processes of the launch."""
        return int(self.environment.get("WORLD_SIZE", "1"))

    @property
    def on_cpu(self) -> bool:
        """Return whether the settings or the launch ask for the CPU."""
        return bool(self["use_cpu"] or is_true("ACCELERATE_USE_CPU", self.environment))

    def __getitem__(self, name: str) -> Any:
        if name in self.unusable:
            raise UnusableSettingError(name)
        if name in self.given:
            return self.given[name].value
        return copy.copy(self.declared[name].default)  # each reader gets its own list

    def __iter__(self) -> Iterator[str]:
        return iter(self.declared)

    def __len__(self) -> int:
        return len(self.declared)

    def written(self, name: str) -> Any:
        """Return a value as a recipe has it: a count is 180, not 180.0."""
        value, default = self[name], self.declared[name].default
        is_count = type(default) is int or name.endswith(("_steps", "_tokens", "_epochs"))
        return int(value) if is_count and type(value) is float and value.is_integer() else value

    def source(self, name: str) -> str:
        """Return the source of a value: file and line, flag, why it was derived, or "default"."""
        return self.given.get(name, DEFAULT).source

    def rank(self, name: str) -> int:
        """Return the rank of the source of a setting: 0 if nobody gave it."""
        return self.given.get(name, DEFAULT).rank

    def derive(self, name: str, value: Any, why: str) -> None:
        """Set a value that follows from other settings, and add a line to log."""
        self.given[name] = Given(value, why)
        self.notes.append(f"{name} {shown(value)}: {why}")

    def changed(self, name: str) -> bool:
        """Return whether a setting exists and has another value than its default."""
        return name in self and self[name] != self.declared[name].default

    def shown(self, name: str) -> str:
        """Return a setting as text for a message: "seed 7 (recipes/demo.yaml:3)"."""
        return f"{name} {shown(self[name])} ({self.source(name)})"

    def build(self, argument_class: type[Arguments], **instead: Any) -> Arguments:
        """Build an argument class from its given settings. Raises ConfigurationError."""
        own = [name for name in self.given if self.declared[name].owner is argument_class]
        try:
            return argument_class(**{**{name: self.given[name].value for name in own}, **instead})
        except ConfigurationError:
            raise
        except ValueError as error:
            raise ConfigurationError(str(error)) from error


# A function that reads the values of all settings and yields a line per fault.
Check = Callable[[SettingValues], Iterable[str]]
