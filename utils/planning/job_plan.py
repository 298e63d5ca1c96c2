"""Holds the settings of a run against the job it is to run in, and says what will happen.

Called in a dry run, before any job: needs no GPU and meets no other process. Without a request
(the user started the dry run, not slurm/submit.sh) there is nothing to say about a job.
"""

import json
import logging
import math
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from utils.callbacks.lines import duration, number
from utils.checkpoints.rotation import most_at_once
from utils.checkpoints.sizes import readable
from utils.cluster.job_request import JobRequest, request_from
from utils.cluster.launch import LaunchFacts, asks_for_cpu
from utils.config.errors import ConfigurationError
from utils.config.run_settings import RunSettings
from utils.planning.job_checks import (
    Pace,
    Saves,
    measured_pace,
    request_problems,
    request_warnings,
    saves_of,
    stop_signal_saves,
)

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
