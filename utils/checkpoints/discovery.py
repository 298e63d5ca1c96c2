"""The checkpoints in a run directory: choice for a resume, deletion of old ones, free space.

A committed checkpoint is a directory checkpoint-STEP with a manifest.json. A save writes
manifest.json last. So a directory without manifest.json is an unfinished save.
"""

import json
import logging
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from utils.checkpoints.files import (
    FINAL,
    MANIFEST,
    SPACE_MARGIN,
    DamagedCheckpointError,
    Manifest,
    file_problems,
    flush,
    read_manifest,
    readable,
)
from utils.config.errors import ConfigurationError, StorageError
from utils.host.machine import host_name

logger = logging.getLogger(__name__)

CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")
# Prefixes of renamed checkpoints. A suffix would not help, because Trainer and many scripts take
# any directory checkpoint-* for a checkpoint.
INCOMPLETE, DAMAGED, DELETING = "incomplete.", "damaged.", "deleting."
RESHARDED = "resharded."  # a temporary copy for another number of ranks
SHOWN_PROBLEMS = 5
LEAST_KEPT = 2  # checkpoints, because the newest may be damaged
# A save leaves this space free. The next job of the run writes .lock, provenance.json and
# metrics.jsonl before it deletes old checkpoints.
RESERVE_BYTES = 2**20


