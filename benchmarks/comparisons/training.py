"""Comparisons of whole toolkits: the same model, documents and precision, tokens a second."""

import json
import statistics
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.cells.kinds import OURS, OURS_TUNED, Baseline, TrainingCell
from benchmarks.comparisons.ratios import paired_ratio
from benchmarks.comparisons.turns import LEFT_OUT, Turns, run_process
from benchmarks.hardware.efficiency import Device, efficiency
from benchmarks.progress import Progress
from benchmarks.recording.job import Job, Outcome
from benchmarks.workloads.workload import Workload

# Mean difference of losses from ours over the steps, as in the parity tests of mixed precision.
PRETRAINING_PARITY = 2e-2
# Largest difference of the first loss from plain transformers' loss on the same documents. Toolkits
# batch different documents, and their losses differ more than a mistake would change them.
FINE_TUNING_PARITY = 5e-3
# Largest difference of the share of loss tokens; documents differ, but their prompts are similar.
LOSS_SHARE_PARITY = 2e-2


def hold(
    cell: TrainingCell,
    repeats: int,
    device: Device | None = None,
    kept: Progress | None = None,
    left_out: Collection[str] = (),
) -> dict[str, Any]:
    """Let the baselines of a cell train in turn, except those in `left_out`; return its results.

    The result names peers that are not installed or fail, with the reason. Raises
    BaselineFailedError if Stoker fails.
    """
    device = device or Device()
    baselines = {one.name: one for one in cell.baselines}
    reasons = {name: one.reason_not_to_run() for name, one in baselines.items()}
    reasons |= {name: LEFT_OUT for name in left_out if name in reasons}
    turns: Turns[dict[str, Any]] = Turns(
        {name: reason for name, reason in reasons.items() if reason}, kept
    )
    with tempfile.TemporaryDirectory(prefix="stoker-benchmark-") as scratch:
        workload = Path(scratch)

        def run(name: str, directory: Path) -> dict[str, Any]:
            make_once(cell.workload, workload)
            return run_baseline_of(cell, baselines[name], workload, directory)

        def describe(one: dict[str, Any]) -> str:
            return f"{Outcome(**one).tokens_per_second:,.0f} tokens/s"

        turns.take(list(baselines), repeats, run, describe)
        outcomes = {name: [Outcome(**one) for one in runs] for name, runs in turns.outcomes.items()}
        expected = expected_first_losses(cell, outcomes, workload)
    return {
        "title": cell.title,
        "work": asdict(cell) | {"compared": list(baselines)},
        "compared": {
            name: summary(runs) | efficiency(cell, runs, device) for name, runs in outcomes.items()
        },
        "ratios": ratios(outcomes, [one.name for one in cell.baselines if one.tuned]),
        "parity": parity(cell, outcomes, expected),
        "not_run": turns.not_run,
    }


def make_once(workload: Workload, directory: Path) -> None:
    """Make a workload where it is not there yet."""
    if not (directory / "workload.json").exists():
        made_in_process(workload, directory)


def expected_first_losses(
    cell: TrainingCell, outcomes: Mapping[str, Sequence[Outcome]], workload: Path
) -> dict[str, float]:
    """Return what plain transformers makes of the first batches; {} where they are all the same.

    In a process of its own, in which no toolkit has changed anything.
    """
    if cell.workload.kind == "pretrain" or not outcomes:
        return {}
    make_once(cell.workload, workload)
    with tempfile.TemporaryDirectory(prefix="stoker-benchmark-") as directory:
        asked, answered = Path(directory) / "asked.json", Path(directory) / "answered.json"
        documents = {name: runs[0].first_documents for name, runs in outcomes.items()}
        asked.write_text(
            json.dumps(
                {"workload": str(workload), "precision": cell.precision, "documents": documents}
            )
        )
        run_process("benchmarks.workloads.first_loss", [str(asked), str(answered)], Path(directory))
        return json.loads(answered.read_text())


def made_in_process(workload: Workload, directory: Path) -> None:
    """Make a workload in a process of its own, which leaves nothing on the GPU."""
    directory.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="stoker-benchmark-") as scratch:
        given = Path(scratch) / "workload.json"
        given.write_text(json.dumps(asdict(workload)))
        run_process("benchmarks.workloads.workload", [str(given), str(directory)], Path(scratch))


def run_baseline_of(
    cell: TrainingCell,
    baseline: Baseline,
    workload: Path,
    scratch: Path,
) -> dict[str, Any]:
    """Let one baseline train in a fresh process; return its Outcome as JSON."""
    job = job_of(cell, baseline, workload, scratch)
    job_file, outcome_file = scratch / "job.json", scratch / "outcome.json"
    job_file.write_text(json.dumps(asdict(job)))
    module = f"benchmarks.baselines.{baseline.module}"
    arguments = [str(job_file), str(outcome_file)]
    run_process(module, arguments, scratch, dict(baseline.environment))
    return json.loads(outcome_file.read_text())


