"""Baselines in turn, A B C A B C, each in a fresh process."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from benchmarks.cells.kinds import OURS, OURS_TUNED
from benchmarks.hardware.circumstances import ROOT
from benchmarks.progress import Progress, say
from benchmarks.recording.job import CANNOT_RUN, STARTED_AT

LIMIT_S = 900
LEFT_OUT = "left out"  # why a baseline did not run
Outcome = TypeVar("Outcome")


class BaselineFailedError(Exception):
    """A baseline's process ended without an outcome; the message ends with its last lines."""


class CannotRunHereError(BaselineFailedError):
    """A baseline said that this machine lacks what it needs: a package, a GPU, memory."""


class Turns(Generic[Outcome]):
    """All repeats of all baselines, and why some did not run.

    With `kept` outcomes are JSON and outlive the command, round by round.
    """

    def __init__(self, not_run: Mapping[str, str], kept: Progress | None = None):
        self.outcomes: dict[str, list[Outcome]] = {}
        self.not_run = dict(not_run)
        self.kept = kept

    @property
    def rounds(self) -> int:
        """How many repeats are done."""
        return max(map(len, self.outcomes.values()), default=0)

    def take(
        self,
        names: Sequence[str],
        repeats: int,
        run: Callable[[str, Path], Outcome],
        describe: Callable[[Outcome], str],
    ) -> None:
        """Let `run(name, directory)` do each baseline's work, until there are `repeats` of it.

        A peer that fails once is out, with the reason. Raises BaselineFailedError when Stoker
        itself fails, unless for want of memory or the like; and what `kept` raises.
        """
        first = self.rounds
        if self.kept:
            before = self.kept.load()
            first, self.outcomes = before["rounds"], before["outcomes"]
            self.not_run |= before["not_run"]
        for repeat in range(first, repeats):
            if self.kept:
                self.kept.begin_round()
            for name in [name for name in names if name not in self.not_run]:
                count, outcome = f"{repeat + 1}/{repeats}", self._run(name, run)
                if isinstance(outcome, BaselineFailedError):
                    self.not_run[name] = str(outcome)
                    self.outcomes.pop(name, None)
                    say(f"{count}  {name}: {outcome}")
                    continue
                self.outcomes.setdefault(name, []).append(outcome)
                say(f"{count}  {name}: {describe(outcome)}")
            if self.kept:
                self.kept.end_round(repeat + 1, self.outcomes, self.not_run)

    def _run(self, name: str, run: Callable[[str, Path], Outcome]) -> Outcome | BaselineFailedError:
        with tempfile.TemporaryDirectory(prefix="stoker-benchmark-") as directory:
            try:
                return run(name, Path(directory))
            except BaselineFailedError as error:
                if name in (OURS, OURS_TUNED) and not isinstance(error, CannotRunHereError):
                    raise
                return error


def run_process(
    module: str,
    arguments: Sequence[str],
    directory: Path,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run `python -m module` on all cores, with its temporary files below `directory`.

    `variables` come on top of the environment.

    Raises BaselineFailedError when it fails or does not end, CannotRunHereError when it says why.
    """
    with (directory / "log").open("w+") as log:
        environment = quiet_environment(directory) | {
            **(variables or {}),
            STARTED_AT: str(time.time()),
        }
        ending = f"no end after {LIMIT_S} s"
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
                timeout=LIMIT_S,
                check=False,
            )
            ending = f"exit code {done.returncode}"
        log.seek(0)
        said = log.read().splitlines()
    if ending == f"exit code {CANNOT_RUN}":
        raise CannotRunHereError(said[-1])
    if ending != "exit code 0":
        raise BaselineFailedError(f"{ending}: {' | '.join(said[-3:])}")


def quiet_environment(directory: Path) -> dict[str, str]:
    """Return the environment of a baseline: one thread per core, and no network.

    torch's compile cache is kept between repeats, so only the first start of a toolkit is slow.
    """
    compiled = Path(tempfile.gettempdir()) / "stoker-benchmark-compiled"
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(compiled),
        **os.environ,
        "OMP_NUM_THREADS": str(os.cpu_count() or 1),
        "TMPDIR": str(directory),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "WANDB_MODE": "disabled",
        "TOKENIZERS_PARALLELISM": "false",
    }
