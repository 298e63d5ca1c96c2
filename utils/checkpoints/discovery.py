"""The checkpoints in a run directory: which to resume from, which stay, what makes room."""

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from utils.checkpoints.files import (
    MANIFEST,
    MARGIN,
    DamagedCheckpointError,
    Manifest,
    file_problems,
    flush,
    read_manifest,
    readable,
)
from utils.config.errors import ConfigurationError, StorageError
from utils.support.host import host_name

logger = logging.getLogger(__name__)

CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")
# Before the name: Trainer and many scripts take all that begins with checkpoint- for one.
INCOMPLETE, DAMAGED, DELETING = "incomplete.", "damaged.", "deleting."
RESHARDED = "resharded."  # a copy for another number of ranks, there while it is loaded
SHOWN_PROBLEMS = 5
LEAST_KEPT = 2  # one may turn out to be damaged
# A save leaves that much: the next start writes lock, provenance and journal before it deletes.
RESERVE_BYTES = 2**20

Committed = Sequence[tuple[Path, Manifest]]  # newest first


def numbered_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """Return (step, directory) of all that is named like a checkpoint, newest step first."""
    found = []
    for directory in output_dir.glob("checkpoint-*"):
        match = CHECKPOINT_NAME.fullmatch(directory.name)
        if match and directory.is_dir() and not directory.is_symlink():
            found.append((int(match.group(1)), directory))
    return sorted(found, reverse=True)


def committed_checkpoints(output_dir: Path, run_id: str) -> list[tuple[Path, Manifest]]:
    """Return the committed checkpoints of this run, newest first, by their manifests alone."""
    found = []
    for _, directory in numbered_checkpoints(output_dir):
        if not (directory / MANIFEST).is_file():
            continue
        try:
            manifest = read_manifest(directory)
        except (DamagedCheckpointError, OSError) as error:
            logger.warning("%s: %s; it does not count as a checkpoint", directory, error)
            continue
        if manifest.run_id == run_id:
            found.append((directory, manifest))
    return found


def uncommitted_checkpoints(output_dir: Path) -> list[Path]:
    """Return what is named like a checkpoint and has no manifest, newest first."""
    numbered = [directory for _, directory in numbered_checkpoints(output_dir)]
    return [directory for directory in numbered if not (directory / MANIFEST).exists()]


def set_aside(directory: Path, prefix: str) -> Path:
    """Rename a directory so that nothing takes it for a checkpoint; an older damaged one stays."""
    target = directory.with_name(prefix + directory.name)
    if prefix == INCOMPLETE:
        delete_if_possible(target)
    number = 1
    while target.exists():
        number += 1
        target = directory.with_name(f"{prefix}{number}.{directory.name}")
    directory.rename(target)
    flush(directory.parent)
    return target


def delete(directory: Path) -> None:
    """Delete a directory under another name, so that a kill leaves no part of a checkpoint."""
    if not directory.exists():
        return
    doomed = directory
    if not directory.name.startswith(DELETING):
        doomed = directory.with_name(DELETING + directory.name)
        shutil.rmtree(doomed, ignore_errors=True)  # of a run that was killed here
        directory.rename(doomed)
        flush(directory.parent)
    shutil.rmtree(doomed)


def delete_if_possible(directory: Path) -> None:
    """Delete a directory that nobody needs; a failure is logged: it is in nobody's way."""
    try:
        delete(directory)
    except OSError as error:
        logger.warning("%s could not be deleted: %s", directory, error)


def leftovers(output_dir: Path, *prefixes: str) -> Sequence[Path]:
    """Return the directories under these prefixes, oldest step first."""
    found = [path for prefix in prefixes for path in output_dir.glob(f"{prefix}*checkpoint-*")]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2] or 0))


def resume_point(output_dir: Path, run_id: str, *, dry_run: bool = False) -> Path | None:
    """Return the newest checkpoint of the run that is as it was committed; None: start afresh.

    Every file is read and compared with the manifest; uncommitted and damaged checkpoints are set
    aside. A `dry_run` moves nothing and reads no tensors. Rank 0 alone calls it.
    Raises StorageError, with nothing moved, when all committed checkpoints are damaged: to train
    from step 0 again is for a person to decide.
    """
    if not dry_run:
        for directory in leftovers(output_dir, DELETING, RESHARDED):
            delete_if_possible(directory)
    uncommitted = uncommitted_checkpoints(output_dir)
    damaged: dict[Path, str] = {}
    found = None
    for step, directory in numbered_checkpoints(output_dir):
        if directory in uncommitted:
            continue
        begun = time.monotonic()
        problems = checkpoint_problems(directory, step, run_id, tensors=not dry_run)
        if not problems:
            found = directory
            break
        damaged[directory] = "; ".join(problems[:SHOWN_PROBLEMS])
    if damaged and found is None:
        raise StorageError(
            [
                *(f"{host_name()}: {path}: {problems}." for path, problems in damaged.items()),
                "no committed checkpoint of this run is whole: check the storage and restore one "
                "of them; or move them away to start again at step 0.",
            ]
        )
    if dry_run:
        for directory, shown in damaged.items():
            logger.warning("%s is damaged (%s): %s is used instead", directory, shown, found)
        return found
    _set_all_aside(uncommitted, damaged)
    if found is not None:
        logger.info("%s verified in %.1f s", found, time.monotonic() - begun)
        logger.info("resuming from %s", found)
    return found


def _set_all_aside(uncommitted: Sequence[Path], damaged: Mapping[Path, str]) -> None:
    for directory in uncommitted:
        name = set_aside(directory, INCOMPLETE).name
        reason = "was not committed (the run ended while it was written)"
        logger.warning("%s %s: set aside as %s", directory, reason, name)
    for directory, shown in damaged.items():
        name = set_aside(directory, DAMAGED).name
        logger.warning(
            "%s is damaged (%s): set aside as %s; check the storage", directory, shown, name
        )


def checkpoint_problems(
    directory: Path, step: int, run_id: str, *, tensors: bool = True
) -> list[str]:
    """Return what is wrong with a committed checkpoint; empty: it is whole.

    Raises ConfigurationError when it belongs to another run.
    """
    try:
        manifest = read_manifest(directory)
        if manifest.run_id != run_id:
            raise ConfigurationError(
                f"{directory} is a checkpoint of another run ({manifest.run_id}, not {run_id}): "
                "move it away; --init_from takes its weights into a new run."
            )
        if manifest.step != step:
            return [f"{MANIFEST} is of step {manifest.step:,}"]
        return file_problems(directory, manifest.files, tensors=tensors)
    except (DamagedCheckpointError, OSError) as error:
        return [str(error)]


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
