"""The peaks of a device: bf16 matrix products over a sweep of shapes, and a large copy.

`python -m benchmarks.hardware.probes OUTCOME [--toy]`. The best of many shapes is the peak, as in
ml-engineering's "maximum achievable matmul FLOPS": data sheets name a clock that no card holds.
"""

import itertools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.components.__main__ import median_call
from benchmarks.recording.job import saying_why_not

# Rows are tokens of a micro-batch, columns and depths those of the models in the cells.
ROWS = (4096, 8192, 16384)
COLUMNS = (2048, 4096, 8192, 14336)
DEPTHS = (1024, 2048, 4096, 8192)
COPIED_BYTES = 4 * 2**30
TOY_SHAPE, TOY_BYTES = (64, 64, 64), 2**20
SHORTEST_S = 0.05  # a shape; all together a few seconds
AGAIN, AGAIN_S = 5, 0.5  # the best shapes once more, for longer


def main() -> None:
    """Write {"matmul": {...}, "bandwidth": {...}}."""
    outcome, *toy = sys.argv[1:]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with saying_why_not():
        shapes = [TOY_SHAPE] if toy else list(itertools.product(ROWS, COLUMNS, DEPTHS))
        copied = TOY_BYTES if toy else COPIED_BYTES
        found = {"matmul": probe_products(shapes, device), "bandwidth": probe_copy(copied, device)}
    Path(outcome).write_text(json.dumps(found))


def probe_products(shapes: Sequence[tuple[int, int, int]], device: str) -> dict[str, Any]:
    """Return the FLOP/s of the best of these (rows, columns, depth), and of each."""
    once = {shape: _product_speed(shape, device, SHORTEST_S) for shape in shapes}
    best = sorted(once, key=lambda shape: -once[shape])[:AGAIN]
    again = {shape: _product_speed(shape, device, AGAIN_S) for shape in best}
    peak = max(again, key=lambda shape: again[shape])
    return {
        "flops_per_second": again[peak],
        "shape": list(peak),
        "median_flops_per_second": statistics.median(once.values()),
        "shapes": [[*shape, round(speed / 1e12, 1)] for shape, speed in once.items()],
    }


def _product_speed(shape: tuple[int, int, int], device: str, shortest_s: float) -> float:
    rows, columns, depth = shape
    left = torch.randn(rows, depth, device=device).bfloat16()
    right = torch.randn(columns, depth, device=device).bfloat16()
    out = torch.empty(rows, columns, device=device, dtype=torch.bfloat16)

    def product() -> None:
        torch.mm(left, right.T, out=out)

    return 2 * rows * columns * depth / per_call(product, shortest_s)


def probe_copy(copied_bytes: int, device: str) -> dict[str, Any]:
    """Return bytes/s, read and written, of copies of so many bytes."""
    source = torch.ones(copied_bytes // 4, device=device)
    target = torch.empty_like(source)
    seconds = per_call(lambda: target.copy_(source), AGAIN_S)
    return {"bytes_per_second": 2 * copied_bytes / seconds, "copied_bytes": copied_bytes}


def per_call(call: Callable[[], object], shortest_s: float) -> float:
    """Return the seconds of a call among several that follow one another without a wait."""
    together = 10

    def calls() -> None:
        for _ in range(together):
            call()

    return median_call(calls, shortest_s) / together


if __name__ == "__main__":
    main()
