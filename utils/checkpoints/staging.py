"""Saves in the background: Trainer writes into this node's memory, a thread copies to storage."""

import atexit
import fcntl
import logging
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from utils.checkpoints.files import MARGIN, list_files, owner, readable
from utils.support.collectives import cpu_group, on_every_rank
from utils.support.host import host_name, memory_room_bytes

logger = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")  # noqa: S108 - mkdtemp makes a private directory in it
PREFIX = "stoker-staged-"
# A rank may wait for the largest file of another; one that died breaks the connection at once.
GROUP_TIMEOUT_S = 24 * 3600


class BackgroundWriter:
    """A thread of each rank that copies what it staged, and commits with the other ranks' threads.

    The threads have a process group of their own: their collectives never mix with training's. The
    rank's directory in memory is locked while its process lives; the next start on the node removes
    an unlocked one.
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
        """Return the directory, empty, readable by this user alone; raises OSError."""
        # A start that takes it for a leftover before it is locked removes it: then again.
        while self.directory is None or not self.directory.exists():
            self.remove_directory()
            directory = Path(tempfile.mkdtemp(prefix=self.prefix, dir=MEMORY))
            self.lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            self.directory = directory
        self.clear()
        return self.directory

    def clear(self) -> None:
        """Give the memory back; raises OSError."""
        if self.directory is not None:
            for path in self.directory.iterdir():
                shutil.rmtree(path)

    def remove_directory(self) -> None:
        """Remove the directory; what stays is removed by the next start."""
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self.lock)
            self.directory = None

    def close(self) -> None:
        """Release memory and group; all ranks call it, with no work under way."""
        self.remove_directory()
        if self.group is not None:
            torch.distributed.destroy_process_group(self.group)
            self.group = None

    def own_files(self, staged: Path) -> list[str]:
        """Return which staged files this rank copies: its own and nobody's; collective."""
        writers: dict[str, int] = {}
        for writer, names in enumerate(on_every_rank(lambda: list_files(staged), self.group)):
            for name in names:
                if name not in writers or owner(name) == writer:
                    writers[name] = writer
        return [name for name, writer in writers.items() if writer == self.rank]


def free_bytes() -> int:
    """Return how much more fits into the memory of this node; 0 where it takes no files."""
    if not MEMORY.is_dir():
        return 0
    status = os.statvfs(MEMORY)
    return min(status.f_bavail * status.f_frsize, memory_room_bytes())


def remove_leftovers() -> None:
    """Remove what this user's killed processes staged on this node: it keeps memory from jobs."""
    for directory in sorted(MEMORY.glob(f"{PREFIX}*")):
        try:
            if directory.lstat().st_uid != os.getuid():
                continue
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory)
            finally:
                os.close(lock)
            logger.warning("%s was left in memory by a run that was killed: removed", directory)
        except (FileNotFoundError, BlockingIOError):
            continue  # another rank was faster, or its process lives
        except OSError as error:
            logger.warning("%s could not be removed: %s", directory, error)
