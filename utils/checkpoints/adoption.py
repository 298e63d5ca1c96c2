"""The flag `--resume_from_checkpoint DIR`, which copies a checkpoint into a new run directory.

Each checkpoint has copies of its run's config.yaml and provenance.json in its folder `run`. With
these files the run can resume in any directory, and Stoker can compare the current settings with
the run's earlier settings.
"""

import dataclasses
import logging
import shutil
from pathlib import Path

from utils.checkpoints.discovery import best_checkpoint, checkpoint_problems, own_checkpoint
from utils.checkpoints.files import (
    CONFIG,
    MANIFEST,
    PROVENANCE,
    RECORD,
    DamagedCheckpointError,
    Manifest,
    flush,
    read_manifest,
)
from utils.checkpoints.record import RunRecord
from utils.config.errors import ConfigurationError, did_you_mean
from utils.config.settings import RunSettings
from utils.host.atomic_files import paths_inside
from utils.host.journal_file import FILE_NAME as JOURNAL

logger = logging.getLogger(__name__)

FLAG = "--resume_from_checkpoint"


@dataclasses.dataclass(frozen=True)
class ForeignCheckpoint:
    """A committed checkpoint (it has a manifest.json) outside of output_dir.

    record: the folder with config.yaml and provenance.json of the run that saved the checkpoint
    """

    directory: Path
    record: Path
    manifest: Manifest


def resumed_record(settings: RunSettings) -> RunRecord:
    """Return config.yaml and provenance.json of the resumed run. A new run's record is empty."""
    output_dir = Path(str(settings.training.output_dir))
    # Except in a dry run, the checkpoint is already copied to output_dir.
    named = settings.training.resume_from_checkpoint if settings.run.dry_run else None
    foreign = foreign_checkpoint(named, output_dir)
    return RunRecord(output_dir if foreign is None else foreign.record)


def known_data(settings: RunSettings) -> list[str]:
    """Return the fingerprints of the resumed run's training data, one for each dataset.

    Return [] for a new run, or if `--accept_changes train_data` allows any data.
    """
    accepted = "train_data" in settings.run.accept_changes
    return [] if accepted else resumed_record(settings).training_data


def foreign_checkpoint(named: str | bool | None, output_dir: Path) -> ForeignCheckpoint | None:
    """Return the checkpoint that --resume_from_checkpoint names, without reading tensors.

    named: the flag's value: the path of a checkpoint or of a run directory, True for the newest
    checkpoint in output_dir, or None. A run directory means the newest committed checkpoint in it.
    Return None if `named` is no path, or if output_dir has checkpoints. Raises ConfigurationError
    if `named` has no committed checkpoint, if config.yaml or provenance.json of its run is missing,
    or if output_dir belongs to another run.
    """
    if not named or named is True:  # True: resume from this run's own newest checkpoint
        return None
    if own_checkpoint(output_dir) is not None:
        logger.info(
            "%s %s: %s has checkpoints of its own, of which the newest counts (move later ones "
            "away to go back)", FLAG, named, output_dir,
        )  # fmt: skip
        return None
    directory = Path(named)
    if not directory.is_dir():
        raise ConfigurationError(
            f"{FLAG} {named}: there is no such directory{did_you_mean(directory)}; one on the Hub "
            "comes with `hf download OWNER/NAME --local-dir DIR`."
        )
    if not (directory / MANIFEST).is_file():
        directory = own_checkpoint(directory) or directory
    try:
        manifest = read_manifest(directory)
    except (DamagedCheckpointError, OSError) as error:
        raise ConfigurationError(
            f"{FLAG} {named}: it is no committed checkpoint, nor a run that has one ({error})."
        ) from error
    if RunRecord(output_dir).run_id not in (None, manifest.run_id):
        raise ConfigurationError(
            f"{output_dir} holds another run, which has no checkpoint yet: name another "
            f"--output_dir to resume {directory}."
        )
    paths_inside(directory, (f"{RECORD}/{CONFIG}", f"{RECORD}/{PROVENANCE}"), FLAG)
    paths_inside(directory.parent, (CONFIG, PROVENANCE, JOURNAL), FLAG)
    for record in (directory / RECORD, directory.parent):
        complete = (record / CONFIG).is_file() and (record / PROVENANCE).is_file()
        if complete and RunRecord(record).run_id == manifest.run_id:
            return ForeignCheckpoint(directory, record, manifest)
    raise ConfigurationError(
        f"{FLAG} {directory}: an earlier version of Stoker wrote it, which kept the settings in "
        f"the run's directory: copy {CONFIG} and {PROVENANCE} from there to {directory.parent}."
    )