def numbered_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of directories checkpoint-STEP, committed or not; highest step first."""
    found = []
    for directory in output_dir.glob("checkpoint-*"):
        match = CHECKPOINT_NAME.fullmatch(directory.name)
        if match and directory.is_dir() and not directory.is_symlink():
            found.append((int(match.group(1)), directory))
    return sorted(found, reverse=True)


def how_to_rewrite(final: str | Path) -> str:
    """Return advice for the user on how to write the damaged folder `final` again.

    Return "" if the path `final` does not end in final/, or if the run has no checkpoint.
    """
    directory = Path(final)
    if directory.name != FINAL or not numbered_checkpoints(directory.parent):
        return ""
    delete = f"rm -r {shlex.quote(str(directory))}"
    return f" (`{delete}` and start the run again: it writes this folder from its last checkpoint)"


def own_checkpoint(output_dir: Path) -> Path | None:
    """Return the path of the newest checkpoint that has a manifest.json, or None."""
    found = (directory for _, directory in numbered_checkpoints(output_dir))
    return next((directory for directory in found if (directory / MANIFEST).is_file()), None)


def best_checkpoint(directory: Path) -> Path | None:
    """Return the path of the run's best checkpoint. `directory` is any checkpoint of the run.

    The path is in trainer_state.json of `directory`. Return None if trainer_state.json is missing
    or damaged or names no best checkpoint. Only the last part of the stored path is used, because
    the run may have been moved or downloaded. The returned path is in the same folder as
    `directory` and may not exist.
    """
    try:
        state = json.loads((directory / "trainer_state.json").read_text(encoding="utf-8"))
        name = Path(state["best_model_checkpoint"] or "").name
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a resume reports the damage
    return directory.with_name(name) if CHECKPOINT_NAME.fullmatch(name) else None


def committed_checkpoints(
    output_dir: Path, run_id: str | None = None
) -> list[tuple[Path, Manifest]]:
    """Return (path, manifest) of each committed checkpoint, newest first.

    run_id: return only checkpoints of this run. None means any run. For an unreadable manifest, log
    a warning and leave the checkpoint out.
    """
    found = []
    for _, directory in numbered_checkpoints(output_dir):
        try:
            manifest = read_manifest(directory)
        except FileNotFoundError:
            continue
        except (DamagedCheckpointError, OSError) as error:
            logger.warning("%s: %s; it does not count as a checkpoint", directory, error)
            continue
        if run_id in (None, manifest.run_id):
            found.append((directory, manifest))
    return found


def set_aside(directory: Path, prefix: str) -> str:
    """Rename a checkpoint or a file, so that no resume uses it. Return the new name without folder.

    prefix: the beginning of the new name. If the new name exists, a number is added after the
    prefix: damaged.2.checkpoint-7.
    """
    number, target = 1, directory.with_name(prefix + directory.name)
    while target.exists():
        number += 1
        target = directory.with_name(f"{prefix}{number}.{directory.name}")
    directory.rename(target)
    flush(directory.parent)
    return target.name


def delete(directory: Path) -> None:
    """Rename a checkpoint to deleting.NAME, then delete it. Log a warning if this fails.

    If the process is killed in between, no partial directory has the name of a checkpoint.
    """
    try:
        doomed = directory
        if not directory.name.startswith(DELETING):
            doomed = directory.with_name(DELETING + directory.name)
            shutil.rmtree(doomed, ignore_errors=True)  # left by a killed run
            directory.rename(doomed)
            flush(directory.parent)
        shutil.rmtree(doomed)
    except OSError as error:
        logger.warning("%s could not be deleted: %s", directory, error)


def leftovers(output_dir: Path, *prefixes: str) -> list[Path]:
    """Return the paths of renamed checkpoints: damaged.checkpoint-7 for the prefix `damaged.`."""
    return [path for prefix in prefixes for path in output_dir.glob(f"{prefix}*checkpoint-*")]


def uncommitted_checkpoints(output_dir: Path) -> list[Path]:
    """Return the paths of directories checkpoint-STEP without manifest.json, highest step first."""
    numbered = [directory for _, directory in numbered_checkpoints(output_dir)]
    return [directory for directory in numbered if not (directory / MANIFEST).exists()]


def resume_point(output_dir: Path, run_id: str, *, dry_run: bool = False) -> Path | None:
    """Return the path of the run's newest undamaged checkpoint; None if the run has no checkpoint.

    Compare the files of committed checkpoints with their manifests, newest checkpoint first, until
    a checkpoint is undamaged. Then rename damaged and uncommitted checkpoints, and delete leftovers
    of killed processes. A `dry_run` changes no file and reads no tensors. Only rank 0 calls this.
    Raises ConfigurationError for a checkpoint of another run. If all committed checkpoints are
    damaged, raises StorageError and changes nothing: a person has to decide whether to train from
    step 0 again.
    """
    found: Path | None = None
    damaged: dict[Path, str] = {}
    for step, directory in numbered_checkpoints(output_dir):
        if not (directory / MANIFEST).exists():
            continue
        problems = checkpoint_problems(directory, step, run_id, tensors=not dry_run)
        if not problems:
            found = directory
            break
        damaged[directory] = "; ".join(problems[:SHOWN_PROBLEMS]).rstrip(".")
    if damaged and found is None:
        raise StorageError(
            [
                *(f"{host_name()}: {directory}: {text}." for directory, text in damaged.items()),
                "no committed checkpoint of this run is whole: check the storage and restore one "
                "of them; or move them away to start again at step 0.",
            ]
        )
    if not dry_run:
        for directory in leftovers(output_dir, INCOMPLETE, DELETING, RESHARDED):
            delete(directory)
        for directory in uncommitted_checkpoints(output_dir):
            name = set_aside(directory, INCOMPLETE)
            logger.warning("%s was not committed: set aside as %s", directory, name)
        if found is not None:
            logger.info("resuming from %s", found)
    for directory, text in damaged.items():
        name = "not used" if dry_run else f"set aside as {set_aside(directory, DAMAGED)}"
        logger.warning("%s is damaged (%s): %s; check the storage", directory, text, name)
    return found


def checkpoint_problems(
    directory: Path, step: int, run_id: str, *, tensors: bool = True
) -> list[str]:
    """Return one text for each difference between a checkpoint and its manifest, or [].

    step: the step that the manifest must have. Without `tensors`, weights are compared by size and
    not read. Raises ConfigurationError if the checkpoint belongs to a run other than `run_id`.
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


def max_checkpoints(keep: int | None, saves: int) -> int:
    """Return the largest number of checkpoints that exist at the same time, without the best one.

    keep: the number of newest checkpoints to keep. None means all. saves: the number of saves in
    the run. A checkpoint counts while it is being saved. Before a save, `make_room` deletes old
    checkpoints if space is short, but leaves LEAST_KEPT (2). So the result is at least three even
    if `keep` is smaller, but never more than `saves`.
    """
    return saves if keep is None else min(saves, max(keep, LEAST_KEPT + 1))


def rotate(output_dir: Path, run_id: str, keep: int | None) -> None:
    """Delete old checkpoints of this run, except the newest `keep` and the best one.

    None for `keep` keeps all. Also delete directories incomplete.*, which are uncommitted
    checkpoints that `resume_point` renamed.
    """
    old = _old_checkpoints(committed_checkpoints(output_dir, run_id), keep)
    for directory in [*leftovers(output_dir, INCOMPLETE), *old]:
        delete(directory)


