"""Read recipe files: strict YAML, `extends`, later files win, every value with file and line.

A recipe is a flat mapping from settings to values. Plain scalars follow YAML 1.2: `no` and `on`
are strings, 1e-4 is a number. The value of a later file replaces the earlier one as a whole,
lists and mappings too, so that each setting comes from one line of one file.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from utils.config.reading.strict_yaml import YamlError, load_mapping

EXTENDS = "extends"


@dataclass(frozen=True)
class RecipeValue:
    """A value as a recipe gives it, its source, "recipes/demo.yaml:7", and the file's rank.

    Files rank in the order they were read, from 1: later ones win.
    """

    value: Any
    source: str
    rank: int = 1


@dataclass
class RecipeReading:
    """What the recipe files gave together, and the faults of the files.

    `unread` says that a file could not be read at all, so that what it would give is not known.
    """

    values: dict[str, RecipeValue] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unread: bool = False
    files: int = 0


def read_recipes(paths: Sequence[str | Path]) -> RecipeReading:
    """Read the recipes in order, later over earlier; the faults are collected, none is raised."""
    reading = RecipeReading()
    for path in paths:
        _read_into(reading, Path(path), ())
    return reading


def _read_into(reading: RecipeReading, path: Path, parents: tuple[Path, ...]) -> None:
    """Read what the recipe extends, depth first, then the recipe over it."""
    resolved = path.resolve()
    if resolved in parents:
        chain = " -> ".join(map(_display, (*parents[parents.index(resolved) :], resolved)))
        reading.problems.append(f"{path}: recipes extend each other in a circle: {chain}")
        return
    own, problems = _read_file(path)
    reading.problems += problems
    reading.unread |= bool(problems) and not own
    extended = own.pop(EXTENDS, None)
    for entry in _extended_paths(path, extended, reading.problems):
        _read_into(reading, entry, (*parents, resolved))
    reading.files += 1
    reading.values.update((name, replace(value, rank=reading.files)) for name, value in own.items())


def _extended_paths(path: Path, extended: RecipeValue | None, problems: list[str]) -> list[Path]:
    if extended is None:
        return []
    entries = extended.value if isinstance(extended.value, list) else [extended.value]
    if not all(isinstance(entry, str) for entry in entries):
        problems.append(
            f"{extended.source}: extends: expected a list of recipe files, relative to this file"
        )
        return []
    return [Path(os.path.normpath(path.parent / entry)) for entry in entries]


def _read_file(path: Path) -> tuple[dict[str, RecipeValue], list[str]]:
    """Return the settings of one file and its faults."""
    try:
        values, faults = load_mapping(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        return {}, [f"{path}: cannot read the recipe: {error.strerror}"]
    except UnicodeDecodeError as error:
        return {}, [f"{path}: the recipe is not UTF-8 text (byte {error.start})"]
    except YamlError as error:
        return {}, [f"{path}{error}"]
    settings = {
        name: RecipeValue(value, f"{path}:{line}") for name, (value, line) in values.items()
    }
    return settings, [f"{path}{fault}" for fault in faults]


def _display(path: Path) -> str:
    return os.path.relpath(path)
