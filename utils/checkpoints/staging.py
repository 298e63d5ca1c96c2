"""Saves in the background: Trainer writes into this node's memory, a thread copies to storage."""

import atexit
import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from utils.checkpoints.files import MARGIN, list_files, owner, readable
from utils.host.atomic_files import locked_directory, remove_abandoned
from utils.host.collectives import cpu_group, on_every_rank
from utils.host.machine import host_name, memory_room_bytes

logger = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")  # noqa: S108 - mkdtemp makes a private directory in it
PREFIX = "stoker-staged-"
# A rank may wait until another one wrote its largest file. A dead rank closes its connection.
GROUP_TIMEOUT_S = 24 * 3600


class BackgroundWriter:
    """A thread of each rank that copies staged files, and commits with the other ranks' threads.

    The threads have their own process group, so that their collectives never mix with training's.
    The rank's directory in memory is locked while its process lives. The next start on the node
    removes unlocked ones.
    """

    def __init__(self, run_id: str, rank: int):
        self.rank, self.prefix = rank, f"{PREFIX}{run_id}-{rank}-"
        self.directory: Path | None = None  # locked with this descriptor
        self.lock = -1
        self.group = cpu_group(GROUP_TIMEOUT_S)
        self.pool = ThreadPoolExecutor(1, "checkpoint writer")
        atexit.register(self.remove_directory)

    def open(self, step: int, own_bytes: int | None, all_bytes: int) -> Path | None:
        """Return the directory in memory for this rank's checkpoint; None if a node has no room.

        Collective over ranks. `own_bytes` is what this rank wrote the last time (None: unknown,
        then its node needs `all_bytes`).
        """
        own = all_bytes if own_bytes is None else own_bytes
        rooms = on_every_rank(lambda: (host_name(), own, free_bytes()))
        for host in dict.fromkeys(host for host, _, _ in rooms):
            needed = MARGIN * min(sum(one for name, one, _ in rooms if name == host), all_bytes)
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
        """Return the directory, empty and readable by this user alone. Raises OSError."""
        if self.directory is None or not self.directory.exists():
            self.remove_directory()
            self.directory, self.lock = locked_directory(MEMORY, self.prefix)
        self.clear()
        return self.directory

    def clear(self) -> None:
        """Delete the staged files, which frees their memory. Raises OSError."""
        if self.directory is not None:
            for path in self.directory.iterdir():
                shutil.rmtree(path)

    def remove_directory(self) -> None:
        """Remove the directory. The next start on this node removes what this leaves."""
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self.lock)
            self.directory = None

    def close(self) -> None:
        """Release memory and process group; all ranks call it, while nothing is being written."""
        self.remove_directory()
        if self.group is not None:
            torch.distributed.destroy_process_group(self.group)
            self.group = None

    def own_files(self, staged: Path) -> list[str]:
        """Return the staged files that this rank copies: its own, and those without an owner.

        Collective over ranks.
        """
        writers: dict[str, int] = {}
        for writer, names in enumerate(on_every_rank(lambda: list_files(staged), self.group)):
            for name in names:
                if name not in writers or owner(name) == writer:
                    writers[name] = writer
        return [name for name, writer in writers.items() if writer == self.rank]


def free_bytes() -> int:
    """Return the free memory of this node for files; 0 if it has no MEMORY directory."""
    if not MEMORY.is_dir():
        return 0
    status = os.statvfs(MEMORY)
    return min(status.f_bavail * status.f_frsize, memory_room_bytes())


def remove_leftovers() -> None:
    """Remove the staged files of this user's killed processes, which take memory from jobs."""
    for directory in remove_abandoned(MEMORY, PREFIX):
        logger.warning("%s was left in memory by a run that was killed: removed", directory)
