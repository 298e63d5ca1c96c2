"""Stoker itself, by its scripts; tuned: with --compile."""

import json
from pathlib import Path

import torch

from benchmarks.job import Job, Outcome, run_contestant
from benchmarks.steps import StepRecorder, watch_trainer
from benchmarks.workloads import SEED
from utils.cluster.environment import configure_environment


def train(job: Job) -> Outcome:
    """Run pretrain.py or sft_train.py."""
    configure_environment()  # as the scripts do before anything allocates memory
    import pretrain
    import sft_train

    run = Path(job.scratch) / "run"
    settings = {
        "output_dir": run,
        "model_name_or_path": job.files / "weights",
        "tokenizer_name_or_path": job.files / "tokenizer",
        "train_data": job.files / "documents",
        "sequence_length": job.sequence_length,
        "global_batch_size": job.micro_batch_size,
        "per_device_train_batch_size": job.micro_batch_size,
        "max_steps": job.steps,
        "learning_rate": job.learning_rate,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "seed": SEED,
        "bf16": str(job.precision == "bf16").lower(),
        "use_cpu": str(not torch.cuda.is_available()).lower(),
        "save_strategy": "no",
        "compile": str(job.tuned).lower(),
    } | job.settings
    argv = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    recorder = StepRecorder(job)
    watch_trainer(recorder)
    script = pretrain if job.kind == "pretrain" else sft_train
    assert script.main(argv) == 0
    start = json.loads((run / "provenance.json").read_text())["starts"][-1]
    return recorder.outcome(**{name: start[name] for name in ("attention", "loss_head")})


if __name__ == "__main__":
    run_contestant(train)
