"""Unsloth on one GPU: its models, kernels and compiled layers under TRL's SFTTrainer, packed.

It trains adapters with its own kernels, and all weights with transformers' layers, compiled one by
one. Its 8-bit optimizer, weight decay and checkpointing are off, because the other toolkits run
without them. Unsloth loads float32 weights in bf16 and casts them up, and in full fine-tuning it
keeps the norms' weights in float32.

The variant `flash attention` uses torch's FlashAttention 2 in place of the package flash_attn,
which Unsloth asks its users to install. Without it Unsloth uses SDPA.
"""

import os
import sys
from typing import Any

import torch

from benchmarks.baselines.settings import (
    common_settings,
    compile_every_layer,
    loader_settings,
)
from benchmarks.baselines.torch_flash import (
    flash_attn_func,
    flash_attn_varlen_func,
    stand_in_for_flash_attn,
)
from benchmarks.recording.job import CannotRunError, Job, Outcome, run_baseline
from benchmarks.recording.steps import StepRecorder, watch_trainer
from benchmarks.workloads.workload import SEED

FLASH_ATTENTION = "flash attention"  # a variant
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def train(job: Job) -> Outcome:
    """Fine-tune on the workload's tokenized chats.

    Raises CannotRunError without a GPU, and if transformers is already imported, because Unsloth
    patches it for the whole process.
    """
    if not torch.cuda.is_available():
        raise CannotRunError("Unsloth needs a GPU")
    if "transformers" in sys.modules:
        raise CannotRunError("Unsloth needs a process of its own")
    os.environ["UNSLOTH_DISABLE_STATISTICS"] = "1"
    os.environ["UNSLOTH_COMPILE_LOCATION"] = f"{job.scratch}/unsloth"  # else the working directory
    model = load_model(job)
    from datasets import load_from_disk
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**settings(job)),
        train_dataset=load_from_disk(str(job.files / "documents")),
        processing_class=AutoTokenizer.from_pretrained(job.files / "tokenizer"),
    )
    recorder = StepRecorder(job)
    watch_trainer(recorder)  # Unsloth has rewritten what this wraps
    trainer.train()
    # With adapters Unsloth attends by itself, whatever the configuration says.
    attention = "flash_attention_2" if job.variant == FLASH_ATTENTION else "sdpa"
    return recorder.outcome(attention=attention, variant=job.variant)


def load_model(job: Job) -> Any:
    """Load the workload's weights, with adapters if the job has them."""
    from unsloth import FastLanguageModel

    if job.variant == FLASH_ATTENTION:
        use_torch_flash()
    model, _ = FastLanguageModel.from_pretrained(
        model_name=str(job.files / "weights"),
        tokenizer_name=str(job.files / "tokenizer"),
        max_seq_length=job.sequence_length,
        dtype=torch.bfloat16,
        load_in_4bit=False,
        full_finetuning=not job.lora_rank,
        float32_mixed_precision=job.numbers.weights == "float32",
        use_gradient_checkpointing=False,
        use_exact_model_name=True,
        local_files_only=True,
    )
    if not job.lora_rank:
        return model
    return FastLanguageModel.get_peft_model(
        model,
        r=job.lora_rank,
        lora_alpha=job.lora_rank,
        lora_dropout=0,
        bias="none",
        target_modules=TARGETS,
        use_gradient_checkpointing=False,
        random_state=SEED,
    )


def settings(job: Job) -> dict[str, Any]:
    """Return what SFTConfig is told, whose defaults Unsloth has changed."""
    return (
        common_settings(job)
        | loader_settings()
        | {
            "max_length": job.sequence_length,
            "completion_only_loss": True,
            "packing": True,
            "per_device_train_batch_size": job.micro_batch_size,
            "gradient_accumulation_steps": 1,
            "gradient_checkpointing": False,
            "optim": "adamw_torch_fused",
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "logging_steps": 10,
            "logging_nan_inf_filter": False,
        }
    )


def use_torch_flash() -> None:
    """Let Unsloth, and transformers under it, take torch's kernels for those of flash_attn."""
    from unsloth.models import _utils
    from unsloth.utils import attention_dispatch

    stand_in_for_flash_attn()
    compile_every_layer()  # as SFTTrainer is let: not the first eight
    chooses: Any = _utils
    chooses.HAS_FLASH_ATTENTION = True
    attends: Any = attention_dispatch
    attends.HAS_FLASH_ATTENTION = True
    attends.flash_attn_func = flash_attn_func
    attends.flash_attn_varlen_func = varlen_without_dropout


def varlen_without_dropout(*args: Any, dropout_p: float = 0.0, **options: Any) -> torch.Tensor:
    """Attend as `flash_attn_varlen_func`; Unsloth names a dropout, of 0."""
    assert not dropout_p
    return flash_attn_varlen_func(*args, **options)


if __name__ == "__main__":
    run_baseline(train)
