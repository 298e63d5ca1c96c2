"""The cells for two CPU cores: Stoker compared with other toolkits."""

import dataclasses

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
    DurationCell,
    SweepCell,
    TrainingCell,
)
from benchmarks.workloads.workload import LLAMA_11M, LLAMA_23M, Workload

_HEAP_KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}


def _on_cpu(baseline: Baseline) -> Baseline:
    """Let glibc keep what is freed, as Stoker does, where a baseline is tuned."""
    return dataclasses.replace(baseline, environment=tuple(_HEAP_KEPT.items()))


_ROWS = Workload(LLAMA_23M, sequence_length=512, documents=64)
_CHATS = Workload(LLAMA_11M, sequence_length=2048, documents=400, mean_length=300)
_PRETRAINING = (
    STOKER, _on_cpu(TUNED_STOKER), TRAINER, _on_cpu(TUNED_TRAINER), LITGPT, _on_cpu(TUNED_LITGPT),
    _on_cpu(PLAIN_LOOP),
)  # fmt: skip
_FINE_TUNING = (
    STOKER, _on_cpu(TUNED_STOKER), SFT_TRAINER, _on_cpu(TUNED_SFT_TRAINER), _on_cpu(TUNED_TRAINER),
)  # fmt: skip

CPU_CELLS: tuple[Cell, ...] = (
    TrainingCell(
        "pretrain_fp32", "Pretraining, 23 M parameters, 4 x 512 tokens, fp32",
        _ROWS, "fp32", 4, _PRETRAINING,
    ),
    TrainingCell(
        "pretrain_bf16", "Pretraining, 23 M parameters, 4 x 512 tokens, bf16",
        _ROWS, "bf16", 4, _PRETRAINING,
    ),
    TrainingCell(
        "sft_bf16", "Fine-tuning, 11 M parameters, chats of 300 tokens, bf16",
        _CHATS, "bf16", 1, _FINE_TUNING,
    ),
    SweepCell(
        TrainingCell(
            "pretrain_growth",
            "Pretraining, 23 M parameters, one sequence per step, bf16, by sequence length",
            Workload(LLAMA_23M, sequence_length=512, documents=8), "bf16", 1,
            (STOKER, TRAINER, PLAIN_LOOP), steps=8, warmup_steps=3,
        ),
        (256, 512, 1024, 2048),
    ),
    ComponentCell("loss_head"),
    ComponentCell("attention"),
    ComponentCell("loader"),
    ComponentCell("packing"),
    ComponentCell("tokenization"),
    DurationCell("start_up", most_repeats=5),
    DurationCell("checkpoint_stall"),
)  # fmt: skip
