"""Losses of Stoker with other settings beside its own, step by step; no speeds."""

import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.cells.kinds import ParityCell, Variant
from benchmarks.comparisons.turns import run_process, say
from benchmarks.recording.job import Job
from benchmarks.workloads.workload import make_workload
from utils.plan.memory_estimate import optimizer_bytes_per_parameter

LAST = 20  # steps whose mean loss is the run's
LIMIT = 0.02  # of it, between a variant and the first


def hold(cell: ParityCell) -> dict[str, Any]:
    """Let each variant train once; return its results."""
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="stoker-benchmark-") as directory:
        workload = make_workload(cell.workload, Path(directory))
        for variant in cell.variants:
            losses[variant.name] = _losses(cell, variant, workload)
            say(f"{variant.name}: {final_loss(losses[variant.name]):.4f}")
    first = losses[cell.variants[0].name]
    return {
        "title": cell.title,
        "work": asdict(cell),
        "variants": {
            variant.name: {
                "bytes_a_parameter": bytes_a_parameter(variant),
                "final_loss": round(final_loss(losses[variant.name]), 5),
                "mean_difference": round(mean_difference(losses[variant.name], first), 6),
                "losses": [round(loss, 5) for loss in losses[variant.name]],
            }
            for variant in cell.variants
        },
        "parity": parity(cell, losses),
        "not_run": {},
    }


def _losses(cell: ParityCell, variant: Variant, workload: Path) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="stoker-benchmark-") as directory:
        scratch = Path(directory)
        job = Job(
            workload=str(workload),
            scratch=str(scratch),
            kind=cell.workload.kind,
            precision=variant.precision,
            sequence_length=cell.workload.sequence_length,
            micro_batch_size=cell.micro_batch_size,
            steps=cell.steps,
            warmup_steps=1,
            tuned=False,
            learning_rate=cell.learning_rate,
            settings=dict(variant.settings),
        )
        job_file, outcome_file = scratch / "job.json", scratch / "outcome.json"
        job_file.write_text(json.dumps(asdict(job)))
        module = "benchmarks.baselines.stoker"
        one_thread = {"OMP_NUM_THREADS": "1"}  # the same sums whatever the cores
        run_process(module, [str(job_file), str(outcome_file)], scratch, one_thread)
        found: list[float] = json.loads(outcome_file.read_text())["losses"]
        return found


def final_loss(losses: Sequence[float]) -> float:
    """Return the mean loss of the last steps."""
    return statistics.fmean(losses[-LAST:])


def mean_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the mean absolute difference of two runs, step by step."""
    return statistics.fmean(abs(a - b) for a, b in zip(losses, others, strict=True))


def parity(cell: ParityCell, losses: dict[str, list[float]]) -> dict[str, Any]:
    """Return how far each final loss is from the first's, and whether all held ones are near."""
    first = final_loss(losses[cell.variants[0].name])
    differences = {name: final_loss(own) - first for name, own in losses.items()}
    held = [differences[variant.name] for variant in cell.variants if variant.held]
    return {
        "last_steps": min(LAST, cell.steps),
        "limit": LIMIT,
        "differences": {name: round(value, 5) for name, value in differences.items()},
        "holds": all(difference <= LIMIT for difference in held),
    }


def bytes_a_parameter(variant: Variant) -> float:
    """Return what weight, gradient and Adam's states take together."""
    settings = dict(variant.settings)
    weights: torch.dtype = getattr(torch, settings.get("dtype", "float32"))
    return 2 * weights.itemsize + optimizer_bytes_per_parameter(
        settings.get("optim_states"), weights.itemsize
    )
