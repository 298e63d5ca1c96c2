"""The time of a step of two ranks under DDP, with and without copies of gradients."""

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.comparisons.turns import run_process
from benchmarks.workloads.workload import LLAMA_11M, Workload, make_workload

TITLE = "A step of two ranks under DDP on this machine, by millions of parameters"
SIZES = (11, 44)
ROW = 128
RANKS = 2


def prepare(directory: Path, sizes: Sequence[int]) -> None:
    """Write documents, a tokenizer, and a model's configuration a size."""
    make_workload(Workload(LLAMA_11M, ROW, documents=400), directory)
    config = json.loads((directory / "weights" / "config.json").read_text())
    for size in sizes:
        layers = config | {"num_hidden_layers": config["num_hidden_layers"] * size // sizes[0]}
        (directory / f"{size}.json").write_text(json.dumps(layers))


def seconds(
    sizes: Sequence[int], prepared: Path, scratch: Path, *, variant: str
) -> dict[int, float]:
    """Train with each model in two ranks of their own."""
    found = {}
    # A thread a core: with more they wait for one another, and steps take five times as long.
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // RANKS))}
    for size in sizes:
        outcome = scratch / f"{size}.json"
        rank = ["benchmarks.durations.ddp_run", variant, *map(str, (prepared, scratch, outcome))]
        launch = ["--standalone", "--nproc-per-node", str(RANKS), "-m", *rank, str(size)]
        run_process("torch.distributed.run", launch, scratch, threads)
        found[size] = json.loads(outcome.read_text())
    return found


BASELINES: dict[str, Callable[[Sequence[int], Path, Path], dict[int, float]]] = {
    "Stoker": partial(seconds, variant="stoker"),
    "gradients copied into buckets": partial(seconds, variant="copies"),
    "static graph": partial(seconds, variant="static_graph"),
}
