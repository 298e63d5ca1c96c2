"""TRL's SFTTrainer with its defaults, or as well tuned as we can.

Defaults: padded batches of 8 and activation checkpointing. Tuned: packed (best fit), no
checkpointing, layers compiled one by one (accelerate's regional compilation).
"""

import os
from typing import Any

import torch

from benchmarks.contestants.hf_trainer import common_settings
from benchmarks.job import Job, Outcome, run_contestant
from benchmarks.steps import StepRecorder, watch_trainer


def train(job: Job) -> Outcome:
    """Fine-tune on the workload's tokenized chats."""
    if job.tuned:
        os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
    from datasets import load_from_disk
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    recorder = StepRecorder(job)
    watch_trainer(recorder)
    settings: dict[str, Any] = {"max_length": job.sequence_length}
    if job.tuned:
        settings |= {
            "packing": True,
            "per_device_train_batch_size": job.micro_batch_size,
            "gradient_checkpointing": False,
            "logging_nan_inf_filter": False,
            "torch_compile": True,
        }
    model = AutoModelForCausalLM.from_pretrained(job.files / "weights", dtype=torch.float32)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**common_settings(job), **settings),
        train_dataset=load_from_disk(str(job.files / "documents")),
        processing_class=AutoTokenizer.from_pretrained(job.files / "tokenizer"),
    )
    trainer.train()
    return recorder.outcome(attention=model.config._attn_implementation)


if __name__ == "__main__":
    run_contestant(train)
