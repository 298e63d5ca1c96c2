"""The workspace OUT/.shards: finished units of a preparation that is not assembled yet.

A unit is done when its record is there. Records and files get their names by renaming, so a
preparation may be killed at any moment, and shards may write side by side.
"""

import json
import os
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from utils.cluster.whole_files import replace_text
from utils.config.errors import ConfigurationError
from utils.data.preparation.unit import SplitCounts, UnitCounts
from utils.data.preparation.work_units import WorkUnit

WORKSPACE = ".shards"


class Workspace:
    """Files of one preparation; `digest` stands for its sources and settings."""

    def __init__(self, output_dir: Path, digest: str):
        self.root = output_dir / WORKSPACE
        self.digest = digest

    @property
    def tokenizer(self) -> Path:
        """The folder that holds the tokenizer in use."""
        return self.root / "tokenizer"

    def open(self) -> None:
        """Create the workspace, or take up the one that is there.

        Raises ConfigurationError when units of other settings or sources are in it.
        """
        settings = self.root / "settings.json"
        if settings.exists() and _read(settings).get("digest") != self.digest:
            if any(self.root.glob("unit-*.json")):
                raise ConfigurationError(
                    f"{self.root}: holds unfinished work of other settings or of sources that "
                    "have changed since: finish it with the settings it was started with, or "
                    f"remove it (rm -r {self.root}), or choose another --output_dir"
                )
            shutil.rmtree(self.root)
        self.root.mkdir(parents=True, exist_ok=True)
        write_json(settings, {"digest": self.digest})

    def unit_file(self, unit: int, split: str) -> Path:
        """Return where the documents of a unit that belong to a split are kept."""
        return self.root / f"unit-{unit:06d}-{split}.arrow"

    def prepare(
        self,
        unit: WorkUnit,
        splits: Sequence[str],
        prepare: Callable[[WorkUnit, dict[str, Path]], UnitCounts],
    ) -> UnitCounts:
        """Have a unit prepared into files that count only once all of it is written."""
        partial = {split: partial_name(self.unit_file(unit.index, split)) for split in splits}
        try:
            counts = prepare(unit, partial)
            for split, path in partial.items():
                if counts.splits[split].documents:
                    path.replace(self.unit_file(unit.index, split))
                else:
                    del counts.splits[split]
        finally:
            for path in partial.values():
                path.unlink(missing_ok=True)
        write_json(self._record(unit.index), {"digest": self.digest, "counts": asdict(counts)})
        return counts

    def counts_of(self, unit: int) -> UnitCounts | None:
        """Return the counts of a finished unit, None when it is still to be done."""
        try:
            record = _read(self._record(unit))
        except FileNotFoundError:
            return None
        return _counts(record["counts"]) if record["digest"] == self.digest else None

    def remove(self) -> None:
        """Delete the workspace: its files have been moved to where they belong."""
        # Renamed first: a workspace that is half deleted must not look like unfinished work.
        finished = self.root.with_name(f"{self.root.name}.finished")
        if self.root.exists():
            self.root.replace(finished)
        shutil.rmtree(finished, ignore_errors=True)

    def _record(self, unit: int) -> Path:
        return self.root / f"unit-{unit:06d}.json"


def partial_name(path: Path) -> Path:
    """Return a name beside `path` that no other process uses."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.partial")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file that is either complete or not there."""
    replace_text(path, json.dumps(content, indent=1))


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path}: is damaged ({error}): remove it") from error


def _counts(content: dict[str, Any]) -> UnitCounts:
    splits = {
        name: SplitCounts(**{**split, "lengths": _integer_keys(split["lengths"])})
        for name, split in content["splits"].items()
    }
    return UnitCounts(**{**content, "splits": splits})


def _integer_keys(histogram: dict[str, int]) -> dict[int, int]:
    return {int(length): documents for length, documents in histogram.items()}
