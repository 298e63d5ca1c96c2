"""Declarations of settings, and the values of all settings with their sources."""

import copy
import dataclasses
import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from utils.config.errors import ConfigurationError
from utils.config.foreign_words import refused

# Defaults that mean "nothing". A setting with such a default may be set to null.
EMPTY_DEFAULTS: tuple[Any, ...] = (None, [], {}, "", "no", "none", False, 0, -1)
_TYPE_NAMES: dict[Any, str] = {
    bool: "true or false", int: "an integer", float: "a number", str: "a string",
    dict: "a mapping", list: "a list", NoneType: "null",
}  # fmt: skip
LM_EVAL, TORCHAO = "lm_eval>=0.4.13,<0.5", "torchao>=0.18,<0.19"  # packages of some settings
FLAGS_RANK = 10**6  # above any number of recipe files
Arguments = TypeVar("Arguments")


class UnusableSettingError(LookupError):
    """Error on reading a missing or faulty setting. It ends the check that reads the setting."""


@dataclass(frozen=True)
class Declaration:
    """The declaration of a setting: a field of the dataclass `owner`, such as RunArguments.

    types    members of the type hint: (int, NoneType) for `int | None`
    origins  `types` without type arguments: list instead of `list[str]`
    choices  the allowed values besides null; None allows all values of the types
    default  None if the setting is required
    """

    name: str
    owner: type
    types: tuple[Any, ...]
    origins: list[Any]
    choices: tuple[Any, ...] | None
    required: bool
    default: Any
    help: str


def setting(default: Any, choices: Sequence[Any] | None = None, also: type | None = None) -> Any:
    """Return the dataclass field of a setting that has choices or a list as default.

    also: another type that the user's value may have; utils/config/settings.py converts such values
    """
    metadata = {"choices": choices, "also": [also] if also else []}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def declared_settings(argument_classes: Iterable[type]) -> dict[str, Declaration]:
    """Return {name: Declaration} of the settings that a user may give.

    If several classes have a field of the same name, the first class declares the setting.
    """
    declared: dict[str, Declaration] = {}
    for owner in argument_classes:
        hints = get_type_hints(owner)
        for each in dataclasses.fields(owner):
            if each.init and each.name not in refused() and each.name not in declared:
                declared[each.name] = _declaration(owner, hints[each.name], each)
    return declared


def _declaration(owner: type, hint: Any, each: dataclasses.Field) -> Declaration:
    types, missing = (*_members(hint), *each.metadata.get("also", ())), dataclasses.MISSING
    default = each.default
    if each.default_factory is not missing:
        default = each.default_factory()
    choices = each.metadata.get("choices")
    for member in types:  # transformers' `SomeEnum | str` allows only the enum's values
        if isinstance(member, type) and issubclass(member, Enum):
            choices = tuple(item.value for item in member)
    texts = help_texts()
    return Declaration(
        name=each.name,
        owner=owner,
        types=types,
        origins=[get_origin(member) or member for member in types],
        choices=choices,
        required=default is missing,
        default=None if default is missing else getattr(default, "value", default),
        help=texts.get(f"{owner.__name__}.{each.name}") or texts.get(each.name, "see --help"),
    )


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def checked_value(declaration: Declaration, value: Any) -> Any:
    """Return the value converted to the setting's type. Raises ValueError if it does not fit.

    An integer may become a float, a single value a list, and a JSON text a mapping. But 4.0 is no
    integer, 1 is not true, and "3" is no number. If the type does not include null, null means the
    default. Then the default must be one of EMPTY_DEFAULTS.
    """
    choices, origins, got = declaration.choices, declaration.origins, json.dumps(value, default=str)
    if value is None and not declaration.required:
        if NoneType in origins or declaration.default in EMPTY_DEFAULTS:
            return None if NoneType in origins else declaration.default
        raise ValueError(f"it cannot be null; leave it out for {declaration.default}")
    if choices is not None:
        # --log_level DEBUG means debug.
        word = value.lower() if isinstance(value, str) and value not in choices else value
        if any(type(word) is type(choice) and word == choice for choice in choices):
            return word
        raise ValueError(f"expected one of {', '.join(map(shown, choices))}; got {got}")
    types = declaration.types
    if dict in origins:  # transformers' `dict | str` may be a file name; here only JSON is allowed
        types = tuple(each for each in types if each is not str)
        if isinstance(value, str):
            with suppress(json.JSONDecodeError):
                value = json.loads(value)
    elif type(value) is int and float in origins:
        value = float(value)
    elif list in origins and str not in origins and not isinstance(value, list):
        value = [value]
    if any(_has_type(value, hint) for hint in types):
        return value
    names = dict.fromkeys(_TYPE_NAMES.get(get_origin(hint) or hint, str(hint)) for hint in types)
    raise ValueError(f"expected {' or '.join(names)}, got {got}")


def _has_type(value: Any, hint: Any) -> bool:
    if isinstance(value, list) and get_origin(hint) is list:
        elements = _members(*get_args(hint))
        return all(any(_has_type(item, element) for element in elements) for item in value)
    return type(value) is (get_origin(hint) or hint)  # isinstance would take true for an int


def is_true(variable: str, environment: Mapping[str, str]) -> bool:
    """Return whether an environment variable has a value that accelerate reads as true."""
    words = ("1", "true", "yes", "on", "y", "t")  # accelerate/utils/environment.py, str_to_bool
    return environment.get(variable, "").lower() in words