def adopt_checkpoint(named: str | bool | None, output_dir: Path, *, needs_best: bool) -> None:
    """Copy the checkpoint of --resume_from_checkpoint into `output_dir`, and verify the copy.

    Also copy the run's config.yaml, provenance.json, metrics.jsonl and best checkpoint. If
    `output_dir` has checkpoints, do nothing. If the process is killed, no partial copy has the name
    of a checkpoint. Only rank 0 calls this, after rank 0 has locked `output_dir`. Raises
    ConfigurationError if a checkpoint is damaged. With `needs_best`, also raises ConfigurationError
    if the best checkpoint is missing.
    """
    found = foreign_checkpoint(named, output_dir)
    if found is None:
        return
    partial = _verified_copy(found.directory, found.manifest, output_dir)
    adopted = [(partial, found.directory, found.manifest)]
    if best := _best_beside(found, best_checkpoint(partial), needs_best=needs_best):
        step = int(best.name.rpartition("-")[2])
        expected = dataclasses.replace(found.manifest, step=step)
        adopted.insert(0, (_verified_copy(best, expected, output_dir), best, expected))
    places = ((found.record, CONFIG), (found.directory.parent, JOURNAL), (found.record, PROVENANCE))
    for folder, name in places:
        if (folder / name).is_file() and not (output_dir / name).exists():
            draft = output_dir / f".{name}.partial"
            shutil.copyfile(folder / name, draft)
            flush(draft)
            draft.rename(output_dir / name)
    for partial, source, manifest in adopted:
        partial.rename(output_dir / f"checkpoint-{manifest.step}")
        logger.info("%s %s: verified, and taken into %s", FLAG, source, output_dir)
    flush(output_dir)


def _best_beside(found: ForeignCheckpoint, best: Path | None, *, needs_best: bool) -> Path | None:
    """Return the path of the run's best checkpoint in the folder of `found`, or None.

    best: the best checkpoint's path according to trainer_state.json, or None. If `found` is the
    best checkpoint, return None. If the folder lacks the best checkpoint or its manifest, raise
    ConfigurationError if `needs_best` is true, otherwise return None.
    """
    directory = found.directory
    if best is None or best.name in (directory.name, f"checkpoint-{found.manifest.step}"):
        return None
    beside = directory.with_name(best.name)
    if (beside / MANIFEST).is_file() and not beside.is_symlink():
        return beside
    if needs_best:
        raise ConfigurationError(
            f"{FLAG} {directory}: load_best_model_at_end needs {best.name} too, the best one so "
            f"far: copy it to {directory.parent}."
        )
    return None


def _verified_copy(source: Path, expected: Manifest, output_dir: Path) -> Path:
    """Copy a checkpoint into `output_dir` under a temporary name; return the path of the copy.

    The files of the copy are compared with the manifest. Raises ConfigurationError if a file
    differs, or if the run id or the step differs from `expected`.
    """
    partial = output_dir / f".checkpoint-{expected.step}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    try:
        for name in (*read_manifest(source).files, MANIFEST):
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, partial / name, follow_symlinks=False)
            flush(partial / name)
        problems = checkpoint_problems(partial, expected.step, expected.run_id)
    except (FileNotFoundError, DamagedCheckpointError, ConfigurationError) as error:
        problems = [str(error)]
    if problems:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConfigurationError(
            f"{FLAG} {source}: it is not as it was committed ({problems[0]}): copy it again."
        )
    return partial
