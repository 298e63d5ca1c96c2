"""The tasks of a job array over shards: which of them have ended, and which one merges.

Kept as files in the workspace, named by the array. One that is started anew counts anew, so a task
that died never blocks a later array.
"""

import json
import os
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from utils.config.errors import ConfigurationError
from utils.data.prepare.sources import WorkUnit
from utils.data.prepare.unit import SplitCounts, UnitCounts
from utils.support.files import replace_text


class ShardArray:
    """The tasks of one array; `task` is this one's shard, of `tasks` in all."""

    def __init__(self, workspace: Path, array: str, task: int, tasks: int):
        self.task = task
        self.tasks = tasks
        self._root = workspace
        self._prefix = f"array-{array}-"

    def finish(self) -> list[int]:
        """Note that this task's shard is complete; return the tasks that are not there yet.

        Whatever the order in which two tasks end, the later one sees both: it looks after it has
        noted itself. Raises FileNotFoundError when another task has merged already.
        """
        self._named(f"finished-{self.task}").touch()
        # Listing a folder asks the server; looking for one file may be answered from a cache that
        # NFS keeps for a minute.
        present = set(os.listdir(self._root))  # noqa: PTH208 - names are compared
        return [
            task
            for task in range(self.tasks)
            if self._named(f"finished-{task}").name not in present
        ]

    def claim_merge(self) -> bool:
        """Return whether this task is the one that merges: the first one to ask.

        It asks again when it was requeued in the middle of the merge, and merges on. Raises
        FileNotFoundError when another task has merged already.
        """
        claim = self._named("merged-by")
        draft = self._named(f"claim-of-{self.task}")
        draft.write_text(str(self.task), encoding="utf-8")
        try:
            # A link is made by one of them only, on network file systems too, and is whole at once.
            os.link(draft, claim)
        except FileExistsError:
            return claim.read_text(encoding="utf-8") == str(self.task)
        return True

    def _named(self, what: str) -> Path:
        return self._root / f"{self._prefix}{what}"


# The workspace OUT/.shards: finished units of a preparation that is not assembled yet.

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
