"""The figures of docs/scaling.md are those of the planner, of results and of its sources."""

import json
import math
import re
from pathlib import Path

import planned
import pytest
from transformers import AutoConfig

from benchmarks.cells.shapes import LLAMA_8B
from utils.config.strategy import assumed_gpus
from utils.plan.forecast import exchange_times, exchanged_bytes
from utils.plan.memory_estimate import GIB, checkpoint_bytes, estimate_memory

ROOT = Path(__file__).parents[3]
SCALING = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
WORDS = " ".join(SCALING.split())
ALL_GPUS = (64, 256, 1024)
WIDER = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
         "num_attention_heads": 64}  # fmt: skip
# Model, sequences at once, GPUs of a copy under hsdp, recomputation.
MODELS = {
    "8 B": (LLAMA_8B, 2, 8, "selective"),
    "70 B": (LLAMA_8B | WIDER, 1, 32, "full"),
}


def row(begin: str) -> list[str]:
    """Return the cells of the table's row that begins with a text."""
    (line,) = [line for line in SCALING.splitlines() if line.startswith(f"| {begin}")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def setup(name: str, gpus: int, copies: int):
    shape, rows, _, _ = MODELS[name]
    given = planned.settings(
        use_cpu=None, dry_run="true", assume=f"{gpus // 8}x8xH100-80GB", sequence_length=8192,
        bf16="true", global_batch_size=gpus * rows, per_device_train_batch_size=rows,
    )  # fmt: skip
    launch = {"world_size": gpus, "strategy": "fsdp2", "replicas": copies}
    return planned.setup(
        AutoConfig.for_model(**shape), given, elsewhere=True, compiled=True, **launch
    )


@pytest.mark.parametrize("name", MODELS)
def test_memory_and_checkpoints(name):
    _, _, shards, recomputed = MODELS[name]
    told = []
    for gpus in ALL_GPUS:
        runs = [setup(name, gpus, copies) for copies in (1, gpus // shards)]
        told.append([f"{estimate_memory(run, recomputed).total / GIB:.0f}" for run in runs])
    assert row(f"GiB per GPU for a model of {name},") == [", ".join(pair) for pair in told]
    size = math.floor(checkpoint_bytes(setup(name, 64, 1)) / GIB + 0.5)
    assert f"{size} GiB for {name}" in WORDS


def test_batch_exchange_and_failures():
    assert row("least tokens") == [f"{gpus * 8192 / 1e6:.1f} M" for gpus in ALL_GPUS]
    hours = 54 * 24 * 16384 / 419
    assert f"one per {round(hours, -3):,.0f} GPU hours" in WORDS
    days = [hours / gpus / 24 for gpus in ALL_GPUS]
    assert [float(cell) for cell in row("days between")] == pytest.approx(days, rel=0.02)
    share = f"{20 / (days[-1] * 1440):.1%}".replace("%", " %")
    assert f"20 minutes per failure that is {share} of the time" in WORDS
    assert f"{math.sqrt(7200 * 85 * 50) / 60:.0f} minutes for 85 s and 50 hours" in WORDS
    gpus, sharded = assumed_gpus("128x8xH100-80GB"), setup("8 B", 1024, 1)
    (all_ranks, _), (in_copies, _) = (exchanged_bytes(sharded, ranks) for ranks in (1024, 8))
    assert f"exchanges {all_ranks / 1e9:.0f} GB per micro-batch for 8 B" in WORDS
    assert f"`hsdp` keeps {in_copies / 1e9:.0f} GB of it inside the node" in WORDS
    seconds, _ = exchange_times(sharded, gpus, gpus.link)
    assert f"{seconds:.1f} s beside about 2 s of computation" in WORDS


def test_a_trillion_tokens():
    results = ROOT / "benchmarks" / "results" / "cpu" / "tokenization.json"
    compared = json.loads(results.read_text())["compared"]
    for name, words in (
        ("Stoker", "54 MB/s with gigatoken"),
        ("Stoker, without gigatoken", "4.9 MB/s with `tokenizers`"),
    ):
        rate = compared[name]["per_second"]["100"]
        assert words in WORDS
        assert float(words.split()[0]) == pytest.approx(rate, rel=0.005)
        seconds = 4.4e12 / (rate * 1e6 * 128 / 2)
        spent = f"{seconds / 60:.0f} minutes" if seconds < 3600 else f"{seconds / 3600:.1f} hours"
        assert spent in WORDS


def test_the_long_context_recipe_has_one_prediction():
    page = (ROOT / "docs" / "parallelism.md").read_text(encoding="utf-8")
    (gib,) = re.findall(r"131,072 tokens with 8 GPUs \((\d+) GiB each", page)
    recipes = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert f"qwen3_8b_128k.yaml): 8xH100-80GB, {gib} GiB" in recipes
