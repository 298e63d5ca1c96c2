"""The checkpoints of a run: room before a save, the commit after it, then rotation.

Trainer writes its files as it always does. Then each rank flushes and hashes its own files, and
rank 0 writes the manifest last. No directory is renamed: when transformers did that, ranks raced
for one name (#28364, #36112). For a save in the background, Trainer writes into memory. A thread of
each rank copies the rank's files into the checkpoint, then the manifest is written.
"""

import dataclasses
import datetime
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.checkpoints.discovery import LEAST_KEPT, checkpoint_problems, make_room, rotate
from utils.checkpoints.files import (
    MANIFEST,
    FileRecord,
    Manifest,
    flush,
    flush_and_record,
    list_files,
    owner,
    readable,
    write_manifest,
)
from utils.checkpoints.pickles import refuse_code
from utils.checkpoints.staging import BackgroundWriter
from utils.config.errors import ConfigurationError, StorageError
from utils.host.collectives import on_every_rank, on_rank_0
from utils.host.journal_file import FILE_NAME as JOURNAL
from utils.host.machine import host_name
from utils.host.run_lock import taken_over

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Save:
    """A committed checkpoint of this start, and how long it took."""

    step: int
    size_bytes: int
    stall_s: float  # how long training waited
    write_s: float  # how long the background then wrote


