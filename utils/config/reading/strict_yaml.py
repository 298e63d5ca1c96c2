"""YAML as recipes use it: plain scalars of YAML 1.2, safe tags, no key twice, lines kept."""

import re
from collections.abc import Iterator, Mapping
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
