"""Time one contestant at every size, in this process."""

import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.steps import peak_memory_bytes

SHORTEST_S = 0.5
FEWEST_CALLS = 3


def main() -> None:
    """Write {"seconds": {size: median of calls}, "units": {size: n}, "peak_memory_bytes": n}."""
    module_name, contestant, outcome, *sizes = sys.argv[1:]
    module = importlib.import_module(f"benchmarks.components.{module_name}")
    prepare = module.CONTESTANTS[contestant]
    seconds, units = {}, {}
    for size in map(int, sizes):
        prepared = prepare(size)
        if prepared is None:
            continue
        call, units[size] = prepared
        seconds[size] = median_call(call)
        del call, prepared
        gc.collect()
    found = {"seconds": seconds, "units": units, "peak_memory_bytes": peak_memory_bytes()}
    Path(outcome).write_text(json.dumps(found))


def median_call(call: Callable[[], object]) -> float:
    """Return the median seconds of calls after one that is not counted."""
    call()
    durations: list[float] = []
    while len(durations) < FEWEST_CALLS or sum(durations) < SHORTEST_S:
        begin = time.perf_counter()
        call()
        durations.append(time.perf_counter() - begin)
        if durations[0] > 10 * SHORTEST_S:
            break
    return statistics.median(durations)


if __name__ == "__main__":
    main()
