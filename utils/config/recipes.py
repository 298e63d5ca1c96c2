"""Recipe files: strict YAML 1.2, `extends`, later files win, every value with file and line."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from utils.config.declarations import Given

# What an unquoted scalar may be besides a string, and the characters it may begin with.
_SCALARS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "int": (r"[-+]?(?:0|[1-9][0-9_]*)", list("-+0123456789")),
    "float": (
        r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
        r"|[0-9][0-9_]*[eE][-+]?[0-9]+)|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}


class YamlError(ValueError):
    """Text that is no mapping in YAML; the message starts with ":line: " where that is known."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the plain scalars of YAML 1.2 instead of 1.1.

    1.1 reads `eval_strategy: no` as false, 1:30 as 90, 010 as 8 and 1e-4 as a string.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own way


class _Dumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or 1.2 would take for something else."""


for _kind, (_pattern, _first) in _SCALARS.items():
    for _reader in (_Loader, _Dumper):
        _reader.add_implicit_resolver(
            f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), _first
        )


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
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        line = f":{mark.line + 1}" if mark else ""
        raise YamlError(f"{line}: not valid YAML: {what}") from error
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


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


EXTENDS = "extends"


def read_recipes(paths: Sequence[str | Path]) -> tuple[dict[str, Given], list[str]]:
    """Return the settings of the recipes, later over earlier, and the faults of the files."""
    values: dict[str, Given] = {}
    problems: list[str] = []
    files = (file for path in paths for file in _with_extended(Path(path), (), problems))
    for rank, (path, settings) in enumerate(files, 1):
        values |= {
            name: Given(value, f"{path}:{line}", rank) for name, (value, line) in settings.items()
        }
    return values, problems


def _with_extended(
    path: Path, parents: tuple[Path, ...], problems: list[str]
) -> Iterator[tuple[Path, dict[str, tuple[Any, int]]]]:
    """Yield what a recipe extends, depth first, then its own settings, each with its line."""
    chain = (*parents, path.resolve())
    if path.resolve() in parents:
        circle = " -> ".join(map(os.path.relpath, chain[chain.index(path.resolve()) :]))
        problems.append(f"{path}: recipes extend each other in a circle: {circle}")
        return
    try:
        settings, faults = load_mapping(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        problems.append(f"{path}: cannot read the recipe: {error.strerror}")
        return
    except UnicodeDecodeError as error:
        problems.append(f"{path}: the recipe is not UTF-8 text (byte {error.start})")
        return
    except YamlError as error:
        problems.append(f"{path}{error}")
        return
    problems += [f"{path}{fault}" for fault in faults]
    extended, line = settings.pop(EXTENDS, ([], 0))
    entries = extended if isinstance(extended, list) else [extended]
    if all(isinstance(entry, str) for entry in entries):
        for entry in entries:
            yield from _with_extended(Path(os.path.normpath(path.parent / entry)), chain, problems)
    else:
        problems.append(
            f"{path}:{line}: extends: expected a list of recipe files, relative to this file"
        )
    yield path, settings
