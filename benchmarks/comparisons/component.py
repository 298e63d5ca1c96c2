"""Comparisons of parts of a step: the same work at growing sizes, units a second."""

import importlib
import json
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cells.kinds import OURS, ComponentCell
from benchmarks.comparisons.ratios import paired_ratio
from benchmarks.comparisons.turns import LEFT_OUT, Turns, run_process
from benchmarks.progress import Progress

Timings = dict[str, Any]  # as benchmarks/components/__main__.py writes them


def hold(
    cell: ComponentCell, repeats: int, kept: Progress | None = None, left_out: Collection[str] = ()
) -> dict[str, Any]:
    """Let the baselines of a component do their work in turn; return its results."""
    module = importlib.import_module(f"benchmarks.components.{cell.module}")
    sizes = cell.sizes or module.SIZES
    absent = {name: LEFT_OUT for name in module.BASELINES if name in left_out}
    turns: Turns[Timings] = Turns(absent, kept)

    def run(name: str, scratch: Path) -> Timings:
        outcome = scratch / "outcome.json"
        arguments = [cell.module, name, str(outcome), *map(str, sizes)]
        run_process("benchmarks.components", arguments, scratch)
        return json.loads(outcome.read_text())

    turns.take(list(module.BASELINES), repeats, run, describe)
    return {
        "title": module.TITLE,
        "unit": module.UNIT,
        "sizes": list(sizes),
        "compared": {name: summary(runs) for name, runs in turns.outcomes.items()},
        "ratios": {
            name: ratios(turns.outcomes[OURS], theirs)
            for name, theirs in turns.outcomes.items()
            if name != OURS and OURS in turns.outcomes
        },
        "not_run": turns.not_run,
    }


def speeds(timings: Timings) -> dict[str, float]:
    """Return units a second by size."""
    return {size: timings["units"][size] / seconds for size, seconds in timings["seconds"].items()}


def describe(timings: Timings) -> str:
    """Write the speed at each size."""
    return ", ".join(f"{size}: {speed:,.0f}/s" for size, speed in speeds(timings).items())


def summary(runs: Sequence[Timings]) -> dict[str, Any]:
    """Return the medians by size, and each repeat's."""
    by_size = [speeds(run) for run in runs]
    repeats = {size: [round(run[size], 1) for run in by_size] for size in by_size[0]}
    return {
        "per_second": {size: statistics.median(values) for size, values in repeats.items()},
        "repeats": repeats,
        "peak_memory_bytes": int(statistics.median(run["peak_memory_bytes"] for run in runs)),
    }


def ratios(ours: Sequence[Timings], theirs: Sequence[Timings]) -> Mapping[str, dict[str, float]]:
    """Return how many times faster Stoker is, at each size that both measured."""
    left, right = [speeds(run) for run in ours], [speeds(run) for run in theirs]
    return {
        size: paired_ratio([run[size] for run in left], [run[size] for run in right])._asdict()
        for size in right[0]
        if size in left[0]
    }
