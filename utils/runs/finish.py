"""The callbacks of a run, in the order in which they act, and its end."""

import gc
import logging
from pathlib import Path

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from utils.callbacks.evaluation import EarlyStopping
from utils.callbacks.journal import Journal
from utils.callbacks.live import LiveView
from utils.callbacks.memory import MemoryMonitor
from utils.callbacks.metrics import MixtureShares, Throughput
from utils.callbacks.nonfinite import NonFiniteGuard
from utils.callbacks.out_of_memory import report
from utils.callbacks.profiler import ProfilerWindow
from utils.callbacks.stop import StopWatch
from utils.callbacks.watchdog import HangWatch
from utils.checkpoints.files import FINAL
from utils.checkpoints.store import Checkpoints
from utils.config.arguments import eval_splits, profiled_steps
from utils.config.errors import ExitCode
from utils.config.settings import RunSettings
from utils.launch.processes import LaunchFacts
from utils.model.finished_model import name_of
from utils.planning.plan import RunPlan
from utils.report.page import FILE_NAME, write_at_the_end
from utils.runs.evaluate import evaluate_at_the_end
from utils.runs.export import export_final
from utils.runs.provenance import end_wandb
from utils.runs.publish import push_at_the_end
from utils.runs.start import Run
from utils.support.notes import memory_reports
from utils.support.run_lock import leave_run_lock, wait_until_left
from utils.training.optimizer import InheritedOptimizer
from utils.training.smoothing import AveragedWeights
from utils.training.trainer import PackedTrainer

logger = logging.getLogger(__name__)


def run_callbacks(
    settings: RunSettings, plan: RunPlan, launch: LaunchFacts, run: Run, checkpoints: Checkpoints
) -> list[TrainerCallback]:
    """Return the callbacks of both scripts, in the order in which they act."""
    inherited = []
    if settings.model.init_optimizer and run.resume_from is None:
        assert run.weights_from is not None, "checked with the settings"
        inherited = [InheritedOptimizer(Path(run.weights_from))]
    # After what asks for evaluations and saves, before what measures their time.
    stop = StopWatch(checkpoints, save_minutes=settings.run.save_minutes or 0)
    memory = MemoryMonitor(plan.memory.sequence_bytes)
    memory_reports[:] = [report]
    asked_for: list[TrainerCallback] = []
    if patience := settings.run.early_stopping_patience:
        asked_for.append(EarlyStopping(patience, settings.run.early_stopping_threshold))
    if decay := settings.run.ema_decay:
        asked_for.append(AveragedWeights(decay, run.resume_from))
    if settings.run.profile_steps:
        window = profiled_steps(settings.run.profile_steps)
        asked_for.append(ProfilerWindow(*window, checkpoints.output_dir))
    return [
        HangWatch(settings.run.hang_timeout_s, launch.hosts, checkpoints.output_dir),
        *inherited,
        stop,
        *asked_for,
        Throughput(),
        MixtureShares(),
        memory,
        NonFiniteGuard(checkpoints.output_dir),
        Journal(checkpoints, memory, lambda: stop.stopped, stop.limit_s),
        LiveView(list(eval_splits(settings.data.eval_data)), stop.limit_s),
    ]


def finish_run(trainer: PackedTrainer, save_dtype: torch.dtype) -> int:
    """Evaluate if the last step was not, write ``final/`` in this type, say where everything is.

    Returns the exit code. A run that was stopped is left as it is, for the next start. Raises
    ConfigurationError, and leaves ``final/`` alone, where another job took the directory over.
    """
    state, output_dir = trainer.state, Path(str(trainer.args.output_dir))
    try:
        if not trainer.watch.stopped:
            _evaluate_last_step(trainer)
            trainer.checkpoints.check_ownership()
            if trainer.average is not None:
                trainer.average.put_in_place()
            export_final(trainer, save_dtype)
        trainer.accelerator.wait_for_everyone()  # the ranks' store goes with the first to leave
        trainer.accelerator.end_training()
        for view in trainer.callback_handler.callbacks:
            if isinstance(view, LiveView):
                view.close()
        if trainer.watch.stopped:
            leave_run_lock(output_dir)
        if state.is_world_process_zero:
            write_at_the_end(output_dir)
            end_wandb(output_dir / FILE_NAME, trainer.watch.stopped)
    finally:
        HangWatch.leave()
    step = state.global_step
    if trainer.watch.stopped:
        checkpoint = output_dir / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        kept = f"with {checkpoint}" if checkpoint.is_dir() else "before there was anything to save"
        logger.info(
            "stopped at step %d of %d %s; the same command resumes it", step, state.max_steps, kept
        )
        return ExitCode.STOPPED
    _name_the_best(trainer)
    loaded = trainer.args.load_best_model_at_end and state.best_model_checkpoint
    kept = Path(loaded).name if loaded else f"step {step}"
    if trainer.average is not None:
        decay = f"ema_decay {trainer.average.decay:g}"
        kept = f"{kept}, averaged ({decay}; checkpoints have the others),"
    logger.info("%s holds the weights of %s in %s", output_dir / FINAL, kept, name_of(save_dtype))
    _use_the_result(trainer, output_dir)
    leave_run_lock(output_dir)
    return ExitCode.DONE


def _name_the_best(trainer: PackedTrainer) -> None:
    """Log the best checkpoint, and where final/ is another one, for the best step has none."""
    state, best = trainer.state, trainer.state.best_model_checkpoint
    if not state.best_global_step:
        return
    metric = f"{trainer.args.metric_for_best_model} = {state.best_metric:.4f}"
    if best and best.endswith(f"-{state.best_global_step}"):
        logger.info("best checkpoint: %s (%s)", best, metric)
    elif trainer.args.load_best_model_at_end:
        logger.warning(
            "the best evaluation (%s at step %d) has no checkpoint, so final/ holds %s: "
            "--save_best true writes one at each new best",
            metric, state.best_global_step, best or "the last step",
        )  # fmt: skip


def _use_the_result(trainer: PackedTrainer, output_dir: Path) -> None:
    """Upload and benchmark ``final/`` if asked to, on rank 0; nothing of it fails the run."""
    settings, is_first = trainer.settings, trainer.is_world_process_zero()
    push, tasks = settings.values["push_to_hub"], settings.run.lm_eval_tasks
    if not push and not tasks:
        return
    hub_name, private = trainer.args.hub_model_id, trainer.args.hub_private_repo
    vars(trainer).clear()  # the model and the optimizer: benchmarks need the memory
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if not is_first:
        wait_until_left(output_dir)  # srun ends all nodes soon after the first of them
        return
    if push:
        push_at_the_end(output_dir, hub_name, private)
    if tasks:
        evaluate_at_the_end(output_dir, tasks)


def _evaluate_last_step(trainer: PackedTrainer) -> None:
    last = trainer.state.global_step
    logs = [entry for entry in trainer.state.log_history if entry["step"] == last]
    if trainer.eval_dataset and not any(key.startswith("eval_") for log in logs for key in log):
        trainer.evaluate()
