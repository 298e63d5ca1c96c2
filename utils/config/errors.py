"""The errors that a user can repair, the exit codes of all scripts, and reports for the log."""

import logging
from collections.abc import Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """The exit code of a process. Users and the scripts in slurm/ read it.

    Those requeue a job on STOPPED and LOST_RANK alone: only there does starting again help.
    """

    DONE = 0
    REFUSED = 2  # settings or data that cannot work
    UNFIT = 69  # this machine, or what was allocated of the cluster, cannot run it
    STORAGE = 74  # no space, no inodes, no permission; everything older is intact
    STOPPED = 75  # stopped early with a checkpoint: start again to resume
    LOST_RANK = 76  # a rank hung; a rank, its helper or its launcher was killed
    NO_PROGRESS = 77  # three restarts reached no new checkpoint
    NOT_FINITE = 78  # a loss, gradient or weight that is NaN or infinite
    OUT_OF_MEMORY = 79  # of a device or a host: the same settings would end so again


class Report(list[tuple[int, str]]):
    """Lines for the log, each with its level. A function that plans returns them and logs none."""

    def say(self, text: str) -> None:
        """Add a fact."""
        self.append((logging.INFO, text))

    def warn(self, text: str) -> None:
        """Add a warning."""
        self.append((logging.WARNING, text))


class ConfigurationError(ValueError):
    """Settings or data that cannot work: what was given, why it cannot work, what to do.

    Carries every fault found, so that one start shows them all. Scripts print it without a
    traceback on rank 0 and exit with `exit_code`. `report` has lines for the log, each with its
    level, that were worked out before the refusal.
    """

    exit_code = ExitCode.REFUSED
    kind = "configuration error"
    ending = "refused"  # how the launcher calls it: the run was refused, or it failed

    def __init__(self, problems: str | Sequence[str], report: Sequence[tuple[int, str]] = ()):
        self.report = report
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(f"- {problem}" for problem in self.problems))


class Answer(SystemExit):
    """Text that the command line asked for, `--print_config`; run_script prints it, redacted."""

    def __init__(self, text: str):
        self.text = text
        super().__init__(0)


class UnfitClusterError(ConfigurationError):
    """Nodes, devices or network that cannot run what was asked; names the host."""

    exit_code = ExitCode.UNFIT
    kind = "cluster error"


class StorageError(ConfigurationError):
    """Storage that has no room or cannot be written to; names the host and the directory."""

    exit_code = ExitCode.STORAGE
    kind = "storage error"


class NoProgressError(ConfigurationError):
    """A job that starts again and again without reaching a new checkpoint."""

    exit_code = ExitCode.NO_PROGRESS
    kind = "no progress"


class LostProcessError(ConfigurationError):
    """A helper process that was killed; names the host. The same settings may work again."""

    exit_code = ExitCode.LOST_RANK
    kind = "lost process"


class NotFiniteError(ConfigurationError):
    """A step whose loss, gradient or weights are not finite; names its documents."""

    exit_code = ExitCode.NOT_FINITE
    kind = "not finite"
    ending = "failed"


class OutOfMemoryError(ConfigurationError):
    """Memory of a device or a host that ran out; names the rank, the phase and what would help."""

    exit_code = ExitCode.OUT_OF_MEMORY
    kind = "out of memory"
    ending = "failed"
