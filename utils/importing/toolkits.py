"""The keys of axolotl, LLaMA-Factory and TRL, and the state of a conversion.

Stoker's name for a toolkit's key comes from the toolkit's table in toolkits.yaml, else from
utils/config/foreign_words.yaml. A key in neither table keeps its name.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from utils.config.arguments import (
    DataArguments,
    FineTuneConfig,
    ModelArguments,
    PretrainConfig,
    RunArguments,
)
from utils.config.declarations import SettingValue, checked_value, declared_settings
from utils.config.foreign_words import by_name, other_names, refused
from utils.config.own_code import OwnCode

UNKNOWN_KEY = "unknown here, left out"
EMPTY = "empty there"
OFF = "off or 0 there: no effect"
BY_DEFAULT = "as it is here without a line"
# Settings that are always on in Stoker. If a config turns one off, the training differs.
_ALWAYS_ON = (
    "shuffle_dataset", "remove_unused_columns", "average_tokens_across_devices",
    "completion_only_loss",
)  # fmt: skip
_OFF_VALUES: tuple[Any, ...] = (None, False, 0, "", "none", [], {})


@dataclass(frozen=True)
class Toolkit:
    """A toolkit whose configs can be converted.

    marks: keys that suggest this toolkit. names: {the toolkit's key: Stoker's name}. defaults:
    {Stoker's name: the toolkit's default}. winners: keys that overrule another key with the same
    meaning. null_counts: whether null in a config replaces a default.
    """

    marks: Sequence[str]
    names: Mapping[str, str]
    defaults: Mapping[str, Any]
    winners: Sequence[str] = ()
    null_counts: bool = True


_TABLES = yaml.safe_load(Path(__file__).with_name("toolkits.yaml").read_text(encoding="utf-8"))
TOOLKITS = {kind: Toolkit(**table) for kind, table in _TABLES["toolkits"].items()}
# {key of a toolkit or of a dataset's entry: why the key has no counterpart here}.
LEFT = by_name(_TABLES["left"])
# {key: how the training differs without the key}, and {key: values that make no difference}.
CHANGES, SAME = by_name(_TABLES["changes"]), _TABLES["same"]
# Keys that change no weights, data or evaluation. foreign_words.yaml explains each of them.
HARMLESS_KEYS = frozenset(_TABLES["harmless"].split())
DATA = _TABLES["data"]  # names and prompts of datasets


class Conversion:
    """The state of a conversion: the settings of another toolkit, and Stoker's recipes.

    given: {Stoker's name: value} of settings that are not converted yet. run: {setting: (value,
    comment)} of the training recipe. data: settings of the first data recipe. more_data: for each
    further data recipe, the settings that replace those in `data`. changes: {how the training
    differs: keys}. notes: {reason: other keys that the recipes leave out}. commands: shell commands
    to run before the preparation. functions: {name: Python code that builds prompts}.
    """

    def __init__(self, kind: str, entries: Mapping[str, tuple[Any, int]], path: Path, gpus: int):
        self.kind, self.path, self.gpus = kind, path, gpus
        self.its_default = f"the default of {kind}"
        self.source_keys: dict[str, str] = {}  # {setting: the config's key that it comes from}
        self.run: dict[str, tuple[Any, str]] = {}
        self.data: dict[str, Any] = {}
        self.more_data: list[dict[str, Any]] = []
        self.changes: dict[str, list[str]] = {}
        self.notes: dict[str, list[str]] = {}
        self.commands: list[str] = []
        self.functions: dict[str, str] = {}
        self.template = ""  # text of a chat template inside the config
        self.given: dict[str, SettingValue] = {}
        toolkit = TOOLKITS[kind]
        for key, (value, line) in entries.items():
            name = toolkit.names.get(key) or other_names().get(key, key)
            name = name if name.isidentifier() and key not in {*LEFT, *CHANGES} else key
            new, old = SettingValue(value, key, line), self.given.get(name)
            if value in (None, "") and not (toolkit.null_counts and name in toolkit.defaults):
                self.note(key, EMPTY)
                continue
            if old:  # two keys mean the same: keep the one that is on, else the toolkit's choice
                ranks = [(is_off(each.value), each.source not in toolkit.winners)
                         for each in (old, new)]  # fmt: skip
                old, new = (old, new) if ranks[1] < ranks[0] else (new, old)
                self.note(old.source, f"{new.source} decides, which means the same")
            self.given[name] = new
        for name, value in toolkit.defaults.items():
            self.given.setdefault(name, SettingValue(value, self.its_default))
        self.pretraining = self.value("stage") == "pt" or "pretraining_dataset" in entries
        training = PretrainConfig if self.pretraining else FineTuneConfig
        classes = (RunArguments, DataArguments, ModelArguments, OwnCode, training)
        self.declared = declared_settings(classes)

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value of a setting in `given`, or `default`. name: Stoker's name."""
        return self.given[name].value if name in self.given else default

    def take(self, name: str, default: Any = None) -> Any:
        """Remove a setting from `given` and return its value, or `default`."""
        return self.given.pop(name).value if name in self.given else default

    def note(self, key: str, reason: str) -> None:
        """Add a config's key to `notes` under a reason. Toolkit defaults are not noted."""
        if key != self.its_default and key not in self.notes.setdefault(reason, []):
            self.notes[reason].append(key)

    def change(self, key: str, reason: str) -> None:
        """Add a key to `changes`. reason: how Stoker's training differs from the toolkit's."""
        if key not in self.changes.setdefault(reason, []):
            self.changes[reason].append(key)

    def drop(self, name: str, reason: str) -> None:
        """Remove a setting from `given`, and add its key to `notes` under the reason."""
        if name in self.given:
            self.note(self.given.pop(name).source, reason)

    def leave(self, key: str, value: Any, ours: str = "") -> None:
        """Add a key without a counterpart to `notes`, or to `changes` if the training may differ.

        key: may be a path such as datasets.roles. ours: Stoker's name for the key, if different.
        """
        name = key.rpartition(".")[2]
        reason = LEFT.get(name) or CHANGES.get(name) or refused().get(ours or name)
        reason = reason or other_names().get(name, UNKNOWN_KEY)
        if value in (None, ""):
            self.note(key, EMPTY)
        elif is_off(value) and name not in _ALWAYS_ON:
            self.note(key, OFF)
        elif value in SAME.get(name, ()):
            self.note(key, BY_DEFAULT)
        else:
            is_name = reason.isidentifier()
            reason = f"here it is {reason}, with another value" if is_name else reason
            add = self.note if name in LEFT or name in HARMLESS_KEYS else self.change
            add(key, reason)

    def leave_all(self, path: str, values: Mapping[str, Any]) -> None:
        """Call `leave` for all keys in a mapping, at any depth. path: the key of the mapping."""
        for key, value in values.items():
            if isinstance(value, Mapping) and value:
                self.leave_all(f"{path}.{key}", value)
            else:
                self.leave(f"{path}.{key}", value)

    def data_recipes(self) -> list[dict[str, Any]]:
        """Return a dict of settings for each data recipe, without empty settings."""
        common = {name: value for name, value in self.data.items() if name != "eval_sources"}
        recipes = [self.data, *({**common, **own} for own in self.more_data)]
        return [{k: v for k, v in each.items() if v not in (None, {}, "")} for each in recipes]

    def put(self, name: str, value: Any, comment: str = "", key: str = "") -> None:
        """Add a setting to the training recipe.

        A value that Stoker's setting refuses is listed as a change instead. A value that is the
        default of Stoker and of the toolkit is listed as a note instead, as is an empty default
        (None, 0, False ...). comment: text after the value in the recipe. key: the config's key,
        if it differs from `name`.
        """
        key = key or name
        declaration = self.declared.get(name)
        if declaration is not None:
            try:
                checked = checked_value(declaration, value)
                value = value if type(value) is int and checked == value else checked  # 4, not 4.0
            except ValueError as error:
                self.change(key, str(error))
                return
            if value == declaration.default and (not value or comment == self.its_default):
                self.note(key, BY_DEFAULT)
                return
        self.run[name] = (value, comment)
        self.source_keys[name] = key

    def move(self, name: str) -> None:
        """Move a setting with its value from `given` to the training recipe."""
        if name in self.given:
            entry = self.given.pop(name)
            self.put(name, entry.value, "" if entry.source == name else entry.source, entry.source)


def is_off(value: Any) -> bool:
    """Return whether a value turns a setting off: None, False, 0, "", "none", [] or {}."""
    return any(value is off or (value == off and type(value) is type(off)) for off in _OFF_VALUES)


def listed(value: Any) -> list[Any]:
    """Return a value as a list: "a, b" becomes ["a", "b"], and a single 5 becomes [5]."""
    if isinstance(value, str):
        return re.split(r"\s*,\s*", value)
    return value if isinstance(value, list) else [value]
