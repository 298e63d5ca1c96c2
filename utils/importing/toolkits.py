"""The keys of axolotl, LLaMA-Factory and TRL, and the state of a conversion.

Our name for a key comes from the toolkit's table in toolkits.yaml, else from
utils/config/foreign_words.yaml. A key in neither table has the same name here.
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
from utils.config.declarations import Given, checked_value, declared_settings
from utils.config.foreign_words import by_name, other_names, refused
from utils.config.own_code import OwnCode

UNKNOWN = "unknown here, left out"
EMPTY = "empty there"
OFF = "off there, and not done here"
BY_DEFAULT = "as it is here without a line"
# Keys of what is always on here, so that "off" is a difference.
_ON_HERE = ("shuffle_dataset", "remove_unused_columns", "average_tokens_across_devices")
_OFF_VALUES: tuple[Any, ...] = (None, False, 0, "", "none", [], {})


@dataclass(frozen=True)
class Toolkit:
    """A toolkit whose configs can be converted.

    marks: keys that identify its configs. names: {its key: our name}. defaults: {our name: its
    default}. winners: keys that override other keys of the same meaning. null_counts: whether
    null in a config replaces a default.
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
# {key: how the training differs without it}, and {key: its values that change nothing}.
CHANGES, SAME = by_name(_TABLES["changes"]), _TABLES["same"]
DATA = _TABLES["data"]  # names and prompts of datasets


class Conversion:
    """A config during its conversion to our recipes.

    given: {our name: value} that is not converted yet. run: {setting: (value, comment)} of the
    training recipe. data: values of the data recipe. changes: {how the training differs: keys}.
    notes: {reason: other keys without a counterpart}. functions: {name: Python text of a format}.
    """

    def __init__(self, kind: str, entries: Mapping[str, tuple[Any, int]], path: Path, gpus: int):
        self.kind, self.path, self.gpus = kind, path, gpus
        self.its_default = f"the default of {kind}"
        self.made_of: dict[str, str] = {}  # {setting: the config's key that it comes from}
        self.run: dict[str, tuple[Any, str]] = {}
        self.data: dict[str, Any] = {}
        self.changes: dict[str, list[str]] = {}
        self.notes: dict[str, list[str]] = {}
        self.functions: dict[str, str] = {}
        self.template = ""  # text of a chat template inside the config
        self.given: dict[str, Given] = {}
        toolkit = TOOLKITS[kind]
        for key, (value, line) in entries.items():
            name = toolkit.names.get(key) or other_names().get(key, key)
            name = name if name.isidentifier() and key not in {*LEFT, *CHANGES} else key
            new, old = Given(value, key, line), self.given.get(name)
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
            self.given.setdefault(name, Given(value, self.its_default))
        self.pretraining = self.value("stage") == "pt" or "pretraining_dataset" in entries
        training = PretrainConfig if self.pretraining else FineTuneConfig
        classes = (RunArguments, DataArguments, ModelArguments, OwnCode, training)
        self.declared = declared_settings(classes)

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value of a setting in `given`. name: our name."""
        return self.given[name].value if name in self.given else default

    def take(self, name: str, default: Any = None) -> Any:
        """Remove a setting from `given` and return its value."""
        return self.given.pop(name).value if name in self.given else default

    def note(self, key: str, reason: str) -> None:
        """Add a key of the config to `notes` under a reason. Skip the toolkit's own defaults."""
        if key != self.its_default and key not in self.notes.setdefault(reason, []):
            self.notes[reason].append(key)

    def change(self, key: str, reason: str) -> None:
        """Add a key of the config, or of ours, to `changes`: the training differs from theirs."""
        if key not in self.changes.setdefault(reason, []):
            self.changes[reason].append(key)

    def drop(self, name: str, reason: str) -> None:
        """Remove a setting from `given`, and note the reason."""
        if name in self.given:
            self.note(self.given.pop(name).source, reason)

    def leave(self, key: str, value: Any, ours: str = "") -> None:
        """Note why a key has no counterpart. key: may be a path such as datasets.roles."""
        name = key.rpartition(".")[2]
        reason = LEFT.get(name) or refused().get(ours or name) or other_names().get(name)
        if value in (None, ""):
            self.note(key, EMPTY)
        elif is_off(value) and name not in _ON_HERE:
            self.note(key, OFF)
        elif value in SAME.get(name, ()):
            self.note(key, BY_DEFAULT)
        elif name in CHANGES or reason is None:
            self.change(key, CHANGES.get(name, UNKNOWN))
        else:
            is_name = reason.isidentifier()
            self.note(key, f"here it is {reason}, with another value" if is_name else reason)

    def leave_all(self, path: str, values: Mapping[str, Any]) -> None:
        """Note for each key inside a mapping why the key has no counterpart."""
        for key, value in values.items():
            if isinstance(value, Mapping) and value:
                self.leave_all(f"{path}.{key}", value)
            else:
                self.leave(f"{path}.{key}", value)

    def put(self, name: str, value: Any, comment: str = "", key: str = "") -> None:
        """Add a setting to the training recipe, or note that `value` is refused or our default."""
        key = key or name
        declaration = self.declared.get(name)
        if declaration is not None:
            try:
                checked = checked_value(declaration, value)
                value = value if type(value) is int and checked == value else checked  # 4, not 4.0
            except ValueError as error:
                self.note(key, str(error))
                return
            if value == declaration.default and (not value or comment == self.its_default):
                self.note(key, BY_DEFAULT)
                return
        self.run[name] = (value, comment)
        self.made_of[name] = key

    def move(self, name: str) -> None:
        """Move a setting from `given` to the training recipe unchanged."""
        if name in self.given:
            entry = self.given.pop(name)
            self.put(name, entry.value, "" if entry.source == name else entry.source, entry.source)


def is_off(value: Any) -> bool:
    """Return whether a value turns its setting off."""
    return any(value is off or (value == off and type(value) is type(off)) for off in _OFF_VALUES)


def listed(value: Any) -> list[Any]:
    """Return the value as a list, because toolkits also accept "a, b" or a single entry."""
    if isinstance(value, str):
        return re.split(r"\s*,\s*", value)
    return value if isinstance(value, list) else [value]
