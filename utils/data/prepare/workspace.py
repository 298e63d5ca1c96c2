"""The output directory and its workspace OUT/.shards: finished units that are not assembled yet.

A unit is done when its record is there. Records and files get their names by renaming, so a
preparation may be killed at any moment, and shards may write side by side.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from utils.config.errors import ConfigurationError
from utils.data.description import DESCRIPTION_FILE
from utils.data.prepare.plan import TRAIN, WorkUnit
from utils.data.prepare.units import UnitCounts
from utils.support.files import replace_text
from utils.support.host import host_name

logger = logging.getLogger(__name__)

WORKSPACE = ".shards"


class Workspace:
    """Files of one preparation; `digest` identifies its sources and settings."""

    def __init__(self, output_dir: Path, digest: str):
        self.output_dir = output_dir
        self.root = output_dir / WORKSPACE
        self.digest = digest

    @property
    def tokenizer(self) -> Path:
        """The folder that holds the tokenizer in use."""
        return self.root / "tokenizer"

    def open(self, *, may_discard: bool) -> None:
        """Create the workspace, or resume the one that is there.

        Units of other settings or sources are discarded, if `may_discard` and their assembly has
        not begun; else ConfigurationError is raised.
        """
        settings = self.root / "settings.json"
        if settings.exists():
            if _read(settings).get("digest") == self.digest:
                return
            units = len(list(self.root.glob("unit-*.json")))
            if units and not (may_discard and not (self.output_dir / TRAIN).exists()):
                raise ConfigurationError(
                    f"{self.root}: holds unfinished work of other settings or of sources that "
                    "have changed since: finish it with the settings it was started with, or "
                    f"remove it (rm -r {self.root}), or choose another --output_dir"
                )
            if units:
                logger.warning(
                    f"{self.root}: {units:,} finished work units of other settings or sources are "
                    "discarded; the preparation starts again"
                )
            shutil.rmtree(self.root)
        self.root.mkdir(parents=True, exist_ok=True)
        replace_text(settings, json.dumps({"digest": self.digest}, indent=1))

    def unit_file(self, unit: int, split: str) -> Path:
        """Return the file of the documents of a unit that belong to a split."""
        return self.root / f"unit-{unit:06d}-{split}.arrow"

    def prepare(
        self,
        unit: WorkUnit,
        splits: Sequence[str],
        prepare: Callable[[WorkUnit, dict[str, Path]], UnitCounts],
    ) -> None:
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
        record = {"digest": self.digest, "counts": asdict(counts)}
        replace_text(self._record(unit.index), json.dumps(record, indent=1))

    def counts_of(self, unit: int) -> UnitCounts | None:
        """Return the counts of a finished unit, None when it is still to be done."""
        try:
            record = _read(self._record(unit))
        except FileNotFoundError:
            return None
        return UnitCounts.from_json(record["counts"]) if record["digest"] == self.digest else None

    def remove(self) -> None:
        """Delete the workspace: its files have been moved to where they belong."""
        # Renamed first: a workspace that is half deleted must not look like unfinished work.
        finished = self.root.with_name(f"{self.root.name}.finished")
        if self.root.exists():
            self.root.replace(finished)
        shutil.rmtree(finished, ignore_errors=True)

    def _record(self, unit: int) -> Path:
        return self.root / f"unit-{unit:06d}.json"


def is_already_prepared(workspace: Workspace, used_tokenizer: str | None) -> bool:
    """Return whether the output directory holds the finished result of this very preparation.

    False for an empty directory and for unfinished work. Raises ConfigurationError when anything
    else is in it: nothing is overwritten. `used_tokenizer`: a tokenizer that lies in the output
    directory may stay if it is the one in use.
    """
    output_dir = workspace.output_dir
    if output_dir.exists() and not output_dir.is_dir():
        raise ConfigurationError(f"output_dir: {output_dir}: is a file, not a folder")
    if workspace.root.exists():
        return False
    try:
        content = json.loads((output_dir / TRAIN / DESCRIPTION_FILE).read_text(encoding="utf-8"))
        prepared = content["preparation"]["settings_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        prepared = None
    if prepared == workspace.digest:
        return True
    if prepared is not None:
        raise ConfigurationError(
            f"output_dir: {output_dir}: holds a dataset that was prepared with other settings or "
            "from sources that have changed since; nothing is overwritten: choose another "
            "--output_dir, or remove it first"
        )
    tokenizer = output_dir / "tokenizer"
    is_used = used_tokenizer is not None and Path(used_tokenizer).resolve() == tokenizer.resolve()
    entries = sorted(output_dir.iterdir()) if output_dir.exists() else []
    others = [entry.name for entry in entries if not (is_used and entry == tokenizer)]
    if others:
        raise ConfigurationError(
            f"output_dir: {output_dir}: holds other files ({', '.join(others[:5])}); nothing is "
            "overwritten: choose a new or empty folder"
        )
    return False


class ShardArray:
    """The tasks of a job array over shards: which of them have ended, and which one merges.

    `task` is this one's shard, of `tasks` in all. The state is in files of the workspace named by
    the array, so a task that died never blocks a later array. Methods raise FileNotFoundError when
    another task has merged already.
    """

    def __init__(self, workspace: Path, array: str, task: int, tasks: int):
        self.task = task
        self.tasks = tasks
        self._root = workspace
        self._prefix = f"array-{array}-"

    def finish(self) -> list[int]:
        """Note that this task's shard is complete; return the tasks that are not there yet.

        Whatever the order in which two tasks end, the later one sees both: it looks after it has
        noted itself.
        """
        (self._root / f"{self._prefix}finished-{self.task}").touch()
        # Listing a folder asks the server; looking for one file may be answered from a cache that
        # NFS keeps for a minute.
        present = set(os.listdir(self._root))  # noqa: PTH208 - names are compared
        return [t for t in range(self.tasks) if f"{self._prefix}finished-{t}" not in present]

    def claim_merge(self) -> bool:
        """Return whether this task merges: the first one to ask, also after it was requeued."""
        claim = self._root / f"{self._prefix}merged-by"
        draft = self._root / f"{self._prefix}claim-of-{self.task}"
        draft.write_text(str(self.task), encoding="utf-8")
        try:
            # A link is made by one of them only, on network file systems too, and is whole at once.
            os.link(draft, claim)
        except FileExistsError:
            return claim.read_text(encoding="utf-8") == str(self.task)
        return True


def partial_name(path: Path) -> Path:
    """Return a name beside `path` that no other process uses."""
    return path.with_name(f".{path.name}.{host_name()}.{os.getpid()}.partial")


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path}: is damaged ({error}): remove it") from error
