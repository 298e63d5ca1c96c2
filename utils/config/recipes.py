"""Recipe files: strict YAML 1.2 with `extends`. Each value keeps its file and line for messages."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from utils.config.declarations import SettingValue
from utils.config.errors import did_you_mean
from utils.host.redaction import MASK

MASKED_NOTE = f"# Secrets are masked as {MASK}."  # in the config.yaml of a run
EXTENDS = "extends"

# Patterns of unquoted values that are not strings, by type.
_SCALARS = {
    "bool": r"true|True|TRUE|false|False|FALSE",
    "null": r"~|null|Null|NULL|",
    "int": r"[-+]?(?:0|[1-9][0-9_]*)",
    "float": r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
    r"|[0-9][0-9_]*[eE][-+]?[0-9]+)|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}


class YamlError(ValueError):
    """Text that is not a YAML mapping. The message starts with ":line: " if the line is known."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which here reads unquoted values as YAML 1.2 does, not as YAML 1.1.

    YAML 1.1 reads `eval_strategy: no` as false, 1:30 as 90, 010 as 8 and 1e-4 as a string.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own way

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a YAML mapping as a dict. Integer keys, as in {0: 64, 2000: 128}, become strings.

        Raises MarkedYAMLError for a key that repeats, and for other keys that are not strings.
        """
        names: set[str] = set()
        for key, _ in node.value:
            if node.start_mark.column:
                key.tag = key.tag.replace(":int", ":str")
            is_name, is_new = key.tag.endswith(":str"), key.value not in names
            if not is_name or not is_new:
                problem = f"{key.value} is given twice" if is_name else "a key has to be a name"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            names.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which quotes strings that YAML 1.1 or 1.2 reads as another type."""


for _kind, _pattern in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        # None: try the pattern for every first character.
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), None
        )


def load_mapping(text: str) -> dict[str, tuple[Any, int]]:
    """Return {key: (value, line number)} of a YAML mapping. Raises YamlError."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise YamlError(":1: expected settings as `name: value` lines")
        values = loader.construct_mapping(root, deep=True)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        what = getattr(error, "problem", None) or getattr(error, "reason", error)
        raise YamlError(f"{line}: not valid YAML: {what}") from error
    return {key.value: (values[key.value], key.start_mark.line + 1) for key, _ in root.value}


def scalar(word: str) -> Any:
    """Parse a word of a command line as YAML: 8, 0.5, true, [1, 2] or text."""
    try:
        return load_mapping(f"value: {word}")["value"][0]
    except YamlError:
        return word


def load_file(path: Path) -> dict[str, tuple[Any, int]]:
    """Return {key: (value, line)} of a YAML file. Raises YamlError with the path."""
    try:
        return load_mapping(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        meant = did_you_mean(path)
        raise YamlError(f"{path}: cannot be read: {error.strerror}{meant}") from error
    except UnicodeDecodeError as error:
        raise YamlError(f"{path}: not UTF-8 text") from error
    except YamlError as error:
        raise YamlError(f"{path}{error}") from error


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Return a mapping as text that YAML 1.1 and YAML 1.2 parse to the same values."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def entry_text(name: str, value: Any, comment: str = "") -> str:
    """Return a setting as text of a recipe.

    The comment is at the end of the line, or above a value of several lines.
    """
    mappings = isinstance(value, list) and any(isinstance(each, dict) for each in value)
    text = dump_yaml({name: value})
    if isinstance(value, (list, dict)) and not mappings:
        flow = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6)
        text = f"{name}: {flow}"
    if not comment or text.count("\n") > 1:
        return f"# {comment}\n{text}" if comment else text
    return f"{text.rstrip():<40} # {comment}\n"


def read_recipes(paths: Sequence[str]) -> tuple[dict[str, SettingValue], list[str]]:
    """Return {name: value with its source} of all recipes, and a list of error texts.

    If several recipes set a name, the last value is returned.
    """
    values: dict[str, SettingValue] = {}
    problems: list[str] = []
    files = (file for path in paths for file in _with_base_recipes(Path(path), (), problems))
    for rank, (path, settings) in enumerate(files, 1):
        for name, (value, line) in settings.items():
            values[name] = SettingValue(value, f"{path}:{line}", rank)
    return values, problems


def _with_base_recipes(
    path: Path, parents: tuple[Path, ...], problems: list[str]
) -> Iterator[tuple[Path, dict[str, tuple[Any, int]]]]:
    """Yield (file, settings) of the recipes that `path` extends, then of `path` itself.

    parents: the recipes that extend `path`. Error texts are added to `problems`.
    """
    try:
        if path in parents:
            raise YamlError(f"{path}: recipes extend each other in a circle")
        settings = load_file(path)
    except YamlError as error:
        problems.append(str(error))
        return
    extended, line = settings.pop(EXTENDS, ([], 0))
    for entry in extended if isinstance(extended, list) else [extended]:
        if isinstance(entry, str):
            file = Path(os.path.normpath(path.parent / entry))
            yield from _with_base_recipes(file, (*parents, path), problems)
        else:
            problems.append(f"{path}:{line}: {EXTENDS}: expected recipe files, not {entry!r}")
    if MASKED_NOTE in path.read_text(encoding="utf-8-sig"):
        problems += [
            f"{path}:{line}: {name} held a secret, which the run masked as {MASK}: give the value "
            f"in a copy of the file, without its line {MASKED_NOTE!r}"
            for name, (value, line) in settings.items()
            if MASK in str(value)
        ]
    yield path, settings
