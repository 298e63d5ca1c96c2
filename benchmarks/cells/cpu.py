"""The cells for two CPU cores: Stoker compared with other toolkits and with itself."""

import dataclasses

from benchmarks.baselines.stoker import ACCOUNTED, BLIND
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
    ParityCell,
    SweepCell,
    TrainingCell,
    Variant,
)
from benchmarks.workloads.workload import LLAMA_11M, LLAMA_23M, Workload


def _stoker_with(name: str, **variables: str) -> Baseline:
    return Baseline(name, "stoker", tuned=False, environment=tuple(variables.items()))


# glibc's. The second says its default, but counts as told: Stoker leaves malloc alone then.
_HEAP_KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
_LEFT_ALONE = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"}


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
            "pretrain_growth", "Pretraining, 23 M parameters, one row that grows, bf16",
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

_LLAMA_1M = LLAMA_11M | {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "vocab_size": 2048,
}
_SMALL_ROWS = Workload(_LLAMA_1M, sequence_length=64, documents=1920)
_ROUNDED = (("dtype", "bfloat16"), ("stochastic_rounding", "true"))

# Experiments: Stoker with and without one of its optimizations.
EXPERIMENTS: tuple[Cell, ...] = (
    TrainingCell(
        "large_tensors",
        "Pretraining, 23 M parameters, 4 x 512 tokens, bf16: where large tensors lie",
        _ROWS, "bf16", 4,
        (
            STOKER,
            _stoker_with("malloc left alone", THP_MEM_ALLOC_ENABLE="0", **_LEFT_ALONE),
            _stoker_with("huge pages", THP_MEM_ALLOC_ENABLE="1"),
            _stoker_with("heap kept", THP_MEM_ALLOC_ENABLE="0", **_HEAP_KEPT),
            _stoker_with("huge pages, heap kept", THP_MEM_ALLOC_ENABLE="1", **_HEAP_KEPT),
        ),
    ),
    TrainingCell(
        "watching",
        "Pretraining, 23 M parameters, 4 x 512 tokens, fp32: cost of logs, journal and watches",
        _ROWS, "fp32", 4,
        (
            dataclasses.replace(STOKER, variant=ACCOUNTED),
            dataclasses.replace(STOKER, name="unwatched", variant=BLIND),
        ),
        steps=43, alternate=True,
    ),
    ComponentCell("float32_products"),
    ComponentCell("short_documents"),
    DurationCell("ddp_step"),
    ParityCell(
        "low_precision", "Losses in fewer bits, 1 M parameters, 120 steps of 16 x 64 tokens",
        _SMALL_ROWS, 16, 120, 3e-3,
        (
            Variant("float32"),
            Variant("mixed precision bf16", precision="bf16"),
            Variant("states in bfloat16", (("optim_states", "bfloat16"),)),
            Variant("states in int8", (("optim_states", "int8"),)),
            Variant("weights in bfloat16, rounded stochastically", _ROUNDED),
            Variant(
                "weights in bfloat16, rounded stochastically, states in int8",
                (*_ROUNDED, ("optim_states", "int8")),
            ),
            Variant(
                "weights in bfloat16, rounded to the nearest", (("dtype", "bfloat16"),), held=False
            ),
        ),
    ),
)  # fmt: skip
