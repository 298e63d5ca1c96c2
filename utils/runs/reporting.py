"""The callbacks of a run, in the order in which they act."""

import os
import sys
from pathlib import Path

from transformers import TrainerCallback

from utils.callbacks.compilation import CompilationWatch
from utils.callbacks.journal import Journal
from utils.callbacks.memory import MemoryMonitor
from utils.callbacks.mixture import MixtureShares
from utils.callbacks.nonfinite import NonFiniteGuard
from utils.callbacks.position import DataPosition
from utils.callbacks.progress import reporting_callbacks
from utils.callbacks.stop import StopWatch
from utils.callbacks.throughput import Throughput
from utils.callbacks.watchdog import HangWatch
from utils.config.run_settings import RunSettings
from utils.runs.start import Run
from utils.training.inherited_optimizer import InheritedOptimizer


def run_callbacks(settings: RunSettings, run: Run) -> list[TrainerCallback]:
    """Return the callbacks of both scripts; progress bars only where a person looks on."""
    measured = [Throughput(), MixtureShares(), MemoryMonitor()]
    # After what asks for evaluations and saves, before what measures them.
    stop = StopWatch(
        run.output_dir, run.checkpoint_bytes, save_minutes=settings.run.save_minutes or 0
    )
    return [
        HangWatch(settings.run.hang_timeout_s, run.hosts),
        DataPosition(),
        *_inherited_optimizer(settings, run),
        *([CompilationWatch()] if run.compiled else []),
        stop,
        *measured,
        NonFiniteGuard(run.output_dir),
        Journal(run.output_dir, measured, lambda: stop.stopped, run.checkpoints),
        *reporting_callbacks(is_terminal=_somebody_looks_on()),
    ]


def _inherited_optimizer(settings: RunSettings, run: Run) -> list[TrainerCallback]:
    model = settings.model
    if not model.init_optimizer or run.resume_from is not None:
        return []
    assert run.weights_from is not None, "checked with the settings"
    return [InheritedOptimizer(Path(run.weights_from))]


def _somebody_looks_on() -> bool:
    """Whether stdout is a person's terminal: `srun --unbuffered` gives a task one of its own."""
    return sys.stdout.isatty() and "SLURM_JOB_ID" not in os.environ
