"""Settings as argument classes declare them, and their values with where each came from."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from utils.config.errors import ConfigurationError

# Defaults that mean "nothing": null says the same.
NOTHING: tuple[Any, ...] = (None, [], {}, "", "no", "none", False, 0, -1)
_TYPE_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    dict: "a mapping",
    list: "a list",
    NoneType: "null",
}
FLAGS_RANK = 10**6  # above any number of recipe files
Arguments = TypeVar("Arguments")


class WrongValueError(ValueError):
    """A value that its setting cannot take; the text says what was expected and what came."""


class UnusableSettingError(LookupError):
    """A check read a setting that is missing or at fault itself: the check has nothing to say."""


@dataclass(frozen=True)
class Declaration:
    """One setting: a field of one argument class, with its type hint resolved.

    types: `int | None` as its members. default: None where the setting is required.
    """

    name: str
    owner: type
    types: tuple[Any, ...]
    field: dataclasses.Field

    @property
    def required(self) -> bool:
        """Whether the user has to give it."""
        missing = dataclasses.MISSING
        return self.field.default is missing and self.field.default_factory is missing

    @property
    def default(self) -> Any:
        """The declared default (a fresh one where it is mutable); None where it is required."""
        if self.required:
            return None
        if self.field.default_factory is not dataclasses.MISSING:
            return self.field.default_factory()
        default = self.field.default
        return default.value if isinstance(default, Enum) else default

    @property
    def help(self) -> str:
        """The help text, with the doubled percent signs of the libraries undone."""
        return str(self.field.metadata.get("help", "see --help")).replace("%%", "%")

    @property
    def origins(self) -> list[Any]:
        """The types that a value may have, `list[str]` as list."""
        return [get_origin(each) or each for each in self.types]

    @property
    def choices(self) -> tuple[Any, ...] | None:
        """The values allowed besides null, None when any value of the type is.

        `SomeEnum | str`, as transformers writes it, means the values of the enum.
        """
        if "choices" in self.field.metadata:
            return tuple(self.field.metadata["choices"])
        for member in self.types:
            if isinstance(member, type) and issubclass(member, Enum):
                return tuple(item.value for item in member)
        if set(self.origins) <= {Literal, NoneType}:
            return tuple(choice for member in self.types for choice in get_args(member))
        return None


def setting(default: Any = dataclasses.MISSING, help: str = "", **metadata: Any) -> Any:
    """Declare a setting in an argument class; without a default it is required."""
    metadata = {"help": help, **metadata}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def declared_settings(argument_classes: Iterable[type]) -> dict[str, Declaration]:
    """Return every setting the user may give, by name, in the order of the classes' fields."""
    declared: dict[str, Declaration] = {}
    for owner in argument_classes:
        refused = refused_settings([owner])
        hints = get_type_hints(owner)
        for each in dataclasses.fields(owner):
            if each.init and each.name not in refused:
                assert each.name not in declared, f"two argument classes declare {each.name}"
                types = union_members(hints[each.name])
                declared[each.name] = Declaration(each.name, owner, types, each)
    return declared


def refused_settings(argument_classes: Iterable[type]) -> dict[str, str]:
    """Return the inherited settings that the user may not give, each with the reason.

    An argument class lists them in its class variable `refused_settings`; they keep their defaults.
    """
    refused: dict[str, str] = {}
    for owner in argument_classes:
        refused |= getattr(owner, "refused_settings", {})
    return refused


