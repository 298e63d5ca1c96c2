"""The settings of one start: their values, where each came from, and the objects built of them."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.config.reading.declarations import Declaration

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
