"""Errors that a user can repair, exit codes of all scripts, and a list of log lines."""

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """Exit codes of all scripts. The job scripts requeue only after STOPPED and LOST_RANK."""

    DONE = 0  # also stopped with a checkpoint at max_gpu_hours
    REFUSED = 2  # settings or data that cannot work
    UNFIT = 69  # this machine, or the allocated part of the cluster, cannot run the job
    STORAGE = 74  # no space, no inodes, no permission; older files are intact
    STOPPED = 75  # stopped early with a checkpoint: start again to resume
    LOST_RANK = 76  # a rank hung; or a rank, its launcher or a helper process was killed
    NO_PROGRESS = 77  # three restarts reached no new checkpoint
    NOT_FINITE = 78  # a loss, gradient or weight that is NaN or infinite
    OUT_OF_MEMORY = 79  # a device or a host has too little memory for these settings
    SPIKE = 80  # on_spike: stop, and a logged loss is far above recent losses


class Report(list[tuple[int, str]]):
    """List of log lines (level, text). Functions that plan a run add lines; their caller logs them.

    An exception that leaves the block `with Report() as report` gets the lines: a
    ConfigurationError as its `report`, and any other exception as notes below the traceback.
    """

    def say(self, text: str) -> None:
        """Add a line of level INFO."""
        self.append((logging.INFO, text))

    def warn(self, text: str) -> None:
        """Add a line of level WARNING."""
        self.append((logging.WARNING, text))

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, ConfigurationError):
            error.report = (*self, *error.report)
        elif error is not None:
            for _, text in self:
                error.add_note(text)


class ConfigurationError(ValueError):
    """Error for settings or data that cannot work.

    Each text in `problems` says what was given, why it cannot work, and what to do. Rank 0 prints
    these texts without a traceback, and the script exits with `exit_code`. `report` has the log
    lines that were collected before the error (see Report).
    """

    exit_code = ExitCode.REFUSED
    kind = "configuration error"
    ending = "refused"  # the launcher logs that the run was "refused" or "failed"

    def __init__(self, problems: str | Sequence[str], report: Sequence[tuple[int, str]] = ()):
        self.report = report
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(f"- {problem}" for problem in self.problems))


def did_you_mean(missing: str | Path) -> str:
    """Return " (did you mean X?)" with an existing path of a similar name, or "".

    In a job, the text has the host and the absolute path. If slurm/submit.sh found the path on the
    login node, the text names possible faults of this node instead of a similar path.
    """
    host, where = os.environ.get("SLURMD_NODENAME"), ""
    if host:
        place = Path(missing)
        where = f" on {host}" if place.is_absolute() else f" on {host} ({place.absolute()})"
        if "STOKER_SUBMITTED" in os.environ:
            return (
                f"{where}, but slurm/submit.sh found it: it is not on a file system that all nodes "
                f"see, or {host} lacks a mount; sbatch --exclude={host} leaves this node out"
            )
    with suppress(OSError, ValueError, RuntimeError, StopIteration):  # no user ~NAME; path exists
        path = Path(missing).expanduser()
        first = next(part for part in (*reversed(path.parents), path) if not part.exists())
        names = [each.name for each in first.parent.iterdir()]
        if near_names := get_close_matches(first.name, names, n=1):
            near = first.with_name(near_names[0])
            whole = near / path.relative_to(first)
            return f"{where} (did you mean {whole if whole.exists() else near}?)"
    return where


class Answer(SystemExit):
    """Exception that ends a script with exit code 0. run_script prints `text`, without secrets."""

    def __init__(self, text: str):
        self.text = text
        super().__init__(0)


class UnfitClusterError(ConfigurationError):
    """Error of nodes, devices or network that cannot run the job. The message names the host."""

    exit_code, kind = ExitCode.UNFIT, "cluster error"


class UsedPortError(UnfitClusterError):
    """Error: another process uses a port of the job. A restart of the job takes other ports."""

    exit_code = ExitCode.LOST_RANK


class StorageError(ConfigurationError):
    """Error of storage that is full or not writable. The message has the host and directory."""

    exit_code, kind = ExitCode.STORAGE, "storage error"


class NoProgressError(ConfigurationError):
    """Error of a job that starts again and again without reaching a new checkpoint."""

    exit_code, kind = ExitCode.NO_PROGRESS, "no progress"


class LostProcessError(ConfigurationError):
    """Error: a helper process was killed. The message names the host. A restart may help."""

    exit_code, kind = ExitCode.LOST_RANK, "lost process"


class NotFiniteError(ConfigurationError):
    """Error: a loss, gradient or weight is not finite. The message names the step's documents."""

    exit_code, kind = ExitCode.NOT_FINITE, "not finite"
    ending = "failed"


class SpikeError(ConfigurationError):
    """Error: a loss spike with `on_spike: stop`. The message names the step and what to do."""

    exit_code, kind = ExitCode.SPIKE, "loss spike"
    ending = "failed"


class OutOfMemoryError(ConfigurationError):
    """Error: the memory of a device or host is full. The message has rank, phase and remedies."""

    exit_code, kind = ExitCode.OUT_OF_MEMORY, "out of memory"
    ending = "failed"
