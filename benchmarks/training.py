"""Contests of whole toolkits: the same model, documents and precision, tokens a second."""

import importlib.util
import json
import statistics
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.cells import OURS, OURS_TUNED, TrainingCell
from benchmarks.contest import Turns, run_process
from benchmarks.job import Job, Outcome
from benchmarks.ratios import paired_ratio
from benchmarks.workloads import make_workload

# Mean difference of losses from ours over the steps, as in the parity tests of mixed precision.
PRETRAINING_PARITY = 2e-2
# Of the first loss alone: other documents in other rows, the same weights.
FINE_TUNING_PARITY = 5e-2


def hold(cell: TrainingCell, repeats: int) -> dict[str, Any]:
    """Let the contestants of a cell train in turn; return its results.

    A peer that is not installed, or fails, is named with the reason. Raises ContestantFailedError
    when Stoker itself fails.
    """
    contestants = {one.name: one for one in cell.contestants}
    turns: Turns[Outcome] = Turns(
        {
            name: f"{one.needs} is not installed"
            for name, one in contestants.items()
            if one.needs and importlib.util.find_spec(one.needs) is None
        }
    )
    with tempfile.TemporaryDirectory(prefix="stoker-benchmark-") as directory:
        workload = make_workload(cell.workload, Path(directory))

        def run(name: str, scratch: Path) -> Outcome:
            job = Job(
                workload=str(workload),
                scratch=str(scratch),
                kind=cell.workload.kind,
                precision=cell.precision,
                sequence_length=cell.workload.sequence_length,
                micro_batch_size=cell.micro_batch_size,
                steps=cell.steps,
                warmup_steps=cell.warmup_steps,
                tuned=contestants[name].tuned,
            )
            job_file, outcome_file = scratch / "job.json", scratch / "outcome.json"
            job_file.write_text(json.dumps(asdict(job)))
            module = f"benchmarks.contestants.{contestants[name].module}"
            run_process(
                module,
                [str(job_file), str(outcome_file)],
                scratch,
                dict(contestants[name].environment),
            )
            return Outcome(**json.loads(outcome_file.read_text()))

        turns.take(
            list(contestants), repeats, run, lambda one: f"{one.tokens_per_second:,.0f} tokens/s"
        )
    return {
        "title": cell.title,
        "work": asdict(cell) | {"contestants": list(contestants)},
        "contestants": {name: summary(runs) for name, runs in turns.outcomes.items()},
        "ratios": ratios(turns.outcomes, [one.name for one in cell.contestants if one.tuned]),
        "parity": parity(cell, turns.outcomes),
        "not_run": turns.not_run,
    }


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return medians, all repeats' speeds, and the first repeat's steps, losses and notes."""
    speeds = [outcome.tokens_per_second for outcome in outcomes]
    first = outcomes[0]
    return {
        "tokens_per_second": round(statistics.median(speeds), 1),
        "repeats": [round(speed, 1) for speed in speeds],
        "peak_memory_bytes": int(statistics.median(one.peak_memory_bytes for one in outcomes)),
        "first_step_s": round(statistics.median(one.first_step_s for one in outcomes), 2),
        "step_s": [round(seconds, 4) for seconds in first.step_s],
        "losses": [round(loss, 5) for loss in first.losses],
        "notes": first.notes,
    }


def ratios(
    outcomes: Mapping[str, Sequence[Outcome]], tuned: Collection[str] = ()
) -> dict[str, dict[str, float]]:
    """Return how often faster Stoker is than each peer, tuned than tuned."""
    ours_tuned = OURS_TUNED if OURS_TUNED in outcomes else OURS
    speeds = {name: [one.tokens_per_second for one in runs] for name, runs in outcomes.items()}
    return {
        name: paired_ratio(speeds[ours_tuned if name in tuned else OURS], theirs)._asdict()
        for name, theirs in speeds.items()
        if name not in (OURS, OURS_TUNED)
    }


def parity(cell: TrainingCell, outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    """Return how far each peer's losses are from ours, and whether that is the same training."""
    losses = {name: runs[0].losses for name, runs in outcomes.items()}
    same_rows = cell.workload.kind == "pretrain"
    limit = PRETRAINING_PARITY if same_rows else FINE_TUNING_PARITY
    compared = len(losses[OURS]) if same_rows else 1
    differences = {
        name: mean_difference(theirs[:compared], losses[OURS][:compared])
        for name, theirs in losses.items()
        if name != OURS
    }
    return {
        "compared_steps": compared,
        "limit": limit,
        "differences": differences,
        "holds": all(difference <= limit for difference in differences.values()),
    }


def mean_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the mean absolute difference of two runs' losses, step by step."""
    return statistics.fmean(abs(a - b) for a, b in zip(losses, others, strict=True))
