"""The callbacks of a run, in the order in which they act, and its end."""

import logging
from pathlib import Path

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from utils.callbacks.journal import Journal
from utils.callbacks.metrics import CompilationWatch, MemoryMonitor, MixtureShares, Throughput
from utils.callbacks.nonfinite import NonFiniteGuard
from utils.callbacks.stop import StopWatch
from utils.callbacks.watchdog import HangWatch
from utils.config.errors import ExitCode
from utils.config.settings import RunSettings
from utils.model.finished_model import name_of
from utils.runs.export import export_final
from utils.runs.provenance import mark_wandb_stopped
from utils.runs.start import Run
from utils.support.run_lock import leave_run_lock
from utils.training.optimizer import InheritedOptimizer
from utils.training.trainer import PackedTrainer

logger = logging.getLogger(__name__)


def run_callbacks(settings: RunSettings, run: Run) -> list[TrainerCallback]:
    """Return the callbacks of both scripts, in the order in which they act."""
    inherited = []
    if settings.model.init_optimizer and run.resume_from is None:
        assert run.weights_from is not None, "checked with the settings"
        inherited = [InheritedOptimizer(Path(run.weights_from))]
    # After what asks for evaluations and saves, before what measures their time.
    stop = StopWatch(run.checkpoints, save_minutes=settings.run.save_minutes or 0)
    memory = MemoryMonitor()
    return [
        HangWatch(settings.run.hang_timeout_s, run.hosts),
        *inherited,
        *([CompilationWatch()] if run.compiled else []),
        stop,
        Throughput(),
        MixtureShares(),
        memory,
        NonFiniteGuard(run.output_dir),
        Journal(run.checkpoints, memory, lambda: stop.stopped),
    ]


def finish_run(trainer: PackedTrainer, save_dtype: torch.dtype) -> int:
    """Evaluate if the last step was not, write ``final/`` in this type, say where everything is.

    Returns the exit code. A run that was stopped is left as it is, for the next start. Raises
    ConfigurationError, and leaves ``final/`` alone, where another job took the directory over.
    """
    try:
        if trainer.watch.stopped:
            return _leave_stopped_run(trainer)
        return _finish(trainer, save_dtype)
    finally:
        HangWatch.current = None


def _finish(trainer: PackedTrainer, save_dtype: torch.dtype) -> int:
    state, step = trainer.state, trainer.state.global_step
    last_logs = [entry for entry in state.log_history if entry["step"] == step]
    evaluated = any(key.startswith("eval_") for entry in last_logs for key in entry)
    if trainer.eval_dataset and not evaluated:
        trainer.evaluate()
    trainer.checkpoints.check_ownership()
    final = export_final(trainer, save_dtype)
    if best := state.best_model_checkpoint:
        metric = trainer.args.metric_for_best_model
        logger.info("best checkpoint: %s (%s = %.4f)", best, metric, state.best_metric)
    _leave_together(trainer)
    kept = "the best checkpoint" if trainer.args.load_best_model_at_end else f"step {step}"
    logger.info(
        "finished at step %d; %s holds the weights of %s in %s",
        step, final, kept, name_of(save_dtype),
    )  # fmt: skip
    return ExitCode.DONE


def _leave_stopped_run(trainer: PackedTrainer) -> int:
    _leave_together(trainer)
    mark_wandb_stopped(ExitCode.STOPPED)
    step = trainer.state.global_step
    checkpoint = Path(str(trainer.args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
    kept = f"with {checkpoint}" if checkpoint.is_dir() else "before there was anything to save"
    total = trainer.state.max_steps
    logger.info("stopped at step %d of %d %s; the same command resumes it", step, total, kept)
    return ExitCode.STOPPED


def _leave_together(trainer: Trainer) -> None:
    """Wait for all ranks, whose store goes with the first to leave; then free the directory."""
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    leave_run_lock(Path(str(trainer.args.output_dir)))
