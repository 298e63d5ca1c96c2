"""The cells for one GPU (H100 or H200): Stoker compared with other toolkits.

Windows are short, so that a round of a cell, each baseline once, takes about a minute.
"""

from dataclasses import replace

from benchmarks.cells.kinds import (
    LITGPT,
    PLAIN_LOOP,
    SFT_TRAINER,
    STOKER,
    TRAINER,
    TUNED_LITGPT,
    TUNED_SFT_TRAINER,
    TUNED_STOKER,
    TUNED_TRAINER,
    Baseline,
    Cell,
    ComponentCell,
    ProbeCell,
    TrainingCell,
)
from benchmarks.cells.shapes import GPT2_124M, LLAMA_1B, LLAMA_8B, QWEN3_600M
from benchmarks.workloads.workload import Workload

LIGER_TRAINER = Baseline(
    "Trainer, tuned, Liger", "hf_trainer", needs="liger_kernel", variant="liger"
)
LIGER_SFT_TRAINER = Baseline(
    "SFTTrainer, tuned, Liger", "trl_sft", needs="liger_kernel", variant="liger"
)
TORCHTUNE = Baseline("torchtune, tuned", "torchtune_recipe", needs="torchtune")
UNSLOTH = Baseline("Unsloth, tuned", "unsloth_sft", needs="unsloth")
FLASH_UNSLOTH = replace(UNSLOTH, name="Unsloth, tuned, FlashAttention", variant="flash attention")
_EVERYWHERE = (STOKER, TUNED_STOKER, TRAINER, TUNED_TRAINER, PLAIN_LOOP)
_PRETRAINING = (*_EVERYWHERE, LIGER_TRAINER)
_LLAMA_PRETRAINING = (*_PRETRAINING, LITGPT, TUNED_LITGPT)
# Not Trainer, which pads, and compiles anew for each length of a batch.
_FINE_TUNING = (
    STOKER, TUNED_STOKER, SFT_TRAINER, TUNED_SFT_TRAINER, LIGER_SFT_TRAINER, UNSLOTH, FLASH_UNSLOTH,
)  # fmt: skip
# Each start loads 16 GB for 8 B parameters, so there are fewer repeats.
_LARGE = (
    STOKER, TUNED_STOKER, TUNED_SFT_TRAINER, LIGER_SFT_TRAINER, TORCHTUNE, UNSLOTH, FLASH_UNSLOTH,
)  # fmt: skip
# There is no warm-up: at 3e-4 losses jumped by ten for some steps, after which nobody's agree.
PRETRAINING_RATE = 1e-4


def _rows(model: dict, length: int, micro_batch_size: int, steps: int) -> Workload:
    """Return rows for so many steps, and the two for a trace."""
    return Workload(model, length, documents=micro_batch_size * (steps + 2))


def _chats(model: dict, documents: int) -> Workload:
    return Workload(model, 4096, documents, mean_length=600, loss_share=0.25)


_LARGE_CHATS = replace(_chats(LLAMA_8B, 400), weights_dtype="bfloat16")
GPU_CELLS: tuple[Cell, ...] = (
    ProbeCell(),
    TrainingCell(
        "gpt2_124m", "GPT-2 124M, 32 x 1,024 tokens, bf16",
        _rows(GPT2_124M, 1024, 32, 65), "bf16", 32, _EVERYWHERE,
        steps=65, warmup_steps=15, learning_rate=PRETRAINING_RATE, trace=True,
    ),
    TrainingCell(
        "qwen3_600m_pretrain", "Qwen3-0.6B shape, pretraining, 4 x 4,096 tokens, bf16",
        _rows(QWEN3_600M, 4096, 4, 30), "bf16", 4, _PRETRAINING,
        steps=30, warmup_steps=8, learning_rate=PRETRAINING_RATE, trace=True,
    ),
    TrainingCell(
        "qwen3_600m_sft",
        "Qwen3-0.6B shape, fine-tuning, 4 x 4,096 tokens, chats of 600 tokens, bf16",
        _chats(QWEN3_600M, 1600), "bf16", 4, _FINE_TUNING,
        steps=30, warmup_steps=8, learning_rate=2e-5, trace=True,
    ),
    TrainingCell(
        "llama_1b_pretrain", "Llama-3.2-1B shape, pretraining, 2 x 8,192 tokens, bf16",
        _rows(LLAMA_1B, 8192, 2, 20), "bf16", 2, _LLAMA_PRETRAINING,
        steps=20, warmup_steps=6, learning_rate=PRETRAINING_RATE, trace=True,
    ),
    TrainingCell(
        "llama_8b_sft",
        "Llama-3.1-8B shape, full fine-tuning, 4,096 tokens, chats of 600 tokens, bf16 weights",
        _LARGE_CHATS, "bf16_weights", 1, _LARGE,
        steps=20, warmup_steps=5, learning_rate=1e-5, trace=True,
    ),
    TrainingCell(
        "llama_8b_lora",
        "Llama-3.1-8B shape, LoRA of rank 16, 4,096 tokens, chats of 600 tokens, bf16",
        _LARGE_CHATS, "bf16_frozen", 1, _LARGE,
        steps=20, warmup_steps=5, learning_rate=1e-4, lora_rank=16, trace=True,
    ),
    ComponentCell("gpu_loss_head"),
    ComponentCell("gpu_optimizer"),
)  # fmt: skip