def union_members(hint: Any) -> tuple[Any, ...]:
    """`X | Y` and `Optional[X]` as their members; anything else as itself alone."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def checked_value(declaration: Declaration, value: Any) -> Any:
    """Return the value as the type of the setting, raise WrongValueError where it is none.

    Nothing is converted that could hide a mistake: an integer may stand for a number and one
    value for a list of one, but 4.0 is no integer, 1 is not true, and "3" is no number. Null
    empties what has a default of nothing: an empty list, 0, false, -1 of max_steps.
    """
    if value is None and NoneType in declaration.types:
        return None
    if value is None and not declaration.required:
        if declaration.default in NOTHING:
            return declaration.default
        raise WrongValueError(f"it cannot be null; leave it out for {declaration.default}")
    choices = declaration.choices
    if choices is not None:
        if _is_among(value, choices):
            return value
        allowed = ", ".join(map(shown, choices))
        raise WrongValueError(f"expected one of {allowed}; got {json.dumps(value, default=str)}")
    # transformers writes `dict | str`, the string being JSON or a file: JSON alone is taken.
    types = [
        each for each in declaration.types if each is not str or dict not in declaration.origins
    ]
    for hint in types:
        for candidate in _readings(value, hint):
            if _fits(candidate, hint):
                return candidate
    names = " or ".join(dict.fromkeys(map(_type_name, types)))
    raise WrongValueError(f"expected {names}, got {json.dumps(value, default=str)}")


def _readings(value: Any, hint: Any) -> list[Any]:
    """Return what a value may stand for where this type is expected."""
    origin = get_origin(hint) or hint
    if origin is float and type(value) is int:
        return [float(value)]
    if origin is list:
        return [value, [value]]
    if origin is dict and isinstance(value, str):
        with suppress(json.JSONDecodeError):
            return [json.loads(value)]
    return [value]


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint) or hint
    if origin is Literal:
        return _is_among(value, get_args(hint))
    if origin is list:
        elements = union_members(*(get_args(hint) or (str,)))
        return isinstance(value, list) and all(
            any(_fits(item, element) for element in elements) for item in value
        )
    return isinstance(value, origin) and isinstance(value, bool) == (origin is bool)


def _is_among(value: Any, choices: Iterable[Any]) -> bool:
    """Whether it is one of them; 1 and true are equal, and neither stands for the other."""
    return any(type(value) is type(choice) and value == choice for choice in choices)


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(shown, get_args(hint)))
    return _TYPE_NAMES.get(get_origin(hint) or hint, str(hint))


def shown(value: Any) -> str:
    """Write a value for a message as a recipe or a flag would have it."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return " ".join(map(shown, value)) or "null"
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, default=str)


@dataclass(frozen=True)
class Given:
    """A value that is not the default, and its source: "recipes/demo.yaml:3", "--seed" or why.

    rank: 0 for what follows from other settings, then each recipe file in the order it was read;
    flags are above all.
    """

    value: Any
    source: str
    rank: int = 0


@dataclass(eq=False)
class SettingValues(Mapping[str, Any]):
    """The values of all settings by name, before any object is built of them.

    Reading a setting in `unusable` raises UnusableSettingError. `notes` are lines to log: what
    was overruled by a stronger source, and what was derived.
    """

    declared: Mapping[str, Declaration]
    given: dict[str, Given]
    unusable: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        if name in self.unusable:
            raise UnusableSettingError(name)
        return self.given[name].value if name in self.given else self.declared[name].default

    def __iter__(self) -> Iterator[str]:
        return iter(self.declared)

    def __len__(self) -> int:
        return len(self.declared)

    def source(self, name: str) -> str:
        """Return where a value came from: file and line, flag, why it was derived, "default"."""
        return self.given[name].source if name in self.given else "default"

    def rank(self, name: str) -> int:
        """Return the rank of the source of a setting: 0 where nobody gave it."""
        return self.given[name].rank if name in self.given else 0

    def derive(self, name: str, value: Any, why: str) -> None:
        """Set what follows from other settings, with a line to log."""
        self.given[name] = Given(value, why)
        self.notes.append(f"{name} {shown(value)}: {why}")

    def changed(self, name: str) -> bool:
        """Whether a setting that exists has another value than its default."""
        return name in self and self[name] != self.declared[name].default

    def shown(self, name: str) -> str:
        """Write a setting for a message: "seed 7 (recipes/demo.yaml:3)"."""
        return f"{name} {shown(self[name])} ({self.source(name)})"

    def build(self, argument_class: type[Arguments], **instead: Any) -> Arguments:
        """Build an argument class of its given settings; its ValueError is a ConfigurationError."""
        own = {
            name: entry.value
            for name, entry in self.given.items()
            if self.declared[name].owner is argument_class
        }
        try:
            return argument_class(**{**own, **instead})
        except ConfigurationError:
            raise
        except ValueError as error:
            raise ConfigurationError(str(error)) from error


# What reads the values of all settings and yields a line for each fault.
Check = Callable[[SettingValues], Iterable[str]]
