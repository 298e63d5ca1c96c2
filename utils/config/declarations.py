"""Settings as argument classes declare them, and their values with where each came from."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from utils.config.errors import ConfigurationError

# Defaults that mean "nothing": null says the same.
NOTHING: tuple[Any, ...] = (None, [], {}, "", "no", "none", False, 0, -1)
_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    dict: "a mapping",
    NoneType: "null",
}


class WrongValueError(ValueError):
    """A value that its setting cannot take; the text says what was expected and what came."""


@dataclasses.dataclass(frozen=True)
class Declaration:
    """One setting: a field of one argument class, with its type hint resolved."""

    name: str
    owner: type
    hint: Any
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
    def types(self) -> tuple[Any, ...]:
        """The types that a value may have: `int | None` as its members."""
        return union_members(self.hint)

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
        named = [member for member in self.types if member is not NoneType]
        if all(get_origin(member) is Literal for member in named):
            return tuple(choice for member in named for choice in get_args(member))
        return None


def setting(default: Any = dataclasses.MISSING, help: str = "", **metadata: Any) -> Any:
    """Declare a setting in an argument class; without a default it is required."""
    metadata = {"help": help, **metadata}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def union_members(hint: Any) -> tuple[Any, ...]:
    """`X | Y` and `Optional[X]` as their members; anything else as itself alone."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def declared_settings(argument_classes: Iterable[type]) -> dict[str, Declaration]:
    """Return every setting the user may give, by name, in the order of the classes' fields."""
    declared: dict[str, Declaration] = {}
    for owner in argument_classes:
        refused = refused_settings([owner])
        hints = get_type_hints(owner)
        for field in dataclasses.fields(owner):
            if field.init and field.name not in refused:
                assert field.name not in declared, f"two argument classes declare {field.name}"
                declared[field.name] = Declaration(field.name, owner, hints[field.name], field)
    return declared


def refused_settings(argument_classes: Iterable[type]) -> dict[str, str]:
    """Return the inherited settings that the user may not give, each with the reason.

    An argument class lists them in its class variable `refused_settings`; they keep their defaults.
    """
    refused: dict[str, str] = {}
    for owner in argument_classes:
        refused |= getattr(owner, "refused_settings", {})
    return refused


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
    if declaration.choices is not None:
        # 1 and true are equal, and one of them is no choice of the other.
        if any(type(value) is type(choice) and value == choice for choice in declaration.choices):
            return value
        allowed = ", ".join(_plain(choice) for choice in declaration.choices)
        raise WrongValueError(f"expected one of {allowed}; got {_shown(value)}")
    types = declaration.types
    if dict in map(_origin, types):
        # transformers writes `dict | str`, the string being JSON or a file: JSON alone is taken.
        types = tuple(each for each in types if each is not str)
    try:
        return _as_one_of(types, value)
    except WrongValueError:
        expected = " or ".join(dict.fromkeys(map(_described, types)))
        raise WrongValueError(f"expected {expected}, got {_shown(value)}") from None


def _as_one_of(types: Iterable[Any], value: Any) -> Any:
    for each in types:
        try:
            return _as_type(each, value)
        except WrongValueError:
            continue
    raise WrongValueError


def _as_type(hint: Any, value: Any) -> Any:
    """Return the value as the hinted type; raises WrongValueError."""
    origin = _origin(hint)
    if origin is list:
        element = union_members(*get_args(hint)) if get_args(hint) else (str,)
        items = value if isinstance(value, list) else [value]
        return [_as_one_of(element, item) for item in items]
    if origin is Literal:
        fits = any(type(value) is type(each) and value == each for each in get_args(hint))
    elif origin is dict and isinstance(value, str):
        try:
            value = json.loads(value)  # as flags have it
        except json.JSONDecodeError:
            raise WrongValueError from None
        fits = isinstance(value, dict)
    elif origin is float and type(value) is int:
        return float(value)
    else:
        fits = isinstance(value, origin) and isinstance(value, bool) == (origin is bool)
    if not fits:
        raise WrongValueError
    return value


def _origin(hint: Any) -> Any:
    return get_origin(hint) or hint


def _described(hint: Any) -> str:
    origin = _origin(hint)
    if origin is list:
        plurals = {str: "strings", int: "integers", float: "numbers"}
        return f"a list of {plurals.get(next(iter(get_args(hint)), str), 'values')}"
    if origin is Literal:
        return " or ".join(map(_plain, get_args(hint)))
    return _NAMES.get(origin, getattr(origin, "__name__", str(origin)))


def _plain(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _shown(value: Any) -> str:
    """Write a value as a recipe would, with its type where that is not plain to see."""
    if isinstance(value, str):
        return f"the string {value!r}"
    kind = "the list " if isinstance(value, list) else "the mapping "
    return (kind if isinstance(value, list | dict) else "") + json.dumps(value, default=str)


FLAGS_RANK = 10**6  # above any number of recipe files
Arguments = TypeVar("Arguments")


class UnusableSettingError(LookupError):
    """A check read a setting that is missing or at fault itself: the check has nothing to say."""


@dataclass(frozen=True)
class Given:
    """A value that is not the default, and its source: "recipes/demo.yaml:3", "--seed" or why.

    rank: 0 for what follows from other settings, then each recipe file in the order it was read;
    flags are above all.
    """

    value: Any
    source: str
    rank: int = 0


@dataclass(frozen=True, eq=False)
class SettingValues(Mapping[str, Any]):
    """The values of all settings by name, before any object is built of them.

    Reading a setting in `unusable` raises UnusableSettingError. `notes` are lines to log: what
    was overruled by a stronger source, and what was derived.
    """

    declared: Mapping[str, Declaration]
    given: Mapping[str, Given]
    unusable: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

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

    def replaced(self, changes: Mapping[str, Given], notes: Iterable[str] = ()) -> "SettingValues":
        """Return the values with some others, and more notes."""
        return replace(self, given={**self.given, **changes}, notes=(*self.notes, *notes))

    def derived(self, name: str, value: Any, why: str) -> "SettingValues":
        """Return the values with one that follows from the others, and a note of it."""
        return self.replaced({name: Given(value, why)}, [f"{name} {shown(value)}: {why}"])

    def without(self, names: Iterable[str], notes: Iterable[str] = ()) -> "SettingValues":
        """Return the values with some settings back at their defaults, and more notes."""
        names = set(names)
        given = {name: entry for name, entry in self.given.items() if name not in names}
        return replace(self, given=given, notes=(*self.notes, *notes))

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


def shown(value: Any) -> str:
    """Write a value for a message, about as a flag would have it."""
    if isinstance(value, list):
        return " ".join(map(str, value)) or "null"
    return f"{value:g}" if isinstance(value, float) else str(value)