def is_installed(module: str) -> bool:
    """Return whether Python finds a module, without importing it."""
    return importlib.util.find_spec(module) is not None


def shown(value: Any) -> str:
    """Return a value as text for a message, written as in a recipe or after a flag."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return " ".join(map(shown, value)) or "null"
    return f"{value:.12g}" if isinstance(value, float) else json.dumps(value, default=str)


def counted_ranks(number: int) -> str:
    """Return "1 rank" or "8 ranks"."""
    return f"{number} {'rank' if number == 1 else 'ranks'}"


def placeholder(declaration: Declaration) -> str:
    """Return the placeholder of a setting's value in help texts: "a|b" or, for example, INTEGER."""
    if declaration.choices is not None:
        return "|".join(map(shown, declaration.choices))
    words = {bool: "true|false", int: "INTEGER", float: "NUMBER", dict: "JSON", list: "VALUE ..."}
    return next((word for each, word in words.items() if each in declaration.origins), "TEXT")


@dataclass(frozen=True)
class SettingValue:
    """A setting's value and its source: "recipes/demo.yaml:3", "--seed", or why it was derived.

    rank: precedence of the source. A derived value has 0, the recipe files have 1, 2, ... in
    their order, and flags have FLAGS_RANK. The value with the highest rank wins.
    """

    value: Any
    source: str
    rank: int = 0


DEFAULT = SettingValue(None, "default")


@dataclass(eq=False)
class SettingValues(Mapping[str, Any]):
    """A mapping {name: value} of all settings. `build` makes a dataclass of some of them.

    unusable     missing or faulty settings; reading one raises UnusableSettingError
    notes        log lines on overruled and derived settings
    environment  environment variables of this process, or of the launch that a dry run plans
    """

    declared: Mapping[str, Declaration]
    given: dict[str, SettingValue]
    unusable: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def world_size(self) -> int:
        """Return the number of processes of the launch."""
        return int(self.environment.get("WORLD_SIZE", "1"))

    @property
    def data_ranks(self) -> int:
        """Return the number of data-parallel ranks: world_size / context_parallel."""
        return max(self.world_size // max(self["context_parallel"], 1), 1)

    @property
    def on_cpu(self) -> bool:
        """Return whether the settings or the launch ask for the CPU."""
        return bool(self["use_cpu"] or is_true("ACCELERATE_USE_CPU", self.environment))

    def __getitem__(self, name: str) -> Any:
        if name in self.unusable:
            raise UnusableSettingError(name)
        if name in self.given:
            return self.given[name].value
        return copy.copy(self.declared[name].default)  # no reader can change the default

    def __iter__(self) -> Iterator[str]:
        return iter(self.declared)

    def __len__(self) -> int:
        return len(self.declared)

    def written(self, name: str) -> Any:
        """Return a setting's value for a recipe. Counts are integers: 180, not 180.0."""
        value, default = self[name], self.declared[name].default
        is_count = type(default) is int or name.endswith(("_steps", "_tokens", "_epochs"))
        return int(value) if is_count and type(value) is float and value.is_integer() else value

    def source(self, name: str) -> str:
        """Return the source of a value: file and line, flag, reason to derive it, or "default"."""
        return self.given.get(name, DEFAULT).source

    def rank(self, name: str) -> int:
        """Return the rank of a setting's source (see SettingValue).

        Default and derived values have rank 0.
        """
        return self.given.get(name, DEFAULT).rank

    def derive(self, name: str, value: Any, why: str) -> None:
        """Set a value that follows from other settings, and add a line to `notes`."""
        self.given[name] = SettingValue(value, why)
        self.notes.append(f"{name} {shown(value)}: {why}")

    def changed(self, name: str) -> bool:
        """Return whether a setting is declared and differs from its default."""
        return name in self and self[name] != self.declared[name].default

    def shown(self, name: str) -> str:
        """Return a setting as text for a message: "seed 7 (recipes/demo.yaml:3)"."""
        return f"{name} {shown(self[name])} ({self.source(name)})"

    def build(self, argument_class: type[Arguments], **instead: Any) -> Arguments:
        """Return an instance of `argument_class` with the given settings. `instead` overrides them.

        Raises ConfigurationError if the class refuses a value.
        """
        own = [name for name in self.given if self.declared[name].owner is argument_class]
        try:
            return argument_class(**{**{name: self.given[name].value for name in own}, **instead})
        except ConfigurationError:
            raise
        except ValueError as error:
            text = str(error)
            if "bf16/gpu" in text:
                text = f"{self.shown('bf16')}: no GPU here computes in bfloat16: give --bf16 false "
                text += "(or --use_cpu true, to train on the CPU)"
            raise ConfigurationError(text) from error


# A function that reads the values of all settings and yields a line per fault.
SettingsCheck = Callable[[SettingValues], Iterable[str]]


@cache
def help_file() -> dict[str, Any]:
    """Return the content of help.yaml: the topics of `--help`, and the texts of all settings."""
    import yaml  # the launcher imports this module before it checks the packages

    text = Path(__file__).with_name("help.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


@cache
def help_texts() -> dict[str, str]:
    """Return {setting, or CLASS.SETTING: its help text}."""
    texts = help_file()["texts"]
    return {**texts["libraries"], **texts["stoker"]}
