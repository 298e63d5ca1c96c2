"""Room on a file system: what is free, what a checkpoint takes, what a deletion gives back."""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from utils.checkpoints.manifest import Manifest
from utils.checkpoints.sizes import MARGIN, readable

# Beside weights and optimizer: settings, tokenizer, states; shards and random states of each rank.
FILES = 30
FILES_PER_RANK = 4


@dataclass(frozen=True)
class Room:
    """Bytes and files (inodes; infinitely many where a file system makes them as it goes)."""

    size_bytes: float
    files: float

    def __add__(self, other: "Room") -> "Room":
        """Return both together."""
        return Room(self.size_bytes + other.size_bytes, self.files + other.files)

    def times(self, count: int) -> "Room":
        """Return `count` as much."""
        return Room(self.size_bytes * count, self.files * count)

    def holds(self, other: "Room") -> bool:
        """Whether `other` fits into this."""
        return self.size_bytes >= other.size_bytes and self.files >= other.files


# A save leaves that much: a start that finds the part of one that was killed has its lock,
# provenance and journal to write before that part goes.
RESERVE = Room(2**20, 8)


def free_room(directory: Path) -> Room:
    """Return what a file system has left for this user; quotas it does not know of. OSError."""
    status = os.statvfs(directory)
    counted = status.f_files > 0
    return Room(status.f_bavail * status.f_frsize, status.f_favail if counted else math.inf)


def estimated_room(checkpoint_bytes: int, ranks: int) -> Room:
    """Return about what a checkpoint takes while there is none to go by."""
    return Room(checkpoint_bytes, FILES + FILES_PER_RANK * ranks)


def next_room(newest: Manifest | None, estimate: Room) -> Room:
    """Return what the next checkpoint takes, by the newest one if there is one."""
    if newest is None:
        return estimate
    folders = {Path(name).parent for name in newest.files}
    return Room(newest.size_bytes * MARGIN, len(newest.files) + len(folders) + 2)  # its manifest


def taken_room(directories: Iterable[Path]) -> Room:
    """Return what is free once these directories are deleted."""
    size_bytes = files = 0
    for directory in directories:
        for path in [directory, *directory.rglob("*")]:
            files += 1
            if path.is_file() and not path.is_symlink():
                size_bytes += path.stat().st_size
    return Room(size_bytes, files)


def shortage(free: Room, freed: Room, needed: Room) -> tuple[str, str, str]:
    """Say in words what is there, what is needed and what is missing, of what is short."""
    if (free + freed).size_bytes < needed.size_bytes:
        missing = needed.size_bytes - free.size_bytes - freed.size_bytes
        also = f", {readable(freed.size_bytes)} more with what goes" if freed.size_bytes else ""
        return (
            f"{readable(free.size_bytes)} free{also}",
            readable(needed.size_bytes),
            readable(missing),
        )
    missing = needed.files - free.files - freed.files
    also = f", {freed.files:,} more with what goes" if freed.files else ""
    return f"{free.files:,} inodes (files) free{also}", f"{needed.files:,}", f"{missing:,}"
