"""YAML as recipes use it: plain scalars of YAML 1.2, safe tags, no key twice, lines kept."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml


class YamlError(ValueError):
    """Text that is no mapping in YAML; the message starts with ":line: " where that is known."""


def load_mapping(text: str) -> tuple[dict[str, tuple[Any, int]], list[str]]:
    """Return each key of a YAML mapping with value and line, and ":line: fault" for bad keys.

    Raises YamlError where the text cannot be read at all.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            raise YamlError(": it is empty")
        if not isinstance(root, yaml.MappingNode):
            raise YamlError(f":{_line(root)}: expected settings as `name: value` lines")
        values = {
            key.value: (loader.construct_object(value, deep=True), _line(key))
            for key, value in root.value
            if isinstance(key, yaml.ScalarNode)
        }
    except yaml.YAMLError as error:
        raise YamlError(_describe(error)) from error
    return values, list(_key_faults(root))


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Write a mapping of plain data as YAML that `load_mapping` and YAML 1.1 readers read alike."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


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
            yield f":{_line(key)}: a key has to be a plain name"
        elif key.value in first_lines:
            first = first_lines[key.value]
            yield f":{_line(key)}: {key.value} is given twice, first in line {first}"
        else:
            first_lines[key.value] = _line(key)
        yield from _key_faults(value)


def _describe(error: yaml.YAMLError) -> str:
    """Write a YAML error as ":line: what is wrong"."""
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    return f"{f':{mark.line + 1}' if mark else ''}: not valid YAML: {what}"


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


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


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the plain scalars of YAML 1.2 instead of 1.1.

    1.1 reads `eval_strategy: no` as false, 1:30 as 90, 010 as 8 and 1e-4 as a string.
    """

    yaml_implicit_resolvers = _plain_scalars()


def _scalars_of_both_versions() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    ours, theirs = _plain_scalars(), yaml.SafeDumper.yaml_implicit_resolvers
    return {
        character: [*theirs.get(character, []), *ours.get(character, [])]
        for character in {*theirs, *ours}
    }


class _Dumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or 1.2 would take for something else."""

    yaml_implicit_resolvers = _scalars_of_both_versions()


# Read recipe files: strict YAML, `extends`, later files win, every value with file and line.

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
