"""The limit of each toolkit on this device: one size grows until the toolkit fails."""

import tempfile
from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.cells.kinds import OURS, SweepCell, TrainingCell
from benchmarks.comparisons.ratios import paired_ratio
from benchmarks.comparisons.training import made_in_process, run_baseline_of
from benchmarks.comparisons.turns import LEFT_OUT, BaselineFailedError
from benchmarks.hardware.efficiency import Device, efficiency
from benchmarks.progress import Progress, say
from benchmarks.recording.job import Outcome

# By baseline and size, Outcomes as JSON.
Outcomes = dict[str, dict[str, dict[str, Any]]]


def hold(
    cell: SweepCell, device: Device, kept: Progress, left_out: Collection[str] = ()
) -> dict[str, Any]:
    """Let each baseline train at each size, from the smallest, until it fails.

    Why it did is told, whoever it is: what does not fit is a result here.
    """
    before = kept.load()
    outcomes: Outcomes = before["outcomes"]
    stopped: dict[str, str] = before["not_run"] or {
        one.name: reason
        for one in cell.base.baselines
        if (reason := LEFT_OUT if one.name in left_out else one.reason_not_to_run())
    }
    for number, size in list(enumerate(cell.sizes))[before["rounds"] :]:
        if len(stopped) == len(cell.base.baselines):
            break
        kept.begin_round()
        _take_size(cell, size, outcomes, stopped)
        kept.end_round(number + 1, outcomes, stopped)
    return {
        "title": cell.base.title,
        "unit": "tokens",
        "grows": "sequence_length",
        "sizes": list(cell.sizes),
        "work": asdict(cell.base) | {"compared": [one.name for one in cell.base.baselines]},
        "compared": {name: _summary(cell, by_size, device) for name, by_size in outcomes.items()},
        "ratios": {name: _ratios(outcomes, name) for name in outcomes if name != OURS},
        "stopped": {name: stopped.get(name, "") for name in outcomes},
        "not_run": {name: why for name, why in stopped.items() if name not in outcomes},
    }


def grown(cell: SweepCell, size: int) -> TrainingCell:
    """Return the training cell of one size."""
    return replace(cell.base, workload=replace(cell.base.workload, sequence_length=size))


def _take_size(cell: SweepCell, size: int, outcomes: Outcomes, stopped: dict[str, str]) -> None:
    """Let all who still can take one size; note the others in `stopped`."""
    work = grown(cell, size)
    going = [one for one in cell.base.baselines if one.name not in stopped]
    with tempfile.TemporaryDirectory(prefix="stoker-benchmark-") as directory:
        made_in_process(work.workload, Path(directory))
        for one in going:
            with tempfile.TemporaryDirectory(prefix="stoker-benchmark-") as scratch:
                try:
                    outcome = run_baseline_of(work, one, Path(directory), Path(scratch))
                except BaselineFailedError as error:
                    stopped[one.name] = f"at {size:,}: {error}"
                    say(f"{size:,}  {one.name}: {error}")
                    continue
            outcomes.setdefault(one.name, {})[str(size)] = outcome
            say(f"{size:,}  {one.name}: {Outcome(**outcome).tokens_per_second:,.0f} tokens/s")


def _ratios(outcomes: Outcomes, name: str) -> dict[str, dict[str, float]]:
    """Return how often faster Stoker is at each size that both did; of one run, so no interval."""
    speeds = {
        who: {size: Outcome(**one).tokens_per_second for size, one in outcomes[who].items()}
        for who in (OURS, name)
        if who in outcomes
    }
    return {
        size: paired_ratio([speeds[OURS][size]], [speed])._asdict()
        for size, speed in speeds[name].items()
        if size in speeds.get(OURS, {})
    }


def _summary(cell: SweepCell, by_size: dict[str, dict[str, Any]], device: Device) -> dict[str, Any]:
    measured = {size: Outcome(**outcome) for size, outcome in by_size.items()}
    return {
        "largest": max(map(int, measured)),
        "per_second": {size: round(one.tokens_per_second, 1) for size, one in measured.items()},
        "peak_memory_bytes": {size: one.peak_memory_bytes for size, one in measured.items()},
        "efficiency": {
            size: efficiency(grown(cell, int(size)), [one], device)
            for size, one in measured.items()
        },
    }
