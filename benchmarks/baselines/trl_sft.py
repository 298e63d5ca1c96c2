"""TRL's SFTTrainer with its defaults, or as well tuned as we can.

Defaults: padded batches of 8 and activation checkpointing. Tuned: packed (best fit), checkpointing
only where the cell has it, layers compiled one by one (accelerate's regional compilation); on a GPU
also FlashAttention 2 (packing needs it to be fast), loader workers, and copies that nobody waits
for. The variant `liger`: Liger's kernels for all but the loss, which TRL computes itself.
"""

from typing import Any

from benchmarks.baselines.settings import (
    LIGER,
    common_settings,
    load_model,
    lora_config,
    tuned_settings,
    use_liger_kernels,
)
from benchmarks.recording.job import Job, Outcome, run_baseline
from benchmarks.recording.steps import StepRecorder, watch_trainer


def train(job: Job) -> Outcome:
    """Fine-tune on the workload's tokenized chats."""
    settings: dict[str, Any] = common_settings(job) | {
        "max_length": job.sequence_length,
        # By default it would train on the prompts of tokenized chats too: another task.
        "completion_only_loss": job.kind == "sft",
    }
    if job.tuned:
        settings |= tuned_settings() | {
            "packing": True,
            "per_device_train_batch_size": job.micro_batch_size,
        }
    from datasets import load_from_disk
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    recorder = StepRecorder(job)
    watch_trainer(recorder)
    model = load_model(job)
    attention = model.config._attn_implementation
    if job.variant == LIGER:
        use_liger_kernels(model, cross_entropy=False, fused_linear_cross_entropy=False)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**settings),
        train_dataset=load_from_disk(str(job.files / "documents")),
        processing_class=AutoTokenizer.from_pretrained(job.files / "tokenizer"),
        peft_config=lora_config(job),
    )
    trainer.train()
    return recorder.outcome(attention=attention, variant=job.variant)


if __name__ == "__main__":
    run_baseline(train)
