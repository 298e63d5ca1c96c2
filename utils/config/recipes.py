"""Read recipe files: strict YAML, `extends`, later files win, every value with file and line.

A recipe is a flat mapping from settings to values. Plain scalars follow YAML 1.2: `no` and `on`
are strings, 1e-4 is a number. The value of a later file replaces the earlier one as a whole,
lists and mappings too, so that each setting comes from one line of one file.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

EXTENDS = "extends"


@dataclass(frozen=True)
class RecipeValue:
    """A value as a recipe gives it, and its source, "recipes/demo.yaml:7"."""

    value: Any
    source: str


@dataclass
class RecipeReading:
    """What the recipe files gave together, and the faults of the files."""

    values: dict[str, RecipeValue] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


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
    extended = own.pop(EXTENDS, None)
    for entry in _extended_paths(path, extended, reading.problems):
        _read_into(reading, entry, (*parents, resolved))
    reading.values.update(own)


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
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        return {}, [f"{path}: cannot read the recipe: {error.strerror}"]
    except UnicodeDecodeError as error:
        return {}, [f"{path}: the recipe is not UTF-8 text (byte {error.start})"]
    loader = _RecipeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return {}, [f"{path}: the recipe is empty"]
        if not isinstance(root, yaml.MappingNode):
            return {}, [f"{path}:{_line(root)}: expected settings as `name: value` lines"]
        problems = [f"{path}:{fault}" for fault in _key_faults(root)]
        values = {
            key.value: RecipeValue(
                loader.construct_object(value, deep=True), f"{path}:{_line(key)}"
            )
            for key, value in root.value
            if isinstance(key, yaml.ScalarNode)
        }
    except yaml.YAMLError as error:
        return {}, [f"{path}{_yaml_fault(error)}"]
    finally:
        loader.dispose()
    return values, problems


def _key_faults(node: yaml.Node) -> Iterator[str]:
    """Keys that are given twice or are no strings, at any depth: PyYAML would keep the last."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _key_faults(item)
    if not isinstance(node, yaml.MappingNode):
        return
    first_lines: dict[str, int] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode) or not key.tag.endswith(":str"):
            yield f"{_line(key)}: a key has to be a plain name"
        elif key.value in first_lines:
            first = first_lines[key.value]
            yield f"{_line(key)}: {key.value} is given twice, first in line {first}"
        else:
            first_lines[key.value] = _line(key)
        yield from _key_faults(value)


def _yaml_fault(error: yaml.YAMLError) -> str:
    """Write a YAML error as ":line: what is wrong"."""
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    return f"{f':{mark.line + 1}' if mark else ''}: not valid YAML: {what}"


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _display(path: Path) -> str:
    return os.path.relpath(path)


def _plain_scalars() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Return what an unquoted scalar may be besides a string, by its first character."""
    digits = r"[0-9][0-9_]*"
    exponent = r"[eE][-+]?[0-9]+"
    patterns = {
        "bool": ("tTfF", r"true|True|TRUE|false|False|FALSE"),
        "null": (["~", "n", "N", ""], r"~|null|Null|NULL|"),
        "int": ("-+0123456789", r"[-+]?(?:0|[1-9][0-9_]*)"),
        "float": (
            "-+.0123456789",
            rf"[-+]?(?:(?:{digits}\.(?:[0-9_]*)|\.{digits})(?:{exponent})?|{digits}{exponent})"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        ),
    }
    resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for kind, (first_characters, pattern) in patterns.items():
        for character in first_characters:
            resolvers.setdefault(character, []).append(
                (f"tag:yaml.org,2002:{kind}", re.compile(rf"^(?:{pattern})$"))
            )
    return resolvers


class _RecipeLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the plain scalars of YAML 1.2 instead of 1.1.

    1.1 reads `eval_strategy: no` as false, 1:30 as 90, 010 as 8 and 1e-4 as a string.
    """

    yaml_implicit_resolvers = _plain_scalars()
