"""Whose a run directory is: a run's, nobody's, or something else's that is never written over."""

import re
from pathlib import Path

from utils.checkpoints.run_record import CONFIG, FINAL, PROVENANCE
from utils.cluster.run_lock import FOLDER
from utils.config.errors import ConfigurationError
from utils.runs.preflight import MARK

# What a start that was killed before it wrote its settings leaves behind.
_DRAFTS = "|".join(map(re.escape, (CONFIG, PROVENANCE)))
_OURS = re.compile(rf"{re.escape(FOLDER)}|\.({_DRAFTS})\..*|{MARK}.*")


def known_files(output_dir: Path) -> bool:
    """Return whether the directory holds a run; raise when it holds something else."""
    if (output_dir / CONFIG).is_file() and (output_dir / PROVENANCE).is_file():
        return True
    names = {path.name for path in output_dir.iterdir()}
    if FOLDER in names:
        names.discard(CONFIG)  # of a start that was killed before it wrote the rest
    others = sorted(name for name in names if not _OURS.fullmatch(name))
    if others:
        raise ConfigurationError(
            f"--output_dir {output_dir} is not empty and holds no run of Stoker (it has {others[0]}"
            f"{', ...' if len(others) > 1 else ''}): name another directory; nothing is written "
            "over."
        )
    return False


def refuse_finished(output_dir: Path, resume_from: str | None) -> None:
    """Raise where a finished run's checkpoints are gone: a start would train over its model."""
    if resume_from is None and (output_dir / FINAL).exists():
        raise ConfigurationError(
            f"{output_dir} holds a finished run without checkpoints ({output_dir / FINAL}): name "
            "another --output_dir; nothing is written over."
        )


def is_finished(output_dir: Path, resume_from: str | None, total_steps: int) -> bool:
    """Whether the checkpoint to go on from is the last one, and its model was written."""
    if resume_from is None or not (output_dir / FINAL).exists():
        return False
    return int(Path(resume_from).name.removeprefix("checkpoint-")) >= total_steps
