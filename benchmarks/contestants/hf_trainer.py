"""transformers' Trainer, as its run_clm.py example uses it, or as well tuned as we can.

Tuned: no search for NaN in each loss, batches made from numpy arrays, layers compiled one by one
(accelerate's regional compilation) and, for chats, batches of documents of like lengths.
"""

import os
from typing import Any

import numpy as np
import torch

from benchmarks.job import Job, Outcome, run_contestant
from benchmarks.steps import StepRecorder, watch_trainer
from benchmarks.workloads import PAD_TOKEN_ID, SEED

CHATS_PER_BATCH = 8  # the default


def train(job: Job) -> Outcome:
    """Train with Trainer on rows in Stoker's order, or on padded chats."""
    if job.tuned:
        os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
    from datasets import load_from_disk
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    recorder = StepRecorder(job)
    watch_trainer(recorder)
    documents = load_from_disk(str(job.files / "documents"))
    packed = job.kind == "pretrain"
    if packed:
        documents = documents.select(np.load(job.files / "order.npy"))
    settings: dict[str, Any] = {
        "per_device_train_batch_size": job.micro_batch_size if packed else CHATS_PER_BATCH,
        "train_sampling_strategy": "sequential" if packed else "random",
        "remove_unused_columns": False,
    }
    if job.tuned:
        documents = documents.with_format("numpy")
        settings |= {"logging_nan_inf_filter": False, "torch_compile": True}
        if not packed:
            documents = documents.add_column("length", [len(row) for row in documents["input_ids"]])
            settings |= {"train_sampling_strategy": "group_by_length"}
    model = AutoModelForCausalLM.from_pretrained(job.files / "weights", dtype=torch.float32)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**common_settings(job), **settings),
        train_dataset=documents,
        data_collator=collate,
    )
    trainer.train()
    return recorder.outcome(attention=model.config._attn_implementation)


def common_settings(job: Job) -> dict[str, Any]:
    """Return what every Trainer is told: the same optimizer, precision, length and silence."""
    return {
        "output_dir": job.scratch,
        "max_steps": job.steps,
        "learning_rate": job.learning_rate,
        "lr_scheduler_type": "constant",
        "bf16": job.precision == "bf16",
        "save_strategy": "no",
        "report_to": "none",
        "seed": SEED,
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
    }


def collate(documents: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad documents to the longest one, as transformers' collators do."""
    longest = max(len(document["input_ids"]) for document in documents)
    shape = (len(documents), longest)
    input_ids = torch.full(shape, PAD_TOKEN_ID)
    labels = torch.full(shape, -100)
    for row, document in enumerate(documents):
        tokens = torch.as_tensor(document["input_ids"], dtype=torch.int64)
        bears_loss = torch.as_tensor(document.get("completion_mask", np.ones(len(tokens)))).bool()
        input_ids[row, : len(tokens)] = tokens
        labels[row, : len(tokens)] = torch.where(bears_loss, tokens, -100)
    batch = {"input_ids": input_ids, "labels": labels}
    if bool((input_ids == PAD_TOKEN_ID).any()):
        batch["attention_mask"] = input_ids.ne(PAD_TOKEN_ID).long()
    return batch


if __name__ == "__main__":
    run_contestant(train)
