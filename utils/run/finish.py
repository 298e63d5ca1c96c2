"""The callbacks of a run, and its end: the last evaluation, the export and the exit code."""

import gc
import logging
import os
import shlex
from pathlib import Path
from types import ModuleType

import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from utils.callbacks.evaluation import EarlyStopping, Samples
from utils.callbacks.journal import Journal, LiveView
from utils.callbacks.memory import MemoryMonitor, memory_page
from utils.callbacks.metrics import MixtureShares, Throughput
from utils.callbacks.nonfinite import NonFiniteGuard
from utils.callbacks.profiler import ProfilerWindow
from utils.callbacks.progress import Phase, Progress
from utils.callbacks.resume_check import ResumeCheck
from utils.callbacks.stop import StopWatch
from utils.callbacks.watchdog import HangWatch
from utils.checkpoints.files import FINAL
from utils.checkpoints.store import Checkpoints
from utils.config.arguments import profiled_steps
from utils.config.errors import ConfigurationError, ExitCode
from utils.config.settings import RunSettings
from utils.data.loader import source_names
from utils.host.run_lock import leave_run_lock, wait_until_left
from utils.launch.processes import LaunchFacts
from utils.launch.verdict import leave_verdict
from utils.model.finished_model import dtype_name
from utils.observe.hours import end_of_budget
from utils.observe.page import FILE_NAME, log_next_step, write_at_the_end
from utils.plan.run_data import RunData
from utils.plan.run_plan import RunPlan
from utils.publish import evaluate, hub
from utils.run.export import export_final
from utils.run.start import Run
from utils.run.trackers import end_wandb
from utils.training.callbacks import Callbacks, DataEpochs, OwnCallbacks
from utils.training.losses import ExpertBalance, SourceLosses
from utils.training.optimizer import InheritedOptimizer
from utils.training.smoothing import AveragedWeights
from utils.training.trainer import PackedTrainer

logger = logging.getLogger(__name__)

# finish_run returns this if max_gpu_hours ended the run. The process then exits with DONE.
GPU_HOURS_SPENT = -1


def run_callbacks(
    plan: RunPlan, data: RunData, launch: LaunchFacts, run: Run, checkpoints: Checkpoints
) -> Callbacks:
    """Create the Trainer callbacks for a run's settings."""
    settings, output_dir = plan.settings, checkpoints.output_dir
    options = settings.run
    inherited = early_stopping = average = profiler = None
    if settings.model.init_optimizer and run.resume_from is None:
        assert run.weights_from is not None, "checked with the settings"
        inherited = InheritedOptimizer(Path(run.weights_from))
    if patience := options.early_stopping_patience:
        early_stopping = EarlyStopping(patience, options.early_stopping_threshold)
    if decay := options.ema_decay:
        average = AveragedWeights(decay, run.resume_from)
    if options.profile_steps:
        profiler = ProfilerWindow(*profiled_steps(options.profile_steps), output_dir)
    router, balance = plan.loss_head.router, None
    if router is not None:
        balance = ExpertBalance(router, settings.training, options.context_parallel)
    source_losses, sources = None, [dataset.path for dataset in data.train.datasets]
    if len(sources) > 1 and plan.loss_head.name == "fused":
        source_losses = SourceLosses(source_names(sources), settings.training)
    progress = Progress()
    stop = StopWatch(
        checkpoints, progress, save_minutes=options.save_minutes or 0,
        budget_end=lambda: end_of_budget(output_dir, options.max_gpu_hours),
    )  # fmt: skip
    # Micro-batches padded to their longest document have different sizes. The peak of short ones
    # does not tell whether long ones fit, so no headroom is predicted.
    memory = MemoryMonitor(0 if plan.to_longest else plan.memory.sequence_bytes)
    journal = Journal(checkpoints, memory, stop, launch.gpus)
    return Callbacks(
        progress=progress,
        epochs=DataEpochs(),
        watchdog=HangWatch(options.hang_timeout_s, launch.hosts, output_dir, progress),
        inherited=inherited,
        stop=stop,
        early_stopping=early_stopping,
        average=average,
        profiler=profiler,
        throughput=Throughput(context_parallel=options.context_parallel),
        mixture=MixtureShares(),
        memory=memory,
        guard=NonFiniteGuard(output_dir, options.context_parallel, options.on_spike),
        journal=journal,
        resume_check=ResumeCheck(
            options.verify_resume_steps, settings.training.full_determinism, journal
        ),
        live=LiveView(progress, stop),
        samples=Samples(data.prompts, options.sample_max_new_tokens, journal),
        balance=balance,
        source_losses=source_losses,
        own=OwnCallbacks(settings.own_code.callbacks),
    )


