"""Checkpoint saves: make room, let Trainer write, write the manifest, delete old checkpoints.

After Trainer's save, each rank flushes and hashes the files that it wrote, and rank 0 writes
manifest.json last. Checkpoint directories are not renamed: when transformers renamed them, ranks
raced (transformers #28364, #36112). In a background save, Trainer writes into /dev/shm (memory) and
training continues. A thread of each rank then copies the rank's files to storage, and rank 0 writes
manifest.json.
"""

import atexit
import dataclasses
import datetime
import logging
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from utils.checkpoints.discovery import LEAST_KEPT, checkpoint_problems, make_room, rotate
from utils.checkpoints.files import (
    MANIFEST,
    SPACE_MARGIN,
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
from utils.config.errors import ConfigurationError, StorageError
from utils.host.atomic_files import locked_directory, remove_abandoned
from utils.host.collectives import cpu_group, on_every_rank, on_rank_0
from utils.host.journal_file import FILE_NAME as JOURNAL
from utils.host.machine import host_name, memory_room_bytes
from utils.host.run_lock import lost_lock_message

logger = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")  # noqa: S108 - mkdtemp makes a private directory in it
STAGED_PREFIX = "stoker-staged-"
# Ranks may wait long while one rank writes a large file. A dead rank is noticed sooner, because its
# connection closes.
GROUP_TIMEOUT_S = 24 * 3600


@dataclass(frozen=True)
class Save:
    """The step, the size and the duration of a checkpoint save by this process."""

    step: int
    size_bytes: int
    stall_s: float  # time that training waited
    write_s: float  # time that the background thread then wrote; 0 without a background writer


class BackgroundWriter:
    """A thread of this rank that copies a checkpoint's files from /dev/shm (memory) to storage.

    The threads of all ranks commit a checkpoint together. They use a process group that training
    does not use. Each rank locks its directory in /dev/shm until its process ends. So an unlocked
    directory belongs to a killed process, and `remove_leftovers` deletes it.
    """

    def __init__(self, run_id: str, rank: int):
        self.rank, self.prefix = rank, f"{STAGED_PREFIX}{run_id}-{rank}-"
        self.directory: Path | None = None  # in /dev/shm; the descriptor `lock` locks it
        self.lock = -1
        self.group = cpu_group(GROUP_TIMEOUT_S)
        self.pool = ThreadPoolExecutor(1, "checkpoint writer")
        atexit.register(self.remove_directory)

    def open(self, step: int, own_bytes: int | None, all_bytes: int) -> Path | None:
        """Make or empty this rank's directory in /dev/shm; return its path.

        Return None on all ranks if a node's memory has no room for the files of its ranks.
        own_bytes: the size of this rank's files in the previous save. None means the first save.
        Then each node needs room for a whole checkpoint (`all_bytes`). All ranks must call this.
        """
        own = all_bytes if own_bytes is None else own_bytes
        rooms = on_every_rank(lambda: (host_name(), own, free_shared_memory_bytes()))
        for host in dict.fromkeys(host for host, _, _ in rooms):
            needed = SPACE_MARGIN * min(
                sum(one for name, one, _ in rooms if name == host), all_bytes
            )
            free = min(free for name, _, free in rooms if name == host)
            if free < needed:
                logger.warning(
                    "the checkpoint of step %d is written before training continues: %s has %s "
                    "free in %s, its part takes %s",
                    step, host, readable(free), MEMORY, readable(needed),
                )  # fmt: skip
                return None
        return on_every_rank(self.make_directory)[self.rank]

    def make_directory(self) -> Path:
        """Make or empty this rank's directory in /dev/shm, and return its path. Raises OSError."""
        if self.directory is None or not self.directory.exists():
            self.remove_directory()
            self.directory, self.lock = locked_directory(MEMORY, self.prefix)
        self.clear()
        return self.directory

    def clear(self) -> None:
        """Delete the files in this rank's /dev/shm directory, to free memory. Raises OSError."""
        if self.directory is not None:
            for path in self.directory.iterdir():
                shutil.rmtree(path)

    def remove_directory(self) -> None:
        """Remove this rank's directory in /dev/shm, and release the lock on the directory."""
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self.lock)
            self.directory = None

    def close(self) -> None:
        """Remove the directory in /dev/shm and the process group. All writing must have ended."""
        self.remove_directory()
        if self.group is not None:
            torch.distributed.destroy_process_group(self.group)
            self.group = None

    def own_files(self, staged: Path) -> list[str]:
        """Return the names of the files in `staged` that this rank copies to storage.

        staged: a checkpoint in /dev/shm. If several ranks have a file of the same name, one of them
        copies the file: the rank that `owner` returns, or the lowest rank if `owner`'s rank does
        not have the file. All ranks must call this.
        """
        writers: dict[str, int] = {}
        for writer, names in enumerate(on_every_rank(lambda: list_files(staged), self.group)):
            for name in names:
                if name not in writers or owner(name) == writer:
                    writers[name] = writer
        return [name for name, writer in writers.items() if writer == self.rank]


def free_shared_memory_bytes() -> int:
    """Return the bytes that still fit into /dev/shm within the job's memory limit."""
    if not MEMORY.is_dir():
        return 0
    status = os.statvfs(MEMORY)
    return min(status.f_bavail * status.f_frsize, memory_room_bytes())


def remove_leftovers() -> None:
    """Remove the directories in /dev/shm that killed processes of this user left."""
    for directory in remove_abandoned(MEMORY, STAGED_PREFIX):
        logger.warning("%s was left in memory by a run that was killed: removed", directory)


def _check_run_lock(output_dir: Path) -> None:
    if lost := lost_lock_message(output_dir):
        raise ConfigurationError(f"{host_name()}: {lost} Nothing more is written there.")