def make_room(output_dir: Path, run_id: str, keep: int | None, estimated_bytes: float) -> None:
    """Delete old checkpoints until another one fits. Arguments and errors: see `find_room`."""
    for directory in find_room(output_dir, run_id, keep, estimated_bytes):
        logger.warning("%s is deleted before the save: its room is needed", directory)
        delete(directory)  # if the deletion fails, the save will report the full disk


def find_room(
    output_dir: Path, run_id: str | None, keep: int | None, estimated_bytes: float, count: int = 1
) -> list[Path]:
    """Return the paths of directories to delete so that `count` more checkpoints fit on storage.

    Return [] if the free space is enough. Leftovers of killed processes come first in the list.
    Then come the checkpoints that `rotate` would delete after the next save, oldest first, but
    LEAST_KEPT (2) committed checkpoints stay. keep: the number of newest checkpoints that `rotate`
    keeps. run_id: None means a new run, which has nothing to delete. estimated_bytes: the size of a
    checkpoint before the first save. After the first save, the size of the newest committed
    checkpoint is used. Raises StorageError if deletions free too little.
    """
    committed: list[tuple[Path, Manifest]] = []
    deletable: list[Path] = []
    if run_id is not None:
        committed = committed_checkpoints(output_dir, run_id)
        deletable = leftovers(output_dir, DELETING, RESHARDED, INCOMPLETE)
        deletable += uncommitted_checkpoints(output_dir)
        old = _old_checkpoints(committed, None if keep is None else keep - 1)
        deletable += old[: max(0, len(committed) - LEAST_KEPT)]
    size = committed[0][1].size_bytes * SPACE_MARGIN if committed else estimated_bytes
    needed = count * size + RESERVE_BYTES
    free = room = free_disk_bytes(output_dir)
    doomed: list[Path] = []
    for directory in deletable:
        if room >= needed:
            break
        doomed.append(directory)
        room += taken_bytes(directory)
    if room < needed:
        raise StorageError(
            f"{host_name()}: {count} more checkpoint(s) of about {readable(size)} will be there at "
            f"once, {output_dir} has {readable(free)} free and {readable(room - free)} more once "
            f"old ones are deleted: {readable(needed - room)} are missing. Make room there (see "
            "also your quota), then start the same command again; no checkpoint was touched."
        )
    return doomed


def whole_checkpoints(output_dir: Path) -> list[tuple[Path, Manifest]]:
    """Return (path, manifest) of committed checkpoints without a missing or truncated file.

    The newest is first. Weights are not read.
    """
    return [
        (directory, manifest)
        for directory, manifest in committed_checkpoints(output_dir)
        if not file_problems(directory, manifest.files, tensors=False)
    ]


def deletable_checkpoints(output_dir: Path) -> list[Path]:
    """Return the paths of checkpoints that a user may delete.

    The best checkpoint and the newest LEAST_KEPT (2) whole checkpoints stay. A whole checkpoint has
    no missing or truncated file. Renamed checkpoints such as damaged.checkpoint-7 are in the list.
    Checkpoints newer than the newest whole one are left out, because a save may be in progress. If
    no checkpoint is whole, return []: a person has to decide which checkpoint to repair.
    """
    if not (whole := whole_checkpoints(output_dir)):
        return []
    intact = [directory for directory, _ in whole]
    older = [path for step, path in numbered_checkpoints(output_dir) if step < whole[0][1].step]
    damaged = [path for path in older if path not in intact]
    left = leftovers(output_dir, INCOMPLETE, DAMAGED, DELETING)
    return [*_old_checkpoints(whole, LEAST_KEPT), *damaged, *left]


def free_disk_bytes(directory: Path) -> int:
    """Return the free bytes of the file system that has `directory`. Quotas are ignored."""
    return shutil.disk_usage(directory).free


def taken_bytes(directory: Path) -> int:
    """Return the total size in bytes of the files in a directory. A deletion frees this size."""
    return sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file())


def _old_checkpoints(committed: Sequence[tuple[Path, Manifest]], keep: int | None) -> list[Path]:
    """Return the paths of old checkpoints, oldest first. None for `keep` gives [].

    The newest `keep` checkpoints and the best checkpoint are left out. committed: newest first.
    """
    if keep is None or not committed:
        return []
    newest_first = [directory for directory, _ in committed]
    best = best_checkpoint(newest_first[0])
    return [path for path in reversed(newest_first[keep:]) if path != best]
