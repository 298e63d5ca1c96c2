"""When Slurm will end this job."""

import datetime
import logging
import os
import subprocess

logger = logging.getLogger(__name__)


def job_end_time() -> float | None:
    """Return the end of the job's time limit in seconds since the epoch; None outside of a job.

    Slurm 23 and later put it into the environment, as the job scripts do for older ones; else
    `squeue` is asked, once. None too, with a warning, where nobody knows.
    """
    known, job = os.environ.get("SLURM_JOB_END_TIME", ""), os.environ.get("SLURM_JOB_ID")
    if known.isdecimal():
        return float(known)
    if not job:
        return None
    try:
        done = subprocess.run(
            ["squeue", "--noheader", f"--jobs={job}", "--format=%e"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
        # Local time without an offset, as Slurm prints times: 2026-11-20T14:05:00.
        return datetime.datetime.fromisoformat(done.stdout.strip()).timestamp()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        logger.warning(
            "the end of the time limit is unknown (squeue: %s): the run will not stop before it by "
            "itself, signals and STOP still work",
            error,
        )
        return None
