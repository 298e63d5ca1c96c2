"""Time one baseline at every size, in this process.

All have the environment of a run, and on a CPU a heap that keeps what is freed: kernels are
compared, not how often the system clears pages for them.
"""

import gc
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.recording.job import saying_why_not
from benchmarks.recording.steps import peak_memory_bytes, wait_for_device
from utils.kernels.cpu_products import keep_freed_memory
from utils.launch.script import configure_environment

SHORTEST_S = 0.5
FEWEST_CALLS = 3


def main() -> None:
    """Write {"seconds": {size: median of calls}, "units": {size: n}, "peak_memory_bytes": n}."""
    module_name, baseline, outcome, *sizes = sys.argv[1:]
    configure_environment()
    if not torch.cuda.is_available():
        keep_freed_memory(os.environ)
    module = importlib.import_module(f"benchmarks.components.{module_name}")
    with saying_why_not():
        seconds, units = time_sizes(module.BASELINES[baseline], [int(size) for size in sizes])
    found = {"seconds": seconds, "units": units, "peak_memory_bytes": peak_memory_bytes()}
    Path(outcome).write_text(json.dumps(found))


def time_sizes(
    prepare: Callable[[int], tuple[Callable[[], object], int] | None],
    sizes: Sequence[int],
    shortest_s: float = SHORTEST_S,
) -> tuple[dict[int, float], dict[int, int]]:
    """Return the seconds of a call, and the units that it does, by size."""
    seconds, units = {}, {}
    for size in sizes:
        prepared = prepare(size)
        if prepared is None:
            continue
        call, units[size] = prepared
        seconds[size] = median_call(call, shortest_s)
        del call, prepared
        gc.collect()
    return seconds, units


def median_call(call: Callable[[], object], shortest_s: float = SHORTEST_S) -> float:
    """Return the median seconds of calls after one that is not counted, the device's work too."""
    call()
    wait_for_device()
    durations: list[float] = []
    while len(durations) < FEWEST_CALLS or sum(durations) < shortest_s:
        begin = time.perf_counter()
        call()
        wait_for_device()
        durations.append(time.perf_counter() - begin)
        if durations[0] > 10 * shortest_s:
            break
    return statistics.median(durations)


if __name__ == "__main__":
    main()
