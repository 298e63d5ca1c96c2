"""Checks the settings of a run against the job it is to run in, and prints what will happen.

A dry run calls it before any job exists, with no GPU and no other process. If the user started the
dry run, not slurm/submit.sh, there is no job request and only the run itself is reported.
"""

import logging
import math
import os
import shlex
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from utils.callbacks.journal import FILE_NAME, duration, read_journal
from utils.checkpoints.discovery import most_at_once
from utils.checkpoints.files import readable
from utils.config.errors import ConfigurationError
from utils.config.settings import RunSettings
from utils.launch.processes import LaunchFacts
from utils.launch.slurm import JobRequest, asks_for_cpu, request_from

logger = logging.getLogger(__name__)

SIGNAL_LINE = "#SBATCH --signal=B:USR1@300"


@dataclass(frozen=True)
class Saves:
    """When checkpoints are written: `every` so many steps (None: never), at least every `minutes`.

    `best` says whether each new best is saved too, `background` whether training goes on meanwhile,
    `kept` how many stay (None: all).
    """

    every: int | None
    minutes: float
    best: bool
    background: bool
    kept: int | None

    def scheduled(self, total_steps: int, since: int = 0) -> int:
        """Return how many checkpoints are due by step count after step `since`."""
        if self.every is None or since >= total_steps:
            return 0
        return math.ceil(total_steps / self.every) - since // self.every


@dataclass(frozen=True)
class Pace:
    """The median step time of an earlier part of this run, and the step it reached."""

    step_time_s: float
    step: int


def saves_of(settings: RunSettings, total_steps: int) -> Saves:
    """Return the schedule of checkpoints in steps, from shares of a run and from epochs too."""
    training, run = settings.training, settings.run
    strategy = getattr(training.save_strategy, "value", str(training.save_strategy))
    every = None
    if strategy == "steps":
        steps = training.save_steps
        every = math.ceil(total_steps * steps) if steps < 1 else int(steps)
    elif strategy == "epoch":
        every = math.ceil(total_steps / max(1, math.ceil(training.num_train_epochs)))
    minutes = 0.0 if every is None else run.save_minutes or 0.0
    return Saves(every, minutes, run.save_best, run.async_save, training.save_total_limit)


def measured_pace(output_dir: Path) -> Pace | None:
    """Return the pace that the journal in this directory holds, if any."""
    journal = output_dir / FILE_NAME
    if not journal.is_file():
        return None
    lines = [line for line in read_journal(journal) if line.get("step_time_s")]
    times = [line["step_time_s"] for line in lines]
    if not times:
        return None
    return Pace(statistics.median(times), max(line["step"] for line in lines))


def report_job(
    settings: RunSettings, launch: LaunchFacts, total_steps: int, checkpoint_bytes: int
) -> None:
    """Log what will happen, a fact per line, and what may go wrong as warnings.

    Raises ConfigurationError for what cannot work.
    """
    request, saves = request_from(os.environ), saves_of(settings, total_steps)
    output_dir = Path(str(settings.training.output_dir))
    if problems := list(_problems(settings, launch, request)):
        raise ConfigurationError(problems)
    for line in run_lines(output_dir, launch, saves, total_steps, checkpoint_bytes):
        logger.info("%s", line)
    if request is not None:
        for line in job_lines(request, measured_pace(output_dir), total_steps):
            logger.info("%s", line)
        logger.info("to stop it with a checkpoint: touch %s", shlex.quote(f"{output_dir}/STOP"))
        for warning in request_warnings(request, saves):
            logger.warning("%s", warning)