class Checkpoints:
    """The store that saves a run's checkpoints and deletes old ones. All ranks call its methods.

    A save has three steps. First `begin` makes room, then Trainer writes into `run_dir`, then
    `commit` writes the manifest. With `background`, a thread does the third step. `commit` then
    returns at once, and `finish` waits for the thread.

    facts            manifest fields that are the same for all checkpoints of this process
    keep             number of newest checkpoints to keep besides the best one. None means all.
    estimated_bytes  predicted size of the first checkpoint
    run_dir          the directory in which Trainer creates checkpoint-N: output_dir or /dev/shm
    saves            the checkpoints that this process has committed
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
        # Returns the number of samples of the first N steps. start_run replaces this function,
        # because the global batch may grow.
        self.samples_before: Callable[[int], int] = lambda step: step * facts.global_batch_size

    def directory(self, step: int) -> Path:
        """Return the path of a step's checkpoint in output_dir."""
        return self.output_dir / f"checkpoint-{step}"

    @property
    def staged(self) -> bool:
        """Whether Trainer writes the current save into /dev/shm instead of output_dir."""
        return self.run_dir != self.output_dir

    @property
    def writing(self) -> bool:
        """Whether a background save is in progress."""
        return self.work is not None and not self.work.done()

    @property
    def failed(self) -> bool:
        """Whether a background save failed on this rank; `finish` raises the error."""
        return self.work is not None and self.work.done() and self.work.exception() is not None

    def begin(self, step: int) -> bool:
        """Wait for the previous save, make room for the next checkpoint; return whether to save.

        Return False if the checkpoint of this step is already committed. To make room, old
        checkpoints are deleted. All ranks raise StorageError if the space is too small or the
        previous save failed, and ConfigurationError if another job holds the run lock.
        """
        self.begun = time.monotonic()
        self.finish()
        self.check_ownership()
        if on_rank_0((self.directory(step) / MANIFEST).is_file):
            return False  # a new save of this step would be the same
        run_id = self.facts.run_id
        on_rank_0(lambda: make_room(self.output_dir, run_id, self.keep, self.estimated_bytes))
        staged = None
        if self.background is not None:
            size_bytes = self.saves[-1].size_bytes if self.saves else self.estimated_bytes
            staged = self.background.open(step, self.own_bytes, size_bytes)
        self.run_dir = staged or self.output_dir
        # Trainer stores the path of the best checkpoint only if the directory exists. Under FSDP
        # Trainer creates it late, so some ranks would not store the path.
        on_every_rank(lambda: (self.run_dir / self.directory(step).name).mkdir(exist_ok=True))
        return True

    def commit(self, step: int, *, tokens: int) -> None:
        """Commit the checkpoint that Trainer wrote, then delete old checkpoints.

        If Trainer wrote into /dev/shm, a background thread does both after this function returns,
        and `finish` raises the thread's error. tokens: the number of tokens trained on since step
        0. Raises StorageError.
        """
        target, background = self.directory(step), self.background
        if background is None or not self.staged:

            def record() -> dict[str, FileRecord]:
                own = [name for name in list_files(target) if owner(name) == self.rank]
                return flush_and_record(target, own)

            size_bytes = self._commit_files(step, tokens, record)
            self._log_save(Save(step, size_bytes, time.monotonic() - self.begun, 0.0))
            return
        written, stall_s = self.run_dir / target.name, time.monotonic() - self.begun
        self.run_dir = self.output_dir

        def write() -> None:
            begun, own = time.monotonic(), background.own_files(written)
            size_bytes = self._commit_files(
                step, tokens, lambda: flush_and_record(target, own, written), background.group
            )
            background.clear()
            self._log_save(Save(step, size_bytes, stall_s, time.monotonic() - begun))

        self.work = background.pool.submit(write)

    def finish(self) -> None:
        """Wait for the background save; raise StorageError on all ranks if it failed."""
        work, self.work = self.work, None
        if work is not None:
            work.result()

    def close(self) -> None:
        """Close the background writer, if there is one."""
        if self.background is not None:
            self.background.close()

    def check_ownership(self) -> None:
        """Raise ConfigurationError on all ranks if another job now holds the run lock."""
        on_rank_0(lambda: _check_run_lock(self.output_dir))

    def check(self, directory: Path) -> None:
        """Raise StorageError for a damaged checkpoint, ConfigurationError if it could run code."""

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
        """Write the manifest and delete old checkpoints; return the checkpoint's size in bytes.

        record: a function that flushes a rank's files and returns {name: FileRecord}. Every rank
        calls its `record`. group: the process group of the background threads, or None in the main
        thread. All ranks must call this.
        """
        by_rank = on_every_rank(record, group)
        self.own_bytes = sum(file.size_bytes for file in by_rank[self.rank].values())
        manifest = dataclasses.replace(
            self.facts,
            step=step,
            samples=self.samples_before(step),
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
            _check_run_lock(self.output_dir)
            if (journal := self.output_dir / JOURNAL).exists():
                flush(journal)  # after a power cut a resume finds the lines of all earlier steps
            write_manifest(directory, manifest)

        on_rank_0(commit, group)
        if self.rank == 0:
            rotate(self.output_dir, self.facts.run_id, self.keep)
        return manifest.size_bytes

    def _log_save(self, save: Save) -> None:
        self.saves.append(save)
        took = f"{save.stall_s:.1f} s"
        if save.write_s:
            took = f"written in {save.write_s:.1f} s, training paused for {took}"
        size = readable(save.size_bytes)
        logger.info("%s committed (%s, %s)", self.directory(save.step), size, took)