def job_of(cell: TrainingCell, baseline: Baseline, workload: Path, scratch: Path) -> Job:
    """Return what the baseline is told."""
    return Job(
        workload=str(workload),
        scratch=str(scratch),
        kind=cell.workload.kind,
        precision=cell.precision,
        sequence_length=cell.workload.sequence_length,
        micro_batch_size=cell.micro_batch_size,
        steps=cell.steps,
        warmup_steps=cell.warmup_steps,
        tuned=baseline.tuned,
        learning_rate=cell.learning_rate,
        lora_rank=cell.lora_rank,
        trace=cell.trace,
        variant=baseline.variant,
    )


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return medians, all repeats' speeds, and the first repeat's steps, losses and notes."""
    speeds = [outcome.tokens_per_second for outcome in outcomes]
    first = outcomes[0]
    return {
        "tokens_per_second": round(statistics.median(speeds), 1),
        "repeats": [round(speed, 1) for speed in speeds],
        "peak_memory_bytes": int(statistics.median(one.peak_memory_bytes for one in outcomes)),
        "reserved_memory_bytes": int(
            statistics.median(one.reserved_memory_bytes for one in outcomes)
        ),
        "first_step_s": round(statistics.median(one.first_step_s for one in outcomes), 2),
        "step_s": [round(seconds, 4) for seconds in first.step_s],
        "losses": [round(loss, 5) for loss in first.losses],
        "notes": first.notes,
    }


def ratios(
    outcomes: Mapping[str, Sequence[Outcome]], tuned: Collection[str] = ()
) -> dict[str, dict[str, float]]:
    """Return how many times faster Stoker is than each peer; tuned is compared with tuned.

    If one of Stoker's two variants did not run, the other is used; {} if neither ran.
    """
    if not (ours := _ours(outcomes)):
        return {}
    ours_tuned = OURS_TUNED if OURS_TUNED in outcomes else ours
    speeds = {name: [one.tokens_per_second for one in runs] for name, runs in outcomes.items()}
    return {
        name: paired_ratio(speeds[ours_tuned if name in tuned else ours], theirs)._asdict()
        for name, theirs in speeds.items()
        if name not in (OURS, OURS_TUNED)
    }


def _ours(outcomes: Mapping[str, Sequence[Outcome]]) -> str | None:
    """Return under which name Stoker ran, the untuned first; None: it did not."""
    return next((name for name in (OURS, OURS_TUNED) if name in outcomes), None)


def parity(
    cell: TrainingCell,
    outcomes: Mapping[str, Sequence[Outcome]],
    expected: Mapping[str, float],
) -> dict[str, Any]:
    """Return the differences of losses, and whether all toolkits trained the same.

    In pretraining every toolkit's losses are compared with ours, step by step. In fine-tuning each
    toolkit's first loss is compared with the one `expected` for its first batch. The shares of loss
    tokens must agree as well. Without Stoker nothing is compared.
    """
    if not (reference := _ours(outcomes)):
        return {"compared_steps": 0, "holds": True}
    ours = outcomes[reference][0]
    firsts = {name: runs[0] for name, runs in outcomes.items()}
    others = {name: one for name, one in firsts.items() if name != reference}
    if cell.workload.kind == "pretrain":
        compared, limit = cell.steps, PRETRAINING_PARITY
        differences = {
            name: mean_difference(one.losses[:compared], ours.losses[:compared])
            for name, one in others.items()
        }
    else:
        compared, limit = 1, FINE_TUNING_PARITY
        differences = {name: abs(one.losses[0] - expected[name]) for name, one in firsts.items()}
    shares = {name: abs(loss_share(one) - loss_share(ours)) for name, one in others.items()}
    return {
        "compared_steps": compared,
        "limit": limit,
        "differences": differences,
        "loss_share_limit": LOSS_SHARE_PARITY,
        "loss_share_differences": shares,
        "holds": all(difference <= limit for difference in differences.values())
        and all(difference <= LOSS_SHARE_PARITY for difference in shares.values()),
    }


def loss_share(outcome: Outcome) -> float:
    """Return the share of the real tokens that bore loss."""
    return outcome.window_loss_tokens / outcome.window_tokens


def mean_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the mean absolute difference of two runs' losses, step by step."""
    return statistics.fmean(abs(a - b) for a, b in zip(losses, others, strict=True))
