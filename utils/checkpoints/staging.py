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
# A rank may wait while another rank writes its largest file. A dead rank is noticed sooner, because
# its connection closes.
GROUP_TIMEOUT_S = 24 * 3600


class BackgroundWriter:
    """A thread of this rank that copies staged files to storage.

    The threads of all ranks commit a checkpoint together. They have their own process group, so
    that their collectives never mix with those of training. The rank's directory in memory is
    locked while its process lives. The next start on the node removes unlocked directories.
    """

    def __init__(self, run_id: str, rank: int):
        self.rank, self.prefix = rank, f"{PREFIX}{run_id}-{rank}-"
        self.directory: Path | None = None  # in memory; the descriptor `lock` locks it
        self.lock = -1
        self.group = cpu_group(GROUP_TIMEOUT_S)
        self.pool = ThreadPoolExecutor(1, "checkpoint writer")
        atexit.register(self.remove_directory)

    def open(self, step: int, own_bytes: int | None, all_bytes: int) -> Path | None:
        """Return the directory in memory for this rank's files; None if any node has no room.

        Collective over ranks. `own_bytes` is the size of this rank's files in the previous save.
        None: unknown, so its node needs room for `all_bytes`, the whole checkpoint.
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
        """Return the directory in memory, empty and private to this user. Raises OSError."""
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
        """Remove the directory in memory. The next start on this node removes any remains."""
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self.lock)
            self.directory = None

    def close(self) -> None:
        """Release the memory and the process group. All ranks call it while no thread writes."""
        self.remove_directory()
        if self.group is not None:
            torch.distributed.destroy_process_group(self.group)
            self.group = None

    def own_files(self, staged: Path) -> list[str]:
        """Return the names of the staged files that this rank copies to storage.

        If several ranks staged the same name, its owner copies the file, or the first of these
        ranks if the owner did not stage it. Collective over ranks.
        """
        writers: dict[str, int] = {}
        for writer, names in enumerate(on_every_rank(lambda: list_files(staged), self.group)):
            for name in names:
                if name not in writers or owner(name) == writer:
                    writers[name] = writer
        return [name for name, writer in writers.items() if writer == self.rank]


def free_bytes() -> int:
    """Return how many bytes of files this node's memory can still hold; 0 without MEMORY."""
    if not MEMORY.is_dir():
        return 0
    status = os.statvfs(MEMORY)
    return min(status.f_bavail * status.f_frsize, memory_room_bytes())


def remove_leftovers() -> None:
    """Remove staged files of this user's killed processes: they would take memory from jobs."""
    for directory in remove_abandoned(MEMORY, PREFIX):
        logger.warning("%s was left in memory by a run that was killed: removed", directory)
