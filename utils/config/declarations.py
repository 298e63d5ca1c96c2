"""The settings that argument classes declare: name, type, default, and which are refused."""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


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
        return (
            self.field.default is dataclasses.MISSING
            and self.field.default_factory is dataclasses.MISSING
        )

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
        """The help text, with argparse's doubled percent signs undone."""
        return str(self.field.metadata.get("help", "see --help")).replace("%%", "%")

    @property
    def choices(self) -> tuple[Any, ...] | None:
        """The values allowed besides null, None when any value of the type is.

        As in transformers' HfArgumentParser, `SomeEnum | str` means the values of the enum.
        """
        if "choices" in self.field.metadata:
            return tuple(self.field.metadata["choices"])
        for member in union_members(self.hint):
            if isinstance(member, type) and issubclass(member, Enum):
                return tuple(item.value for item in member)
        named = [member for member in union_members(self.hint) if member is not NoneType]
        if all(get_origin(member) is Literal for member in named):
            return tuple(choice for member in named for choice in get_args(member))
        return None


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
            if not field.init or field.name in refused:
                continue
            assert field.name not in declared, f"two argument classes declare {field.name}"
            declared[field.name] = Declaration(field.name, owner, hints[field.name], field)
    return declared


def refused_settings(argument_classes: Sequence[type]) -> dict[str, str]:
    """Return the inherited settings that have no place here, with what to use instead.

    An argument class lists them in a class variable `refused_settings`, a mapping from the name
    to the reason. They are no flags and keep the default of the class.
    """
    refused: dict[str, str] = {}
    for owner in argument_classes:
        listed: Mapping[str, str] = getattr(owner, "refused_settings", {})
        refused.update(listed)
    return refused


# The settings of one start: their values, where each came from, and the objects built of them.

DEFAULT_SOURCE = "default"


class UnusableSettingError(LookupError):
    """A check read a setting that is missing or at fault itself: the check has nothing to say."""


class SettingValues(Mapping[str, Any]):
    """The values of all settings by name, before any object is built of them.

    `sources` says where a value came from: "recipes/demo.yaml:7", "--seed" or "default". `ranks`
    orders the sources: 0 for defaults and what follows from other settings, then each recipe file
    in the order it was read, flags above all. Reading a setting in `unusable` raises
    UnusableSettingError.
    """

    def __init__(
        self,
        declared: Mapping[str, Declaration],
        given: Mapping[str, Any],
        sources: Mapping[str, str],
        unusable: frozenset[str] = frozenset(),
        ranks: Mapping[str, int] | None = None,
    ) -> None:
        self.declared = declared
        self.unusable = unusable
        self.given = dict(given)
        self.ranks = dict(ranks or {})
        self.sources = {name: sources.get(name, DEFAULT_SOURCE) for name in declared}
        self._values = {
            name: given.get(name, declaration.default) for name, declaration in declared.items()
        }

    def __getitem__(self, name: str) -> Any:
        if name in self.unusable:
            raise UnusableSettingError(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def rank(self, name: str) -> int:
        """Return the rank of the source of a setting: 0 where nobody gave it."""
        return self.ranks.get(name, 0)

    def replaced(self, changes: Mapping[str, tuple[Any, str]]) -> "SettingValues":
        """Return the values with some others, each with why, that nobody gave."""
        given = self.given | {name: value for name, (value, _) in changes.items()}
        sources = self.sources | {name: why for name, (_, why) in changes.items()}
        ranks = {name: rank for name, rank in self.ranks.items() if name not in changes}
        return SettingValues(self.declared, given, sources, self.unusable - changes.keys(), ranks)

    def without(self, names: Collection[str]) -> "SettingValues":
        """Return the values with some settings back at their defaults."""
        given = {name: value for name, value in self.given.items() if name not in names}
        sources = {name: source for name, source in self.sources.items() if name not in names}
        ranks = {name: rank for name, rank in self.ranks.items() if name not in names}
        return SettingValues(self.declared, given, sources, self.unusable, ranks)

    def changed(self, name: str) -> bool:
        """Whether a setting that exists has another value than its default."""
        return name in self and self[name] != self.declared[name].default

    def shown(self, name: str) -> str:
        """Write a setting for a message: "seed 7 (recipes/demo.yaml:3)"."""
        value = self[name]
        text = f"{value:g}" if isinstance(value, float) else str(value)
        if isinstance(value, list):
            text = " ".join(map(str, value)) or "null"
        return f"{name} {text} ({self.sources[name]})"


@dataclass(frozen=True)
class Settings:
    """What a start was given, and one instance per argument class, in the order of the classes.

    Unpacks into the instances: `run, data, model, training = settings`. `notes` are lines to log:
    what has no effect because a flag or a later recipe says otherwise, and what was derived.
    """

    instances: tuple[Any, ...]
    values: SettingValues
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.instances)

    @property
    def sources(self) -> dict[str, str]:
        """Where the value of each setting came from: file and line, flag, or "default"."""
        return self.values.sources

    def as_dict(self) -> dict[str, Any]:
        """Return every setting as plain data."""
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in self.values.items()
        }

    def changed(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults."""
        return {name: value for name, value in self.values.items() if self.values.changed(name)}
