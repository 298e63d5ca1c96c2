"""The names of checkpoints in a run directory, and what moves out of their way."""

import logging
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from utils.checkpoints.files import MANIFEST, flush
from utils.checkpoints.manifest import DamagedCheckpointError, Manifest, read_manifest

logger = logging.getLogger(__name__)

CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")
# Before the name: Trainer and many scripts take all that begins with checkpoint- for one.
INCOMPLETE, DAMAGED, DELETING = "incomplete.", "damaged.", "deleting."
RESHARDED = "resharded."  # a copy for another number of ranks, there while it is loaded


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
    """Rename a directory so that nothing takes it for a checkpoint; return its new name.

    One of the same name that was set aside before is kept if it was damaged, and goes if it was
    incomplete, for then nothing can be had from it. What cannot go keeps its name.
    """
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
    """Delete a directory that nobody needs; where that fails say so: it is in nobody's way."""
    try:
        delete(directory)
    except OSError as error:
        logger.warning("%s could not be deleted: %s", directory, error)


def leftovers(output_dir: Path, *prefixes: str) -> Sequence[Path]:
    """Return the directories under these prefixes, oldest step first."""
    found = [path for prefix in prefixes for path in output_dir.glob(f"{prefix}*checkpoint-*")]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2] or 0))
