"""Prints what will happen in a run: its processes, saves and directory.

A dry run calls it before any job exists, with no GPU and no other process. What Slurm understood of
a job, its time limit above all, is reported by utils/submit/check.py.
"""

import logging
import math
import shlex
from dataclasses import dataclass
from pathlib import Path

from utils.checkpoints.discovery import most_at_once
from utils.checkpoints.files import readable
from utils.config.errors import ConfigurationError
from utils.config.precision import is_true
from utils.config.settings import RunSettings
from utils.launch.processes import LaunchFacts

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
    saves, output_dir = saves_of(settings, total_steps), Path(str(settings.training.output_dir))
    # As the user set it: a dry run without GPU sets use_cpu by itself.
    on_cpu = is_true("ACCELERATE_USE_CPU") or settings.values["use_cpu"]
    if on_cpu and launch.strategy.startswith(("fsdp", "zero")):
        raise ConfigurationError(
            f"{launch.strategy} needs GPUs, but use_cpu or ACCELERATE_USE_CPU asks for the CPU, "
            "where accelerate would train with plain DDP: use accelerate_configs/cpu.yaml, or "
            "leave it out"
        )
    logger.info("processes: %d, strategy %s", launch.world_size, launch.strategy)
    logger.info("saves: %s", _saves_line(saves, total_steps, checkpoint_bytes))
    if saves.every is None:
        # A stop still saves; refusing would forbid short runs that nobody needs to resume.
        logger.warning("save_strategy no: only a stop is saved, a crash loses everything")
    state = "resumes" if (output_dir / "config.yaml").exists() else "new"
    logger.info("run directory: %s (%s)", output_dir, state)
    logger.info("to stop it with a checkpoint: touch %s", shlex.quote(f"{output_dir}/STOP"))


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
