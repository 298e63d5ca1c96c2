"""Stoker itself, by its scripts; tuned: with --compile, which a GPU needs not be told."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.recording.job import Job, Outcome, run_baseline
from benchmarks.workloads.workload import SEED
from utils.launch.script import configure_environment


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
    with mock.patch("utils.run.finish.export_final", return_value=run):
        assert script.main(argv) == 0
    start = json.loads((run / "provenance.json").read_text())["starts"][-1]
    plan = start["activation_checkpointing"]
    return recorder.outcome(
        **{name: start[name] for name in ("attention", "loss_head")},
        predicted_memory_bytes=plan["predicted_bytes"][plan["choice"]],
    )


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
    return chosen


def _flag(name: str, value: object) -> list[str]:
    return [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]


if __name__ == "__main__":
    run_baseline(train)
