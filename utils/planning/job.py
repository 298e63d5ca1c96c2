"""Checks the settings of a run against the job it is to run in, and prints what will happen.

A dry run calls it before any job exists, with no GPU and no other process. If the user started the
dry run, not slurm/submit.sh, there is no job request and only the run itself is reported.
"""

import logging
import math
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from utils.callbacks.journal import duration
from utils.checkpoints.discovery import most_at_once
from utils.checkpoints.files import readable
from utils.config.errors import ConfigurationError
from utils.config.settings import RunSettings
from utils.launch.processes import LaunchFacts
from utils.launch.slurm import JobRequest, asks_for_cpu, request_from

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saves:
    """When checkpoints are written: `every` so many steps (None: never), at least every `minutes`.

    `best` says whether each new best is saved too, `kept` how many stay (None: all).
    """

    every: int | None
    minutes: float
    best: bool
    kept: int | None

    def scheduled(self, total_steps: int) -> int:
        """Return how many checkpoints are due by step count."""
        return 0 if self.every is None else math.ceil(total_steps / self.every)


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
    return Saves(every, minutes, run.save_best, training.save_total_limit)


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
    logger.info("processes: %d, strategy %s", launch.world_size, launch.strategy)
    logger.info("saves: %s", _saves_line(saves, total_steps, checkpoint_bytes))
    state = "resumes" if (output_dir / "config.yaml").exists() else "new"
    logger.info("run directory: %s (%s)", output_dir, state)
    if request is None:
        return
    gpus = f"{request.gpus_per_node} GPUs, " if request.gpus_per_node else ""
    logger.info(
        f"job: {request.job_name}, {request.nodes} node(s) of {gpus}"
        f"{request.processes_per_node} process(es); strategy {request.strategy} from "
        f"{request.strategy_file}"
    )
    limit, lead = request.time_limit_s, request.signal_lead_s
    if limit and lead:
        again = "is queued again and resumes" if request.requeue else "ends"
        stop = f"stop signal after {duration(limit - lead)}: the run saves and {again}"
        logger.info("time limit: %s; %s", duration(limit), stop)
    elif limit:
        logger.warning(
            "no stop signal to the batch shell before the time limit of %s: the run stops only by "
            "its own look at the clock. Add #SBATCH --signal=B:USR1@300 to %s",
            duration(limit), request.job_script,
        )  # fmt: skip
    logger.info("to stop it with a checkpoint: touch %s", shlex.quote(f"{output_dir}/STOP"))
    if saves.every is None:
        # A stop still saves; refusing would forbid short runs that nobody needs to resume.
        logger.warning("save_strategy no: only a stop is saved, a crash loses everything")
    if not request.requeue:
        logger.warning("the job is not requeued (--no-requeue, or JobRequeue=0): submit again")


def _problems(
    settings: RunSettings, launch: LaunchFacts, request: JobRequest | None
) -> Iterator[str]:
    # As the user set it: a dry run without GPU sets use_cpu by itself.
    on_cpu = asks_for_cpu(os.environ) or settings.values["use_cpu"]
    if on_cpu and launch.strategy.startswith(("fsdp", "zero")):
        yield (
            f"{launch.strategy} needs GPUs, but use_cpu or ACCELERATE_USE_CPU asks for the CPU, "
            "where accelerate would train with plain DDP: use accelerate_configs/cpu.yaml, or "
            "leave it out"
        )
    limit, lead = (request.time_limit_s, request.signal_lead_s) if request else (None, None)
    if limit and lead and lead >= limit:
        yield (
            f"the time limit is {duration(limit)}, but Slurm's stop signal comes {lead} s before "
            "it: the job would stop as it starts. Give a longer --time, or a smaller "
            "--signal=B:USR1@SECONDS"
        )


def _saves_line(saves: Saves, total_steps: int, checkpoint_bytes: int) -> str:
    """Say when checkpoints are written, and what is on the disk at once."""
    if saves.every is None:
        return "none (save_strategy no)"
    count = saves.scheduled(total_steps)
    most = most_at_once(saves.kept, count) + saves.best
    parts = [f"every {saves.every:,} steps ({count:,} in all)"]
    parts += [f"at least every {saves.minutes:g} minutes"] if saves.minutes else []
    parts += ["each new best"] if saves.best else []
    return (
        f"{', '.join(parts)}; at most {most:,} at once, {readable(checkpoint_bytes)} each: "
        f"{readable(most * checkpoint_bytes)}, plus final/"
    )
