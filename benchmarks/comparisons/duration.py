"""Comparisons of waits that a user sees: seconds at growing sizes, each start a fresh process."""

import importlib
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cells.kinds import OURS, DurationCell
from benchmarks.comparisons.ratios import paired_ratio
from benchmarks.comparisons.turns import Turns

Seconds = dict[int, float]  # by size


def hold(cell: DurationCell, repeats: int) -> dict[str, Any]:
    """Let the baselines wait in turn; return the seconds.

    Stoker is compared with others alone, not with itself under other settings.
    """
    module = importlib.import_module(f"benchmarks.durations.{cell.module}")
    sizes = cell.sizes or module.SIZES
    turns: Turns[Seconds] = Turns({})
    with tempfile.TemporaryDirectory(prefix="stoker-benchmark-") as directory:
        prepared = Path(directory)
        module.prepare(prepared, sizes)

        def run(name: str, scratch: Path) -> Seconds:
            return module.BASELINES[name](sizes, prepared, scratch)

        turns.take(list(module.BASELINES), min(repeats, cell.most_repeats), run, describe)
    return {
        "title": module.TITLE,
        "unit": "s",
        "sizes": list(sizes),
        "compared": {name: summary(runs) for name, runs in turns.outcomes.items()},
        "ratios": {
            name: {
                str(size): paired_ratio(
                    [run[size] for run in theirs], [run[size] for run in turns.outcomes[OURS]]
                )._asdict()
                for size in theirs[0]
            }
            for name, theirs in turns.outcomes.items()
            if not name.startswith(OURS)
        },
        "not_run": turns.not_run,
    }


def describe(seconds: Seconds) -> str:
    """Write the seconds at each size."""
    return ", ".join(f"{size}: {one:.2f} s" for size, one in seconds.items())


def summary(runs: Sequence[Seconds]) -> dict[str, Any]:
    """Return the medians by size, and each repeat's."""
    repeats = {str(size): [round(run[size], 3) for run in runs] for size in runs[0]}
    return {
        "seconds": {size: statistics.median(values) for size, values in repeats.items()},
        "repeats": repeats,
    }