def finish_run(trainer: PackedTrainer, save_dtype: torch.dtype) -> int:
    """Evaluate after the last step, write final/ as `save_dtype`, and return the exit code.

    A run that was stopped early is not evaluated and gets no final/, because the next start resumes
    it. Then the exit code is STOPPED, or GPU_HOURS_SPENT if max_gpu_hours stopped the run. Raises
    ConfigurationError, before final/ is written, if another job has locked the run directory.
    """
    state, output_dir = trainer.state, Path(str(trainer.args.output_dir))
    average = trainer.callbacks.average
    try:
        if not trainer.callbacks.stop.stopped:
            with memory_page(trainer):
                logs = [log for log in state.log_history if log["step"] == state.global_step]
                evaluated = any(key.startswith("eval_") for log in logs for key in log)
                if trainer.eval_dataset and not evaluated:
                    trainer.evaluate()
                trainer.callbacks.progress.begin(Phase.FINISH, state.global_step)
                trainer.checkpoints.check_ownership()
                if average is not None:
                    average.copy_into_model()
                export_final(trainer, save_dtype)
        trainer.accelerator.wait_for_everyone()  # rank 0 hosts the TCPStore of all ranks
        trainer.accelerator.end_training()
        trainer.callbacks.live.close()
        if trainer.callbacks.stop.stopped:
            leave_run_lock(output_dir)
        if state.is_world_process_zero:
            write_at_the_end(output_dir)
            end_wandb(output_dir / FILE_NAME, trainer.callbacks.stop.stopped)
    finally:
        trainer.callbacks.watchdog.leave()
    step = state.global_step
    if trainer.callbacks.stop.stopped:
        checkpoint = output_dir / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        kept = f"with {checkpoint}" if checkpoint.is_dir() else "before there was anything to save"
        logger.info("stopped at step %d of %d %s", step, state.max_steps, kept)
        if not trainer.callbacks.stop.spent:
            return ExitCode.STOPPED
        if state.is_world_process_zero:
            most = trainer.settings.run.max_gpu_hours
            reason = f"stopped at step {step} {kept}: max_gpu_hours {most:g}"
            leave_verdict(f"{reason}; a larger value continues", ExitCode.DONE)
        return GPU_HOURS_SPENT
    trainer.log_best_checkpoint()
    loaded = trainer.args.load_best_model_at_end and state.best_model_checkpoint
    kept = Path(loaded).name if loaded else f"step {step}"
    if average is not None:
        decay = f"ema_decay {average.decay:g}"
        kept = f"{kept}, averaged ({decay}; checkpoints have the others),"
    logger.info(
        "%s holds the weights of %s in %s", output_dir / FINAL, kept, dtype_name(save_dtype)
    )
    return ExitCode.DONE


def leave_run(settings: RunSettings, launch: LaunchFacts, code: int) -> int:
    """Upload and benchmark final/, release the run lock, and return the process's exit code.

    After a complete run, rank 0 uploads if push_to_hub is set, and runs the benchmarks that
    lm_eval_tasks names. A failed upload or benchmark does not change the exit code. code: the
    result of `finish_run`. GPU_HOURS_SPENT becomes DONE. The caller must delete the trainer first,
    because benchmarks need its memory.
    """
    args, tasks = settings.training, settings.run.lm_eval_tasks
    output_dir, push = settings.output_dir, settings.values["push_to_hub"]
    if code == ExitCode.DONE and (push or tasks):
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if launch.rank != 0:
            wait_until_left(output_dir)  # srun ends all nodes soon after the first one ends
        if launch.rank == 0 and push:
            name = args.hub_model_id or output_dir.resolve().name
            public = ["--public"] if args.hub_private_repo is False else []
            run_or_warn("push_to_hub", hub, [str(output_dir), name, *public])
        if launch.rank == 0 and tasks:
            run_or_warn("lm_eval_tasks", evaluate, [str(output_dir), "--tasks", *tasks])
    leave_run_lock(output_dir)
    code = ExitCode.DONE if code == GPU_HOURS_SPENT else code
    if launch.rank == 0 and (code == ExitCode.DONE or "SLURM_JOB_ID" not in os.environ):
        log_next_step(output_dir)  # the job script requeues a stopped job, or says what to do
    return code


def run_or_warn(setting: str, module: ModuleType, argv: list[str]) -> None:
    """Call `main(argv)` of a module in utils.publish. If this fails, log a command to repeat it.

    setting: the setting that the log names as the reason for the call.
    """
    try:
        module.main(argv)
    except ConfigurationError as error:
        where = ", where there is a network, as on the login node" if module is hub else ""
        logger.warning(
            "%s: the run is complete, but this failed: %s Again%s: python -m %s %s",
            setting, "; ".join(error.problems), where, module.__name__, shlex.join(argv),
        )  # fmt: skip