class Checkpoints:
    """Commits and keeps the checkpoints of a run; every method is collective over ranks.

    A save has three steps: `begin`, Trainer's own save into `run_dir`, `commit`. With `background`,
    `commit` returns before the checkpoint is committed; `finish` waits for the commit.

    facts            the values that all manifests of this start have in common
    keep             how many of the newest checkpoints stay, beside the best one; None: all
    estimated_bytes  the size of a checkpoint until this start has saved one
    run_dir          the directory in which Trainer makes its checkpoint-N
    saves            the checkpoints that this start has committed
    """

    def __init__(
        self, output_dir: Path, facts: Manifest, rank: int, *, keep: int | None,
        estimated_bytes: int, background: BackgroundWriter | None = None,
    ):  # fmt: skip
        assert keep is None or keep >= LEAST_KEPT, "checked with the settings"
        self.output_dir, self.facts, self.rank = output_dir, facts, rank
        self.keep, self.estimated_bytes = keep, estimated_bytes
        self.background = background
        self.work: Future[None] | None = None  # the save in the background, until `finish`
        self.run_dir = output_dir
        self.saves: list[Save] = []
        self.begun = 0.0
        self.own_bytes: int | None = None  # size of this rank's files in the previous save

    def directory(self, step: int) -> Path:
        """Return the path of the checkpoint of a step."""
        return self.output_dir / f"checkpoint-{step}"

    def is_committed(self, step: int) -> bool:
        """Check whether this step is committed already. A new save of it would be the same."""
        return on_rank_0((self.directory(step) / MANIFEST).is_file)

    @property
    def staged(self) -> bool:
        """Whether the checkpoint that was begun is staged in memory."""
        return self.run_dir != self.output_dir

    @property
    def writing(self) -> bool:
        """Whether this rank is writing a checkpoint in the background."""
        return self.work is not None and not self.work.done()

    @property
    def failed(self) -> bool:
        """Whether the save in the background failed on this rank; `finish` raises its error."""
        return self.work is not None and self.work.done() and self.work.exception() is not None

    def begin(self, step: int) -> bool:
        """Wait for the previous save and make room; return False if the step is committed already.

        Raises StorageError, or ConfigurationError if another job took the directory, on all ranks.
        """
        self.begun = time.monotonic()
        self.finish()
        self.check_ownership()
        if self.is_committed(step):
            return False
        run_id = self.facts.run_id
        on_rank_0(lambda: make_room(self.output_dir, run_id, self.keep, self.estimated_bytes))
        staged = None
        if self.background is not None:
            size_bytes = self.saves[-1].size_bytes if self.saves else self.estimated_bytes
            staged = self.background.open(step, self.own_bytes, size_bytes)
        self.run_dir = staged or self.output_dir
        # Trainer stores the path of the best checkpoint only if that directory exists. With sharded
        # weights (FSDP), Trainer makes the directory late, and some ranks would not find it.
        on_every_rank(lambda: (self.run_dir / self.directory(step).name).mkdir(exist_ok=True))
        return True

    def commit(self, step: int, *, tokens: int) -> None:
        """Commit the files that Trainer wrote for this step, then rotate. Raises StorageError."""
        target, background = self.directory(step), self.background
        if background is None or not self.staged:

            def record() -> dict[str, FileRecord]:
                own = [name for name in list_files(target) if owner(name) == self.rank]
                return flush_and_record(target, own)

            size_bytes = self._commit_files(step, tokens, record)
            self._note(Save(step, size_bytes, time.monotonic() - self.begun, 0.0))
            return
        written, stall_s = self.run_dir / target.name, time.monotonic() - self.begun
        self.run_dir = self.output_dir

        def write() -> None:
            begun, own = time.monotonic(), background.own_files(written)
            size_bytes = self._commit_files(
                step, tokens, lambda: flush_and_record(target, own, written), background.group
            )
            background.clear()
            self._note(Save(step, size_bytes, stall_s, time.monotonic() - begun))

        self.work = background.pool.submit(write)

    def finish(self) -> None:
        """Wait for the save in the background. Raises its StorageError on all ranks."""
        work, self.work = self.work, None
        if work is not None:
            work.result()

    def close(self) -> None:
        """Close the background writer."""
        if self.background is not None:
            self.background.close()

    def check_ownership(self) -> None:
        """Raise ConfigurationError on all ranks if another job took the directory."""
        on_rank_0(self._check_ownership)

    def check(self, directory: Path) -> None:
        """Raise StorageError on all ranks if a committed checkpoint is damaged."""

        def check() -> None:
            step = int(directory.name.rpartition("-")[2])
            if problems := checkpoint_problems(directory, step, self.facts.run_id):
                raise StorageError(
                    f"{host_name()}: {directory} is damaged ({problems[0]}): check the storage."
                )
            refuse_code(directory)

        on_rank_0(check)

    def _commit_files(
        self, step: int, tokens: int, record: Callable[[], dict[str, FileRecord]], group: Any = None
    ) -> int:
        """Record the files of all ranks, commit and rotate; return the checkpoint's bytes."""
        by_rank = on_every_rank(record, group)
        self.own_bytes = sum(file.size_bytes for file in by_rank[self.rank].values())
        manifest = dataclasses.replace(
            self.facts,
            step=step,
            samples=step * self.facts.global_batch_size,
            tokens=tokens,
            time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            files={name: file for own in by_rank for name, file in own.items()},
        )

        def commit() -> None:
            directory = self.directory(step)
            if unknown := sorted(set(list_files(directory)) - set(manifest.files)):
                raise StorageError(
                    f"{host_name()}: {directory} has files that no rank wrote "
                    f"({', '.join(unknown)}) and was not committed: does another job write there?"
                )
            self._check_ownership()
            if (journal := self.output_dir / JOURNAL).exists():
                flush(journal)  # after a power cut a resume finds the lines of all earlier steps
            write_manifest(directory, manifest)

        on_rank_0(commit, group)
        if self.rank == 0:
            rotate(self.output_dir, self.facts.run_id, self.keep)
        return manifest.size_bytes

    def _note(self, save: Save) -> None:
        self.saves.append(save)
        took = f"{save.stall_s:.1f} s"
        if save.write_s:
            took = f"written in {save.write_s:.1f} s, training paused for {took}"
        size = readable(save.size_bytes)
        logger.info("%s committed (%s, %s)", self.directory(save.step), size, took)

    def _check_ownership(self) -> None:
        if lost := taken_over(self.output_dir):
            raise ConfigurationError(f"{host_name()}: {lost} Nothing more is written there.")
