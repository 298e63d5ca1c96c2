"""Which checkpoints stay when there are more than were asked for, and room for the next one."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from utils.checkpoints.directory import INCOMPLETE, committed_checkpoints, delete, leftovers
from utils.checkpoints.sizes import MARGIN, readable
from utils.cluster.host import host_name
from utils.config.errors import StorageError

logger = logging.getLogger(__name__)

LEAST_KEPT = 2  # one may turn out to be damaged


def rotate(output_dir: Path, run_id: str, keep: int | None, best: Path | None) -> None:
    """Delete what is beyond the newest `keep` checkpoints (None: nothing) and the best one.

    Only committed checkpoints of this run are looked at, by step, never by a file's time. What
    cannot be deleted is said aloud: training goes on.
    """
    for directory in [*leftovers(output_dir, INCOMPLETE), *_spare(output_dir, run_id, keep, best)]:
        try:
            delete(directory)
        except OSError as error:
            logger.warning("%s could not be deleted: %s", directory, error)


def make_room(
    output_dir: Path, run_id: str, keep: int | None, best: Path | None, needed_bytes: int
) -> None:
    """See that the next checkpoint fits; free just what `rotate` would free after it, if needed.

    `needed_bytes` counts while there is no checkpoint to go by. Raises StorageError, with nothing
    deleted, when that is not enough.
    """
    committed = committed_checkpoints(output_dir, run_id)
    if committed:
        needed_bytes = int(committed[0][1].size_bytes * MARGIN)
    free = _free_bytes(output_dir)
    if free >= needed_bytes:
        return
    spare = leftovers(output_dir, INCOMPLETE)
    spare = [*spare, *_spare(output_dir, run_id, keep and keep - 1, best)]
    freed = sum(_size_bytes(directory) for directory in spare)
    if free + freed < needed_bytes:
        also = f", {readable(freed)} with what rotation frees" if spare else ""
        raise StorageError(
            f"{host_name()}: {output_dir} has {readable(free)} free{also}, a checkpoint takes "
            f"{readable(needed_bytes)}: make room there (df -h, your site's quota command), then "
            "start the same command again; the checkpoints before are untouched."
        )
    for directory in spare:
        logger.warning("%s is deleted before the save: its room is needed", directory)
        delete(directory)


def _spare(output_dir: Path, run_id: str, keep: int | None, best: Path | None) -> Sequence[Path]:
    """Return the committed checkpoints beyond the newest `keep` and the best, oldest first."""
    if keep is None:
        return []
    newest_first = [directory for directory, _ in committed_checkpoints(output_dir, run_id)]
    kept_best = best and best.name
    return [path for path in reversed(newest_first[keep:]) if path.name != kept_best]


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _size_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