def _problems(
    settings: RunSettings, launch: LaunchFacts, request: JobRequest | None
) -> Iterator[str]:
    cpu = None
    if asks_for_cpu(os.environ):
        cpu = "ACCELERATE_USE_CPU"
    elif settings.values["use_cpu"]:  # as the user set it: a dry run without GPU sets it by itself
        cpu = settings.values.shown("use_cpu")
    if cpu and launch.strategy.startswith(("fsdp", "zero")):
        yield (
            f"{launch.strategy} needs GPUs, but {cpu} asks for the CPU, where accelerate "
            "would train with plain DDP: use accelerate_configs/cpu.yaml, or leave it out"
        )
    if request is None or request.time_limit_s is None or request.signal_lead_s is None:
        return
    if request.signal_lead_s >= request.time_limit_s:
        yield (
            f"the time limit is {duration(request.time_limit_s)}, but Slurm's stop signal comes "
            f"{request.signal_lead_s} s before it: the job would stop as it starts. Give a longer "
            "--time, or a smaller --signal=B:USR1@SECONDS"
        )


def run_lines(
    output_dir: Path, launch: LaunchFacts, saves: Saves, total_steps: int, checkpoint_bytes: int
) -> Iterator[str]:
    """Yield what will happen to the run itself, however it is started."""
    yield f"processes: {launch.world_size:,}, strategy {launch.strategy}"
    if saves.every is None:
        yield "saves: none (save_strategy no)"
    else:
        count = saves.scheduled(total_steps)
        parts = [f"every {saves.every:,} steps ({count:,} in all)"]
        if saves.minutes:
            parts.append(f"at least every {saves.minutes:g} minutes")
        if saves.best:
            parts.append("each new best")
        if saves.background:
            parts.append("in the background")
        stay = "all stay" if saves.kept is None else f"the newest {saves.kept} stay"
        yield f"saves: {', '.join(parts)}; {stay}"
        most = most_at_once(saves.kept, count) + saves.best
        yield (
            f"storage: {most:,} checkpoints at once, {readable(checkpoint_bytes)} each: "
            f"{readable(most * checkpoint_bytes)}, plus final/"
        )
    state = "resumes" if (output_dir / "config.yaml").exists() else "new"
    yield f"run directory: {output_dir} ({state})"


def job_lines(request: JobRequest, pace: Pace | None, total_steps: int) -> Iterator[str]:
    """Yield what will happen to the job."""
    gpus = f"{request.gpus_per_node} GPUs, " if request.gpus_per_node else ""
    yield (
        f"job: {request.job_name}, {request.nodes} node(s) of {gpus}"
        f"{request.processes_per_node} process(es); strategy {request.strategy} from "
        f"{request.strategy_file}"
    )
    limit, lead = request.time_limit_s, request.signal_lead_s
    line = f"time limit: {duration(limit) if limit else 'none'}"
    if limit and lead:
        again = "is queued again and resumes" if request.requeue else "ends"
        line += (
            f"; stop signal after {duration(limit - lead)}: the run saves, exits with 75, and the "
            f"job {again}"
        )
    yield line
    if pace is None:
        return
    left = max(total_steps - pace.step, 0)
    expected = left * pace.step_time_s
    line = f"pace: {pace.step_time_s:.3g} s a step (measured up to step {pace.step:,}); "
    line += f"{left:,} steps left take about {duration(expected)}"
    if limit:
        restarts = max(math.ceil(expected / (limit - (lead or 0))) - 1, 0)
        line += f", {restarts} restart(s) at the time limit"
    yield f"{line}, plus evaluations, saves and starts"


def request_warnings(request: JobRequest, saves: Saves) -> Iterator[str]:
    """Yield what works, but not as well as it could."""
    if request.time_limit_s and request.signal_lead_s is None:
        yield (
            "no stop signal to the batch shell before the time limit: the run stops only by its "
            f"own look at the clock. Add {SIGNAL_LINE} to {request.job_script}"
        )
    if saves.every is None:
        # A stop still saves; refusing would forbid short runs that nobody needs to resume.
        yield "save_strategy no: only a stop is saved, a crash or a lost node loses everything"
    if not request.requeue:
        yield "the job is not requeued (--no-requeue, or the cluster's JobRequeue=0): submit again"
