"""What a start was given and what that held; what changed from one start to the next."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.config.data_sources import eval_splits, train_sources

PLACES = frozenset(
    {"model_name_or_path", "model_config", "init_from", "tokenizer_name_or_path", "output_dir"}
)


@dataclass(frozen=True)
class Snapshot:
    """The settings of a start, the directory each one's paths are relative to, and what they held.

    `facts` are those in provenance.json: data fingerprints, the tokenizer's hash, the contents of
    the model's configuration, what lies under LoRA's adapters; a missing one is not known.
    """

    settings: Mapping[str, Any]
    directories: Mapping[str, str | None]
    facts: Mapping[str, Any]

    def place(self, name: str) -> Any:
        """Return a setting with its paths made absolute, to tell two spellings from two places."""
        value = self.settings.get(name)
        base = Path(self.directories.get(name) or os.getcwd())  # noqa: PTH109 - see there
        if value is None:
            return None
        if name == "train_data":
            sources = train_sources(value)
            return [((base / source.directory).resolve(), source.weight) for source in sources]
        if name == "eval_data":
            return {split: (base / path).resolve() for split, path in eval_splits(value).items()}
        return (base / value).resolve() if name in PLACES else value


@dataclass(frozen=True)
class Change:
    """One changed setting, or one changed thing that a setting names (`what`).

    `dangerous` ones need the user's consent, by `name`; `impossible` says why none would help.
    """

    name: str
    old: str
    new: str
    what: str = ""
    note: str = ""
    dangerous: bool = False
    impossible: str = ""

    @property
    def title(self) -> str:
        """What changed, for a reader."""
        return self.what or self.name


def shown(value: Any) -> str:
    """Write a value out for a reader."""
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, float):
        return f"{value:.12g}"
    return "null" if value is None else str(value)
