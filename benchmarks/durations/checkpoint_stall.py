"""How long training stands still while a checkpoint is saved, for checkpoints of growing size."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.comparisons.turns import run_process
from benchmarks.workloads.workload import LLAMA_11M, Workload, make_workload

TITLE = "How long training waits for a save of weights and AdamW states, by checkpoint size in MB"
SIZES = (40, 160, 480)
LAYER_MB = 40  # of the model below: 3.3 M parameters of 12 bytes
MODEL = LLAMA_11M | {
    "hidden_size": 512,
    "intermediate_size": 1472,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 200,
}
ROW = 64


def prepare(directory: Path, sizes: Sequence[int]) -> None:
    """Write documents, a tokenizer, and a model's configuration a size."""
    workload = Workload(MODEL | {"num_hidden_layers": 1}, ROW, documents=64)
    make_workload(workload, directory)
    config = json.loads((directory / "weights" / "config.json").read_text())
    for size in sizes:
        assert size % LAYER_MB == 0
        layers = config | {"num_hidden_layers": size // LAYER_MB}
        (directory / f"{size}.json").write_text(json.dumps(layers))


def stalls(
    sizes: Sequence[int], prepared: Path, scratch: Path, *, toolkit: str
) -> dict[int, float]:
    """Let a toolkit save a checkpoint of each size, in one process."""
    outcome = scratch / "outcome.json"
    arguments = [toolkit, str(prepared), str(scratch), str(outcome), *map(str, sizes)]
    run_process("benchmarks.durations.saving_run", arguments, scratch)
    found = json.loads(outcome.read_text())
    return {size: found[str(size)] for size in sizes}


BASELINES: dict[str, Callable[[Sequence[int], Path, Path], dict[int, float]]] = {
    "Stoker": partial(stalls, toolkit="stoker"),
    "Stoker, async_save": partial(stalls, toolkit="stoker_async"),
    "Trainer": partial(stalls, toolkit="trainer"),
}
