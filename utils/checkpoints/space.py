"""Room on a file system: what is free, what a checkpoint takes, what a deletion gives back."""

import json
import logging
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from utils.checkpoints.discovery import (
    DAMAGED,
    DELETING,
    INCOMPLETE,
    RESHARDED,
    committed_checkpoints,
    delete_if_possible,
    leftovers,
)
from utils.checkpoints.files import MARGIN, readable
from utils.checkpoints.manifest import Manifest
from utils.config.errors import StorageError
from utils.support.host import host_name

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


# Which checkpoints stay when there are more than were asked for, and room for the next one.

logger = logging.getLogger(__name__)

LEAST_KEPT = 2  # one may turn out to be damaged
TRAINER_STATE = "trainer_state.json"

Committed = Sequence[tuple[Path, Manifest]]  # newest first


def most_at_once(keep: int | None, saves: int) -> int:
    """Return how many checkpoints storage has to hold while the last of `saves` is written.

    Older ones beyond the newest `keep` go before a save if its room is needed, but LEAST_KEPT stay
    until it is committed: with a limit of 2 as with one of 3, three are there for a moment.
    """
    return saves if keep is None else min(saves, max(keep, LEAST_KEPT + 1))


def rotate(output_dir: Path, run_id: str, keep: int | None, best: Path | None) -> None:
    """Delete what is beyond the newest `keep` checkpoints (None: nothing) and the best one.

    Only committed checkpoints of this run are looked at, by step, never by a file's time. What
    cannot be deleted is said aloud: training goes on.
    """
    spare = _spare(committed_checkpoints(output_dir, run_id), keep, best)
    for directory in [*leftovers(output_dir, INCOMPLETE), *spare]:
        delete_if_possible(directory)


def make_room(
    output_dir: Path, run_id: str, keep: int | None, best: Path | None, estimate: Room
) -> None:
    """See that the next checkpoint fits; delete as much of `deletable` as that takes, if any.

    `estimate` counts while there is no checkpoint to go by. Raises StorageError, with nothing
    deleted, when all of it is not enough.
    """
    committed = committed_checkpoints(output_dir, run_id)
    needed = next_room(committed[0][1] if committed else None, estimate) + RESERVE
    free, freed = free_room(output_dir), Room(0, 0)
    doomed: list[Path] = []
    for directory in deletable(output_dir, committed, keep, best):
        if (free + freed).holds(needed):
            break
        doomed.append(directory)
        freed += taken_room([directory])
    if not (free + freed).holds(needed):
        staying = len({path for path, _ in committed} - set(doomed))
        raise StorageError(_no_room(output_dir, shortage(free, freed, needed), staying))
    for directory in doomed:
        logger.warning("%s is deleted before the save: its room is needed", directory)
        delete_if_possible(directory)  # what is missing then the save will say


def _no_room(output_dir: Path, words: tuple[str, str, str], staying: int) -> str:
    has, takes, missing = words
    ones = "the committed one stays" if staying == 1 else f"{staying} committed ones stay"
    stay = f", and {ones} until it is there" if staying else ""
    damaged = leftovers(output_dir, DAMAGED)
    useless = f", such as {damaged[0]} if you do not look into it any more" if damaged else ""
    return (
        f"{host_name()}: {output_dir} has {has}, the next checkpoint takes {takes}{stay}: "
        f"{missing} are missing. Remove files there{useless}, or have your quota raised (df -h, "
        "df -i, your site's quota command), then start the same command again: it goes on from "
        "the newest checkpoint, and none was touched."
    )


def deletable(
    output_dir: Path, committed: Committed, keep: int | None, best: Path | None
) -> Sequence[Path]:
    """Return what may be deleted before the next checkpoint is there, in the order to go.

    That is what starts left behind that were killed while they wrote or deleted, then what `rotate`
    would delete after the next commit, the oldest first, as long as LEAST_KEPT committed ones stay.
    """
    spare = _spare(committed, None if keep is None else keep - 1, best)
    most = max(0, len(committed) - LEAST_KEPT)
    return [*leftovers(output_dir, DELETING, RESHARDED, INCOMPLETE), *spare[:most]]


def best_checkpoint(checkpoint: Path) -> Path | None:
    """Return the best checkpoint so far, as a committed one has it; None where it names none."""
    try:
        state = json.loads((checkpoint / TRAINER_STATE).read_text(encoding="utf-8"))
        best = state["best_model_checkpoint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # whoever loads it says what is wrong with it
    return None if best is None else checkpoint.with_name(Path(best).name)


def _spare(committed: Committed, keep: int | None, best: Path | None) -> Sequence[Path]:
    """Return the committed checkpoints beyond the newest `keep` and the best, oldest first."""
    if keep is None:
        return []
    newest_first = [directory for directory, _ in committed]
    kept_best = best and best.name
    return [path for path in reversed(newest_first[keep:]) if path.name != kept_best]
