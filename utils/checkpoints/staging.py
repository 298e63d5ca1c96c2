"""A private directory in this node's memory, where a checkpoint waits to be written to storage."""

import atexit
import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path

from utils.cluster.memory_room import memory_room_bytes

logger = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")  # noqa: S108 - mkdtemp makes a private directory in it
PREFIX = "stoker-staged-"


class Staging:
    """The directory of one rank of a run, made at its first use, gone with `close`.

    Each rank has its own, so that ranks on one node and on several do the same. It is locked while
    its process lives: a killed one leaves its directory to the next start on that node.
    """

    def __init__(self, run_id: str, rank: int):
        self.name = f"{PREFIX}{run_id}-{rank}-"
        self.directory: Path | None = None
        self.lock = -1

    def open(self) -> Path:
        """Return the directory, empty, readable by this user alone; raises OSError."""
        while self.directory is None or not self.directory.exists():
            self._release()
            self.directory = Path(tempfile.mkdtemp(prefix=self.name, dir=MEMORY))
            self.lock = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
            # A start that took it for a leftover before it was locked removes it: then again.
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            atexit.register(self.close)
        self.clear()
        return self.directory

    def clear(self) -> None:
        """Give the memory back; raises OSError."""
        if self.directory is not None:
            for path in self.directory.iterdir():
                shutil.rmtree(path)

    def close(self) -> None:
        """Remove the directory."""
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)  # the next start removes what stays
            self._release()
            self.directory = None

    def _release(self) -> None:
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1
            atexit.unregister(self.close)


def free_bytes() -> int:
    """Return how much more fits into the memory of this node; 0 where it takes no files."""
    if not MEMORY.is_dir():
        return 0
    status = os.statvfs(MEMORY)
    return min(status.f_bavail * status.f_frsize, memory_room_bytes())


def remove_leftovers() -> None:
    """Remove, aloud, the staged checkpoints of this user's processes that were killed here.

    A directory whose process lives is locked, and left alone. What was staged and not written is in
    no checkpoint, and nobody reads it; it would keep memory from all jobs on this node.
    """
    for directory in sorted(MEMORY.glob(f"{PREFIX}*")):
        try:
            if directory.lstat().st_uid == os.getuid():
                _remove_unless_locked(directory)
        except FileNotFoundError:
            continue  # another rank was faster
        except OSError as error:
            logger.warning("%s could not be removed: %s", directory, error)


def _remove_unless_locked(directory: Path) -> None:
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory)
        logger.warning("%s was left in memory by a run that was killed: removed", directory)
    except BlockingIOError:
        pass  # its process lives
    finally:
        os.close(lock)
