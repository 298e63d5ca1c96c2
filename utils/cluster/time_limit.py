"""When Slurm will end this job."""

import datetime
import logging
import os
import subprocess

logger = logging.getLogger(__name__)

END_TIME = "SLURM_JOB_END_TIME"


def job_end_time() -> float | None:
    """Return the end of the job's time limit in seconds since the epoch; None outside of a job.

    Slurm 23 and later say it in the environment, as the job scripts do for older ones; else
    `squeue` is asked, once. None too, with a warning, where nobody knows.
    """
    known = os.environ.get(END_TIME, "")
    if known:
        try:
            return float(known)
        except ValueError:
            logger.warning("%s is %r, not seconds since the epoch: asking squeue", END_TIME, known)
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return None
    answer = _ask_squeue(job)
    try:
        # Local time without an offset, as Slurm prints times: 2026-11-20T14:05:00.
        return datetime.datetime.fromisoformat(answer).timestamp()
    except ValueError:
        logger.warning(
            "the end of the time limit is unknown (squeue: %s): the run will not stop before it by "
            "itself, signals and STOP still work",
            answer or "no answer",
        )
        return None


def _ask_squeue(job: str) -> str:
    """Return what `squeue` says, or what went wrong, as one line."""
    try:
        done = subprocess.run(
            ["squeue", "--noheader", f"--jobs={job}", "--format=%e"],
            capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return " ".join((done.stdout if done.returncode == 0 else done.stderr).split())
