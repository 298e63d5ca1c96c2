"""Ends a job that Slurm starts again and again at the same checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from utils.config.errors import NoProgressError

STARTS_WITHOUT_PROGRESS = 3


def check_progress(
    starts: Sequence[Mapping[str, Any]], resume_from: str | None, job: Mapping[str, Any] | None
) -> None:
    """Refuse to start where three earlier starts of this same job began, and so came to nothing.

    `starts` are those in provenance.json, `job` is this job as it writes it. A job that the user
    submitted anew may always try. Raises NoProgressError.
    """
    if job is None or int(job["restart_count"] or 0) == 0:
        return
    own = [start for start in starts if _job_id(start["slurm"]) == _job_id(job)]
    same = [start for start in own if _name(start["resumed_from"]) == _name(resume_from)]
    if len(same) < STARTS_WITHOUT_PROGRESS:
        return
    raise NoProgressError(
        f"job {job['job_id']} began {len(same)} times at {_name(resume_from) or 'step 0'} and "
        "reached no checkpoint beyond it. Look in its log for what ended it each time; if it was "
        "the time limit, give it more (--time) or save more often (a smaller save_steps). sbatch "
        "of the same command tries again."
    )


def _job_id(job: Mapping[str, Any] | None) -> tuple[Any, Any] | None:
    """Return what Slurm keeps when it starts a job again; ids are unique within a cluster."""
    return None if job is None else (job["cluster"], job["job_id"])


def _name(checkpoint: str | None) -> str | None:
    return None if checkpoint is None else Path(checkpoint).name
