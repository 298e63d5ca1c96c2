"""What of a job's request can and cannot work with the checkpoints that the settings ask for."""

import json
import logging
import math
import os
import shlex
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from utils.callbacks.journal_lines import FILE_NAME, duration, number, read_journal
from utils.checkpoints.files import readable
from utils.checkpoints.space import most_at_once
from utils.config.errors import ConfigurationError
from utils.config.settings import RunSettings
from utils.launch.processes import LaunchFacts
from utils.launch.slurm import JobRequest, asks_for_cpu, request_from

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


# Holds the settings of a run against the job it is to run in, and says what will happen.

logger = logging.getLogger(__name__)


def report_job(
    settings: RunSettings, launch: LaunchFacts, total_steps: int, checkpoint_bytes: int
) -> None:
    """Log what will happen, one fact a line, and what may go wrong as warnings.

    Raises ConfigurationError with every contradiction between settings, launch and request.
    """
    request = request_from(os.environ)
    saves = saves_of(settings, total_steps)
    pace = measured_pace(Path(str(settings.training.output_dir)))
    problems = list(_launch_problems(settings, launch))
    if request is not None:
        problems += request_problems(request, saves, pace)
    if problems:
        raise ConfigurationError(problems)
    for line in plan_lines(settings, launch, saves, total_steps, checkpoint_bytes):
        logger.info("%s", line)
    if request is not None:
        for line in job_lines(request, saves, pace, total_steps):
            logger.info("%s", line)
        for warning in request_warnings(request, saves):
            logger.warning("%s", warning)
        _leave_facts(request, settings)


def _launch_problems(settings: RunSettings, launch: LaunchFacts) -> Iterator[str]:
    """Refuse a strategy that the run's first check would refuse."""
    asked_by = None
    if asks_for_cpu(os.environ):
        asked_by = "ACCELERATE_USE_CPU"
    elif settings.values["use_cpu"]:  # as the user set it: a dry run without GPU sets it by itself
        asked_by = settings.values.shown("use_cpu")
    if asked_by and launch.strategy.startswith(("fsdp", "zero")):
        yield (
            f"{launch.strategy} needs GPUs, but {asked_by} asks for the CPU, where accelerate "
            "would train with plain DDP: use accelerate_configs/cpu.yaml, or leave it out"
        )


def plan_lines(
    settings: RunSettings,
    launch: LaunchFacts,
    saves: Saves,
    total_steps: int,
    checkpoint_bytes: int,
) -> Iterator[str]:
    """Yield what will happen to the run itself, in whatever way it is started."""
    ranks = _counted(launch.world_size, "process", "processes")
    yield f"processes: {ranks}, strategy {launch.strategy}"
    kept = "all are kept" if saves.kept is None else f"the newest {saves.kept} are kept"
    if saves.every:
        count = saves.scheduled(total_steps)
        also = ", and of each new best" if saves.best else ""
        if saves.minutes:
            also += f", and when the last one is {saves.minutes:g} minutes old"
        also += ", in the background" if saves.background else ""
        yield f"saves: every {saves.every:,} steps, {count:,} in all{also}; {kept}"
        yield _storage_line(saves, count, checkpoint_bytes)
    else:
        yield "saves: none (save_strategy no)"
    output_dir = Path(str(settings.training.output_dir))
    state = "goes on there" if (output_dir / "config.yaml").exists() else "new"
    yield f"run directory: {output_dir} ({state})"


def _storage_line(saves: Saves, count: int, checkpoint_bytes: int) -> str:
    most = most_at_once(saves.kept, count)
    at_once = "1 at most"
    if most > 1:
        at_once = f"{most:,} at once ({most - 1:,} stay while the last one is written)"
    best = ", one more where the best is none of the newest" if saves.best else ""
    return (
        f"storage: a checkpoint takes about {readable(checkpoint_bytes)}, {at_once}{best}: about "
        f"{readable(most * checkpoint_bytes)}, beside final/"
    )


def job_lines(
    request: JobRequest, saves: Saves, pace: Pace | None, total_steps: int
) -> Iterator[str]:
    """Yield what will happen to the job."""
    each = _counted(request.processes_per_node, "process", "processes")
    if request.gpus_per_node:
        each = f"{_counted(request.gpus_per_node, 'GPU', 'GPUs')}, {each}"
    nodes = _counted(request.nodes, "node", "nodes")
    array = f", array of {len(request.array)}" if request.array is not None else ""
    yield (
        f"job: {request.job_name}, {nodes} of {each}{array}; strategy {request.strategy} from "
        f"{request.strategy_file}"
    )
    yield from _time_lines(request)
    yield from _pace_lines(request, saves, pace, total_steps)
    yield f"log: {request.log}"


def _time_lines(request: JobRequest) -> Iterator[str]:
    limit, stop = request.time_limit_s, request.signal
    if limit is None:
        yield "time limit: none asked for, the partition's counts"
        return
    if stop is None or not stop.stops_the_run:
        yield f"time limit: {duration(limit)}, without a stop signal"
        return
    again = "queues again and goes on" if request.requeue else "ends"
    yield (
        f"time limit: {duration(limit)}; stop signal after {duration(limit - stop.lead_s)}: the "
        f"run saves, exits with 75, and the job {again}"
    )


def _pace_lines(
    request: JobRequest, saves: Saves, pace: Pace | None, total_steps: int
) -> Iterator[str]:
    """Say how long it takes where that was measured, else what a step may take at most."""
    limit = request.time_limit_s
    lead = request.signal.lead_s if request.signal and stop_signal_saves(request) else 0
    if pace is None:
        if limit is None:
            return
        if saves.every and saves.longest_gap_s(math.inf) > limit - lead:
            most = (limit - lead) / min(saves.every, total_steps)
            yield (
                "pace: not measured yet; the first periodic checkpoint comes in time if a step "
                f"takes at most {_seconds(most)}"
            )
        if lead:
            # One that is on its way in the background has to end first.
            needed = "a step and two saves" if saves.background else "a step and a save"
            yield (
                f"pace: {needed} together must fit into the {lead} s between stop signal and time "
                "limit"
            )
        return
    left = max(total_steps - pace.step, 0)
    expected = left * pace.step_time_s
    line = (
        f"pace: {_seconds(pace.step_time_s)} a step (measured up to step {pace.step:,}); "
        f"{left:,} steps left take about {duration(expected)}"
    )
    if limit is not None:
        restarts = max(math.ceil(expected / max(limit - lead, 1)) - 1, 0)
        line += f", {_counted(restarts, 'restart', 'restarts')} at the time limit"
    yield line + " (evaluations, saves and start-up come on top)"
    if saves.every:
        lost = min(saves.longest_gap_s(pace.step_time_s), total_steps * pace.step_time_s)
        steps = min(saves.every, math.ceil(lost / pace.step_time_s))
        yield f"lost work: a crash costs at most {steps:,} steps, {duration(lost)}"


def _counted(count: int, one: str, several: str) -> str:
    return f"{count:,} {one if count == 1 else several}"


def _seconds(value: float) -> str:
    return f"{number(value, '.3g')} s" if value < 100 else duration(value)


def _leave_facts(request: JobRequest, settings: RunSettings) -> None:
    """Tell submit.sh what it cannot know: where the run will be."""
    output_dir = str(settings.training.output_dir)
    logger.info("to stop it with a checkpoint: touch %s", shlex.quote(f"{output_dir}/STOP"))
    if request.facts_file:
        facts = json.dumps({"output_dir": output_dir})
        Path(request.facts_file).write_text(facts, encoding="utf-8")
