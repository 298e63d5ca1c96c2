"""The names of checkpoints in a run directory, and what moves out of their way."""

import logging
import re
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from utils.checkpoints.files import MANIFEST, file_problems, flush
from utils.checkpoints.manifest import DamagedCheckpointError, Manifest, read_manifest
from utils.config.errors import ConfigurationError, StorageError
from utils.support.host import host_name

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


# Finds the checkpoint to go on from: the newest one that is committed and whole.

SHOWN_PROBLEMS = 5
# Files of a model's configuration and a tokenizer; no tensors are among them.
DESCRIPTIONS = frozenset({".json", ".jinja", ".txt", ".model"})


@dataclass(frozen=True)
class _Search:
    """What a look through a run directory came upon, newest first."""

    found: Path | None
    uncommitted: list[Path]
    damaged: dict[Path, list[str]]


def resume_point(output_dir: Path, run_id: str) -> Path | None:
    """Return the newest checkpoint of the run that is as it was committed; None: start afresh.

    Every file is read and compared with the manifest. What was not committed is set aside under
    incomplete., what is not as it was committed under damaged., both aloud. A leftover that cannot
    be deleted is said aloud, too, and no reason to stop. Rank 0 alone calls it.
    Raises StorageError, with nothing moved, when all committed ones are damaged: to start at step 0
    again is a person's to decide. Raises ConfigurationError for a checkpoint of another run.
    """
    for directory in leftovers(output_dir, DELETING, RESHARDED):
        delete_if_possible(directory)
    search = _search(output_dir, lambda path, step: _timed_problems(path, step, run_id))
    for directory in search.uncommitted:
        logger.warning(
            "%s was not committed (the run ended while it was written): set aside as %s",
            directory,
            set_aside(directory, INCOMPLETE).name,
        )
    for directory, problems in search.damaged.items():
        logger.warning(
            "%s is damaged (%s): set aside as %s; see whether the storage is sound",
            directory,
            _shown(problems),
            set_aside(directory, DAMAGED).name,
        )
    if search.found is not None:
        logger.info("resuming from %s", search.found)
    return search.found


def described_point(output_dir: Path, run_id: str) -> Path | None:
    """Return the newest committed checkpoint to read a configuration or a tokenizer from.

    All that `resume_point` asks for counts, but that of the files just the DESCRIPTIONS are read: a
    dry run, or a job that the lock will refuse, is not to read all weights. Nothing is moved, what
    is passed over is said aloud. Rank 0 alone calls it; raises what `resume_point` does.
    """
    search = _search(
        output_dir, lambda path, step: checkpoint_problems(path, step, run_id, DESCRIPTIONS)
    )
    for directory, problems in search.damaged.items():
        logger.warning(
            "%s is damaged (%s): what describes model and tokenizer is read in %s",
            directory,
            _shown(problems),
            search.found,
        )
    return search.found


def checkpoint_problems(
    directory: Path, step: int, run_id: str, suffixes: Collection[str] | None = None
) -> list[str]:
    """Return what is wrong with a committed checkpoint, by reading all of it; none: it is whole.

    With `suffixes` only the files that end so are read. Raises ConfigurationError when it belongs
    to another run.
    """
    try:
        manifest = read_manifest(directory)
    except (DamagedCheckpointError, OSError) as error:
        return [str(error)]
    if manifest.run_id != run_id:
        raise ConfigurationError(
            f"{directory} is a checkpoint of another run ({manifest.run_id}, not {run_id}): move "
            "it away; --init_from takes its weights into a new run."
        )
    if manifest.step != step:
        return [f"{MANIFEST} is of step {manifest.step:,}"]
    try:
        return file_problems(directory, manifest.files, suffixes)
    except OSError as error:
        return [f"it cannot be read ({error})"]


def _search(output_dir: Path, problems_of: Callable[[Path, int], list[str]]) -> _Search:
    """Look for the newest committed checkpoint without problems; the ones before are not read.

    Raises StorageError when there are committed ones and all have problems.
    """
    uncommitted = uncommitted_checkpoints(output_dir)
    damaged: dict[Path, list[str]] = {}
    found = None
    for step, directory in numbered_checkpoints(output_dir):
        if found is None and directory not in uncommitted:
            problems = problems_of(directory, step)
            if problems:
                damaged[directory] = problems
            else:
                found = directory
    if damaged and found is None:
        raise StorageError(_all_damaged(damaged))
    return _Search(found, uncommitted, damaged)


def _timed_problems(directory: Path, step: int, run_id: str) -> list[str]:
    begun = time.monotonic()
    problems = checkpoint_problems(directory, step, run_id)
    if not problems:
        logger.info("%s verified in %.1f s", directory, time.monotonic() - begun)
    return problems


def _all_damaged(damaged: dict[Path, list[str]]) -> list[str]:
    told = [f"{host_name()}: {path}: {_shown(problems)}." for path, problems in damaged.items()]
    return [
        *told,
        "no committed checkpoint of this run is whole: see whether the storage is sound and "
        "restore one of them; or move them away to start again at step 0.",
    ]


def _shown(problems: list[str]) -> str:
    more = len(problems) - SHOWN_PROBLEMS
    return "; ".join(problems[:SHOWN_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
