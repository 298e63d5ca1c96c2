"""Stoker itself, by its scripts; tuned: with --compile, which a GPU needs not be told."""

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.recording.job import Job, Outcome, run_baseline
from benchmarks.workloads.workload import SEED
from utils.launch.script import configure_environment

BLIND = "blind"  # the variant whose run nobody can watch, to learn what watching costs
ACCOUNTED = "accounted"  # the variant that notes the CPU time of each callback


def train(job: Job) -> Outcome:
    """Run pretrain.py or sft_train.py, without writing the final model: nobody else does."""
    configure_environment()  # as the scripts do before anything allocates memory
    import pretrain
    import sft_train
    from benchmarks.recording.steps import StepRecorder, watch_trainer

    run = Path(job.scratch) / "run"
    argv = [word for name, value in settings(job, run).items() for word in _flag(name, value)]
    recorder = StepRecorder(job)
    watch_trainer(recorder)
    script = pretrain if job.kind == "pretrain" else sft_train
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch("utils.run.finish.export_final", return_value=run))
        if job.variant == BLIND:
            patches.enter_context(unwatched())
        account = Account(job)
        if job.variant == ACCOUNTED:
            patches.enter_context(account.kept())
        assert script.main(argv) == 0
    start = json.loads((run / "provenance.json").read_text())["starts"][-1]
    plan = start["activation_checkpointing"]
    return recorder.outcome(
        **{name: start[name] for name in ("attention", "loss_head")},
        predicted_memory_bytes=plan["predicted_bytes"][plan["choice"]],
        **account.notes(),
    )


class Account:
    """CPU time of the main thread in each callback, from the first step to the last timed one.

    Other load hardly changes it, and it hardly depends on the model: a step on a GPU may be
    compared with it as well.
    """

    def __init__(self, job: Job):
        self.job, self.steps = job, 0
        self.own_s: defaultdict[str, float] = defaultdict(float)
        self.begun_s = self.all_s = 0.0

    def kept(self) -> Any:
        """Patch a run's callbacks: each tells how long its events, and figures, take."""
        from transformers import TrainerCallback

        from utils.run.finish import run_callbacks

        events = [name for name in dir(TrainerCallback) if name.startswith("on_")]

        def timed(*given: Any) -> Any:
            callbacks = run_callbacks(*given)
            for each in callbacks.in_order():
                for name in events:
                    setattr(each, name, self._timed(type(each).__name__, getattr(each, name)))
            for figures in (callbacks.throughput, callbacks.mixture, callbacks.memory):
                measured = self._timed(type(figures).__name__, figures.metrics)
                vars(figures)["metrics"] = measured
            last: Any = callbacks.in_order()[-1]
            last.on_step_end = self._counted(last.on_step_end)
            return callbacks

        return mock.patch("utils.run.finish.run_callbacks", timed)

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                if 0 < self.steps < self.job.steps:
                    self.own_s[name] += time.thread_time() - before

        return timed

    def _counted(self, on_step_end: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            result, self.steps = on_step_end(*args, **kwargs), self.steps + 1
            now = time.thread_time()
            self.begun_s = now if self.steps == 1 else self.begun_s
            self.all_s = now - self.begun_s if self.steps == self.job.steps else self.all_s
            return result

        return counted

    def notes(self) -> dict[str, Any]:
        """Return microseconds a step by callback, log lines shared out, and all as a share."""
        if not self.all_s:
            return {}
        each = {name: 1e6 * own_s / (self.steps - 1) for name, own_s in self.own_s.items()}
        return {
            "callbacks_us_a_step": {name: round(us) for name, us in each.items()},
            "callbacks_share_of_main_thread": round(sum(self.own_s.values()) / self.all_s, 6),
        }


def unwatched() -> Any:
    """Patch a run's callbacks: none that only watches, no figures, no lines, a silent journal."""
    from utils.run.finish import run_callbacks

    def kept(*given: Any) -> Any:
        callbacks = run_callbacks(*given)
        vars(callbacks.journal)["on_log"] = lambda *_, **__: None
        acting = [callbacks.stop, callbacks.guard, callbacks.journal]
        vars(callbacks).update(in_order=lambda: acting, metrics=dict)
        return callbacks

    return mock.patch("utils.run.finish.run_callbacks", kept)


def settings(job: Job, run: Path) -> dict[str, Any]:
    """Return the command line."""
    import torch

    chosen: dict[str, Any] = {
        "output_dir": run,
        "model_name_or_path": job.files / "weights",
        "tokenizer_name_or_path": job.files / "tokenizer",
        "train_data": job.files / "documents",
        "sequence_length": job.sequence_length,
        "global_batch_size": job.micro_batch_size,
        "per_device_train_batch_size": job.micro_batch_size,
        "max_steps": job.all_steps,
        "learning_rate": job.learning_rate,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "seed": SEED,
        "bf16": job.numbers.mixed,
        "use_cpu": not torch.cuda.is_available(),
        "save_strategy": "no",
        "dtype": job.numbers.weights,
    }
    if job.tuned:
        chosen["compile"] = True
    if job.lora_rank:
        chosen |= {"use_peft": True, "lora_r": job.lora_rank, "lora_alpha": job.lora_rank}
        chosen |= {"lora_target_modules": "all-linear", "lora_dropout": 0.0}  # PEFT's default
    return chosen | job.settings


def _flag(name: str, value: object) -> list[str]:
    return [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]


if __name__ == "__main__":
    run_baseline(train)
