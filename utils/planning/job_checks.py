"""What of a job's request can and cannot work with the checkpoints that the settings ask for."""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from utils.callbacks.journal_file import FILE_NAME, read_journal
from utils.callbacks.lines import duration, number
from utils.cluster.job_request import JobRequest
from utils.config.run_settings import RunSettings

SIGNAL_LINE = "#SBATCH --signal=B:USR1@300"


@dataclass(frozen=True)
class Pace:
    """What an earlier part of this run measured: seconds per step, and the step it is at."""

    step_time_s: float
    step: int


@dataclass(frozen=True)
class Saves:
    """When checkpoints are written. `every` is in steps, None for none; `minutes` is 0 for any age.

    `best` says whether each new best is saved as well, `background` whether training goes on.
    """

    every: int | None
    minutes: float
    best: bool
    background: bool
    kept: int | None

    @property
    def periodic(self) -> bool:
        """Whether checkpoints are written without anybody asking."""
        return self.every is not None

    def scheduled(self, total_steps: int, since: int = 0) -> int:
        """Return how many checkpoints the rhythm of steps asks for after step `since`."""
        if self.every is None or since >= total_steps:
            return 0
        return math.ceil(total_steps / self.every) - since // self.every

    def longest_gap_s(self, step_time_s: float) -> float:
        """Return the longest time between two checkpoints."""
        rhythm = math.inf if self.every is None else self.every * step_time_s
        return min(rhythm, 60 * self.minutes or math.inf)


def saves_of(settings: RunSettings, total_steps: int) -> Saves:
    """Return the rhythm of the checkpoints in steps; a share of all steps is worked out."""
    training = settings.training
    strategy = getattr(training.save_strategy, "value", str(training.save_strategy))
    every = None
    if strategy == "steps":
        steps = training.save_steps
        every = math.ceil(total_steps * steps) if steps < 1 else int(steps)
    elif strategy == "epoch":
        every = math.ceil(total_steps / max(1, math.ceil(training.num_train_epochs)))
    run = settings.run
    minutes = 0.0 if every is None else run.save_minutes or 0.0
    return Saves(every, minutes, run.save_best, run.async_save, training.save_total_limit)


def measured_pace(output_dir: Path) -> Pace | None:
    """Return the median step time of an earlier part of the run in this directory, if any."""
    journal = output_dir / FILE_NAME
    if not journal.is_file():
        return None
    lines = [line for line in read_journal(journal) if line["event"] == "train"]
    times = [line["step_time_s"] for line in lines if _is_time(line.get("step_time_s"))]
    if not times:
        return None
    return Pace(statistics.median(times), max(line["step"] for line in lines))


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def request_problems(request: JobRequest, saves: Saves, pace: Pace | None) -> Iterator[str]:
    """Yield what cannot work in this request, with what to change."""
    if request.tasks_per_node != 1:
        yield (
            f"the job starts {request.tasks_per_node} tasks per node"
            f"{_source(request, 'ntasks-per-node', 'ntasks')}, but slurm/launch_node.sh is one "
            "task a node and starts the processes itself: give --ntasks-per-node=1"
        )
    limit, stop = request.time_limit_s, request.signal
    if limit is None:
        return
    if stop is not None and stop.stops_the_run and stop.lead_s >= limit:
        yield (
            f"--signal{_source(request, 'signal')} comes {stop.lead_s} s before the end of a time "
            f"limit of {limit} s{_source(request, 'time')}: the job would stop as it starts. Give "
            "a longer --time or a smaller @SECONDS."
        )
        return
    if stop_signal_saves(request):
        return
    if not saves.periodic:
        yield (
            "save_strategy no, and no signal that makes the run save: at the time limit of "
            f"{duration(limit)} everything would be lost. Add {SIGNAL_LINE}, or save_strategy: "
            "steps."
        )
    elif pace is not None and saves.every and saves.longest_gap_s(pace.step_time_s) > limit:
        interval = saves.every * pace.step_time_s
        yield (
            f"a checkpoint every {saves.every:,} steps of {number(pace.step_time_s, '.3g')} s "
            f"(measured) is one every {duration(interval)}, but the time limit is "
            f"{duration(limit)}: the job would never get beyond where it starts. Save at least "
            f"every {max(1, int(limit / 2 / pace.step_time_s)):,} steps (--save_steps), by the "
            f"clock (--save_minutes), or add {SIGNAL_LINE}."
        )


def stop_signal_saves(request: JobRequest) -> bool:
    """Whether the time limit is announced in a way that makes the run save."""
    return request.signal is not None and request.signal.stops_the_run


def _source(request: JobRequest, *names: str) -> str:
    source = next((request.sources[name] for name in names if name in request.sources), None)
    return f" ({source})" if source else ""


def request_warnings(request: JobRequest, saves: Saves) -> Iterator[str]:
    """Yield what works, but not as well as it could."""
    stop = request.signal
    if request.time_limit_s is not None and not stop_signal_saves(request):
        given = "no --signal" if stop is None else f"--signal{_source(request, 'signal')}"
        yield (
            f"{given}: the batch shell is not told before the time limit, so the run stops only by "
            f"its own look at the clock. Add {SIGNAL_LINE} to {request.job_script}"
        )
    if not saves.periodic:
        # A stop still saves; refusing would forbid short runs that nobody needs to go on with.
        yield "save_strategy no: only a stop is saved, a crash or a lost node loses everything"
    if request.requeue is False:
        yield f"--no-requeue{_source(request, 'no-requeue')}: a stopped job waits for your sbatch"
    elif request.requeue is None:
        yield (
            "no --requeue: whether the job starts again by itself is up to the cluster "
            f"(JobRequeue). Add #SBATCH --requeue to {request.job_script}"
        )
