"""A checkpoint from elsewhere resumes in a new run directory: `--resume_from_checkpoint DIR`.

Each checkpoint carries its run's config.yaml and provenance.json in the folder `run`, so that it
resumes wherever it was copied to, and a start compares the settings as in the old directory.
"""

import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.checkpoints.discovery import checkpoint_problems, numbered_checkpoints
from utils.checkpoints.files import (
    CONFIG,
    MANIFEST,
    PROVENANCE,
    DamagedCheckpointError,
    Manifest,
    flush,
    known_run_id,
    read_manifest,
)
from utils.config.errors import ConfigurationError

logger = logging.getLogger(__name__)

RECORD = "run"
JOURNAL = "metrics.jsonl"
STATE = "trainer_state.json"
FLAG = "--resume_from_checkpoint"


def keep_record(output_dir: Path, checkpoint: Path) -> None:
    """Put what a resume elsewhere compares into a checkpoint that is being written."""
    (checkpoint / RECORD).mkdir(exist_ok=True)
    for name in (CONFIG, PROVENANCE):
        if (output_dir / name).is_file():
            shutil.copyfile(output_dir / name, checkpoint / RECORD / name)


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A committed checkpoint outside the run's directory; `record`: its config and provenance."""

    directory: Path
    record: Path
    manifest: Manifest


def foreign_checkpoint(named: str | bool | None, output_dir: Path) -> ForeignCheckpoint | None:
    """Return what `--resume_from_checkpoint` stands for; None where the run has its own, or none.

    `named` is the directory of a checkpoint, or of a run, whose newest counts. Its files are not
    read yet. Raises ConfigurationError.
    """
    if not named or named is True:  # the newest of its own, as always
        return None
    if _newest(output_dir) is not None:
        logger.info(
            "%s %s: %s has checkpoints of its own, of which the newest counts (move later ones "
            "away to go back)", FLAG, named, output_dir,
        )  # fmt: skip
        return None
    directory = Path(named)
    if not directory.is_dir():
        raise ConfigurationError(
            f"{FLAG} {named}: there is no such directory; one on the Hub comes with `hf download "
            "OWNER/NAME --local-dir DIR`."
        )
    if not (directory / MANIFEST).is_file():
        directory = _newest(directory) or directory
    try:
        manifest = read_manifest(directory)
    except (DamagedCheckpointError, OSError) as error:
        raise ConfigurationError(
            f"{FLAG} {named}: it is no committed checkpoint, nor a run that has one ({error})."
        ) from error
    if known_run_id(output_dir / PROVENANCE) not in (None, manifest.run_id):
        raise ConfigurationError(
            f"{output_dir} holds another run, which has no checkpoint yet: name another "
            f"--output_dir to resume {directory}."
        )
    for record in (directory / RECORD, directory.parent):
        whole = (record / CONFIG).is_file() and (record / PROVENANCE).is_file()
        if whole and known_run_id(record / PROVENANCE) == manifest.run_id:
            return ForeignCheckpoint(directory, record, manifest)
    raise ConfigurationError(
        f"{FLAG} {directory}: an earlier version of Stoker wrote it, which kept the settings in "
        f"the run's directory: copy {CONFIG} and {PROVENANCE} from there to {directory.parent}."
    )


def adopt_checkpoint(named: str | bool | None, output_dir: Path, *, needs_best: bool) -> None:
    """Make it the run's own, verified; `needs_best`: with the best one so far, which is beside it.

    Rank 0 alone calls it, and holds the lock. A kill leaves it whole or not there. Raises
    ConfigurationError.
    """
    found = foreign_checkpoint(named, output_dir)
    if found is None:
        return
    adopted = [(_linked(found.directory, output_dir), found.directory)]
    if best := _best_beside(found, needs_best=needs_best):
        adopted.insert(0, (_linked(best, output_dir), best))
    places = ((found.record, CONFIG), (found.directory.parent, JOURNAL), (found.record, PROVENANCE))
    for folder, name in places:
        if (folder / name).is_file() and not (output_dir / name).exists():
            draft = output_dir / f".{name}.partial"
            shutil.copyfile(folder / name, draft)
            flush(draft)
            draft.rename(output_dir / name)
    for partial, source in adopted:
        partial.rename(output_dir / f"checkpoint-{read_manifest(partial).step}")
        logger.info("%s %s: verified, and taken into %s", FLAG, source, output_dir)
    flush(output_dir)


def _newest(output_dir: Path) -> Path | None:
    found = (directory for _, directory in numbered_checkpoints(output_dir))
    return next((directory for directory in found if (directory / MANIFEST).is_file()), None)


def _best_beside(found: ForeignCheckpoint, *, needs_best: bool) -> Path | None:
    """Return the best checkpoint so far, if it is another one that is there."""
    directory = found.directory
    state: dict[str, Any] = json.loads((directory / STATE).read_text(encoding="utf-8"))
    name = Path(state["best_model_checkpoint"] or directory).name
    best = directory.with_name(name)
    if name in (directory.name, f"checkpoint-{found.manifest.step}"):
        return None
    if (best / MANIFEST).is_file():
        return best
    if needs_best:
        raise ConfigurationError(
            f"{FLAG} {directory}: load_best_model_at_end needs {name} too, the best one so far: "
            f"copy it to {directory.parent}."
        )
    return None


def _linked(source: Path, output_dir: Path) -> Path:
    """Return a verified copy under another name; hard links where the file system has them."""
    manifest = read_manifest(source)
    partial = output_dir / f".checkpoint-{manifest.step}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # of a start that was killed here
    try:
        for name in (*manifest.files, MANIFEST):
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            _link(source / name, partial / name)
        problems = checkpoint_problems(partial, manifest.step, manifest.run_id)
    except FileNotFoundError as error:
        problems = [str(error)]
    if problems:
        shutil.rmtree(partial)
        raise ConfigurationError(
            f"{FLAG} {source}: it is not as it was committed ({problems[0]}): copy it again."
        )
    return partial


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(strict=True), target)  # not the link that the Hub's cache has
    except FileNotFoundError:
        raise
    except OSError:  # another file system, another owner
        shutil.copyfile(source, target)
        flush(target)
