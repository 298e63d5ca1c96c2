"""Which checkpoints stay when there are more than were asked for, and room for the next one."""

import json
import logging
import os
from collections.abc import Sequence
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

logger = logging.getLogger(__name__)

LEAST_KEPT = 2  # one may turn out to be damaged
# A save leaves that much: the next start writes lock, provenance and journal before it deletes.
RESERVE_BYTES = 2**20

Committed = Sequence[tuple[Path, Manifest]]  # newest first


def most_at_once(keep: int | None, saves: int) -> int:
    """Return how many checkpoints storage holds while the last of `saves` is written.

    LEAST_KEPT stay until it is committed: with a limit of 2 there are three for a moment.
    """
    return saves if keep is None else min(saves, max(keep, LEAST_KEPT + 1))


def rotate(output_dir: Path, run_id: str, keep: int | None) -> None:
    """Delete this run's committed checkpoints but the newest `keep` (None: all) and the best."""
    spare = _spare(committed_checkpoints(output_dir, run_id), keep)
    for directory in [*leftovers(output_dir, INCOMPLETE), *spare]:
        delete_if_possible(directory)


def make_room(output_dir: Path, run_id: str, keep: int | None, estimated_bytes: float) -> None:
    """Delete as much of `deletable` as the next checkpoint needs.

    Raises StorageError, with nothing deleted, if all of it is not enough.
    """
    committed = committed_checkpoints(output_dir, run_id)
    needed = next_bytes(committed, estimated_bytes) + RESERVE_BYTES
    free = room = free_bytes(output_dir)
    doomed: list[Path] = []
    for directory in deletable(output_dir, committed, keep):
        if room >= needed:
            break
        doomed.append(directory)
        room += taken_bytes([directory])
    if room < needed:
        staying = len({path for path, _ in committed} - set(doomed))
        damaged = leftovers(output_dir, DAMAGED)
        hint = f", such as {damaged[0]} if you do not need it" if damaged else ""
        raise StorageError(
            f"{host_name()}: the next checkpoint takes {readable(needed)}, {output_dir} has "
            f"{readable(free)} free, {readable(room - free)} more once old ones are deleted "
            f"({staying} stay until it is there): {readable(needed - room)} are missing. Remove "
            f"files there{hint}, then start the same command again: it resumes from the newest "
            "checkpoint."
        )
    for directory in doomed:
        logger.warning("%s is deleted before the save: its room is needed", directory)
        delete_if_possible(directory)  # if that fails the save will


def deletable(output_dir: Path, committed: Committed, keep: int | None) -> Sequence[Path]:
    """Return what may go before the next save, in this order.

    What killed starts left behind, then what `rotate` would delete after the next commit, oldest
    first, as long as LEAST_KEPT committed ones stay.
    """
    spare = _spare(committed, None if keep is None else keep - 1)
    most = max(0, len(committed) - LEAST_KEPT)
    return [*leftovers(output_dir, DELETING, RESHARDED, INCOMPLETE), *spare[:most]]


def next_bytes(committed: Committed, estimated_bytes: float) -> float:
    """Return what the next checkpoint takes, by the newest one if there is one."""
    return committed[0][1].size_bytes * MARGIN if committed else estimated_bytes


def free_bytes(directory: Path) -> int:
    """Return what a file system has left for this user; quotas it does not know of. OSError."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def taken_bytes(directories: Sequence[Path]) -> int:
    """Return what is free once these directories are deleted."""
    files = (path for directory in directories for path in directory.rglob("*"))
    return sum(path.lstat().st_size for path in files if path.is_file())


def _spare(committed: Committed, keep: int | None) -> Sequence[Path]:
    """Return the committed checkpoints beyond the newest `keep` and the best, oldest first."""
    if keep is None or not committed:
        return []
    newest_first = [directory for directory, _ in committed]
    try:
        state = json.loads((newest_first[0] / "trainer_state.json").read_text(encoding="utf-8"))
        best = Path(state["best_model_checkpoint"] or "none").name
    except (OSError, ValueError, KeyError, TypeError):
        best = "none"  # a resume says what is wrong with it
    return [path for path in reversed(newest_first[keep:]) if path.name != best]
