"""transformers' Trainer, as its run_clm.py example uses it, or as well tuned as we can.

Tuned: no search for NaN in each loss, batches made from numpy arrays, layers compiled one by one
(accelerate's regional compilation) and, for chats, batches of documents of like lengths; on a CPU
float32 products by the faster library; on a GPU
also FlashAttention 2 for chats and cuDNN's attention for whole rows (Hopper), loader workers, and
copies that nobody waits for. The variant `liger`: with Liger's kernels.
"""

from typing import Any

import numpy as np
import torch

from benchmarks.baselines.settings import (
    LIGER,
    common_settings,
    fastest_sdpa,
    load_model,
    lora_config,
    tuned_settings,
    use_liger_kernels,
)
from benchmarks.recording.job import Job, Outcome, run_baseline
from benchmarks.recording.steps import StepRecorder, watch_trainer
from benchmarks.workloads.workload import PAD_TOKEN_ID

CHATS_PER_BATCH = 8  # the default


def train(job: Job) -> Outcome:
    """Train with Trainer on rows in Stoker's order, or on padded chats."""
    settings = common_settings(job) | {"remove_unused_columns": False}
    if job.tuned:
        settings |= tuned_settings()
    from datasets import load_from_disk
    from transformers import Trainer, TrainingArguments

    recorder = StepRecorder(job)
    watch_trainer(recorder)
    documents = load_from_disk(str(job.files / "documents"))
    packed = job.kind == "pretrain"
    if packed:
        documents = documents.select(np.load(job.files / "order.npy"))
    settings |= {
        "per_device_train_batch_size": job.micro_batch_size if packed else CHATS_PER_BATCH,
        "train_sampling_strategy": "sequential" if packed else "random",
    }
    if job.tuned:
        documents = documents.with_format("numpy")
        if not packed:
            documents = documents.add_column("length", [len(row) for row in documents["input_ids"]])
            settings |= {"train_sampling_strategy": "group_by_length"}
    model = load_model(job)
    attention = model.config._attn_implementation
    if job.variant == LIGER:
        use_liger_kernels(model)
    if job.lora_rank:
        from peft import get_peft_model

        model = get_peft_model(model, lora_config(job))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**settings),
        train_dataset=documents,
        data_collator=collate,
    )
    with fastest_sdpa(job):
        trainer.train()
    return recorder.outcome(attention=attention, variant=job.variant)


def collate(documents: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad documents to the longest one, as transformers' collators do."""
    longest = max(len(document["input_ids"]) for document in documents)
    shape = (len(documents), longest)
    input_ids = torch.full(shape, PAD_TOKEN_ID)
    labels = torch.full(shape, -100)
    for row, document in enumerate(documents):
        tokens = torch.as_tensor(document["input_ids"], dtype=torch.int64)
        loss_mask = torch.as_tensor(document.get("completion_mask", np.ones(len(tokens)))).bool()
        input_ids[row, : len(tokens)] = tokens
        labels[row, : len(tokens)] = torch.where(loss_mask, tokens, -100)
    # Nothing predicts it, but Trainer would divide the loss by it too.
    labels[:, 0] = -100
    batch = {"input_ids": input_ids, "labels": labels}
    if bool((input_ids == PAD_TOKEN_ID).any()):
        batch["attention_mask"] = input_ids.ne(PAD_TOKEN_ID).long()
    return batch


if __name__ == "__main__":
    run_baseline(train)
