"""Names the documents of a step that is not finite: in a file of the run, and in words."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from utils.callbacks.journal import valid_json
from utils.cluster.whole_files import replace_text
from utils.data.loader import TrainLoader
from utils.data.packed_rows import DocumentPart

SHOWN_DOCUMENTS = 8
SHOWN_LOSSES = 4
SHOWN_WEIGHTS = 3


@dataclass(frozen=True)
class Finding:
    """What one rank found in a step (counted from 0): figures and weights that are not finite."""

    rank: int
    step: int
    losses: dict[int, float] = field(default_factory=dict)  # by micro-batch of the step, from 0
    gradient_norm: float | None = None
    weights: tuple[str, ...] = ()

    @classmethod
    def of_step(
        cls, rank: int, step: int, losses: Sequence[float], gradient_norm: float
    ) -> "Finding | None":
        """Return what is not finite; None when all is. DeepSpeed's norm of NaN is below 0."""
        spoilt = {place: loss for place, loss in enumerate(losses) if not math.isfinite(loss)}
        good_norm = math.isfinite(gradient_norm) and gradient_norm >= 0
        if not spoilt and good_norm:
            return None
        return cls(rank, step, spoilt, None if good_norm else gradient_norm)


@dataclass(frozen=True)
class NonFiniteReport:
    """The first step that was not finite, what of it, and where its documents are listed."""

    step: int  # counted from 1, as in every log line
    cause: str
    documents: str

    def stopped(self, before: str = "") -> str:
        """Say that the run ended, and what can be done; `before` says what had been skipped."""
        return (
            f"step {self.step}: {self.cause}{before}.\n{self.documents}\n"
            "Nothing of it was saved or exported. The same command goes on from the newest "
            "checkpoint, or begins again without one, and meets the same batch: look at these "
            "documents and leave out what is wrong with them (then also: --accept_changes "
            "train_data), or let such batches be passed over (--on_nonfinite skip), or lower "
            "--learning_rate or --max_grad_norm, if the losses rose before."
        )

    def limit_reached(self, limit: int) -> str:
        """Say that the run ended after as many skipped steps as it may have."""
        skipped = f"{limit} step{'s were' if limit > 1 else ' was'} skipped before"
        return self.stopped(f"; {skipped}, and nonfinite_limit {limit} allows no more")

    def skipped(self, count: int, limit: int) -> str:
        """Say that the step was skipped."""
        return (
            f"step {self.step} skipped ({count} of at most {limit}), weights and optimizer left as "
            f"they were: {self.cause}; {self.documents}"
        )


def write_report(found: Sequence[Finding], loader: TrainLoader, run: Path) -> NonFiniteReport:
    """Write nonfinite-step-N.json of the first step found into the run directory, atomically.

    The documents are those of the micro-batches whose loss is not finite; when only the gradient
    or a weight is not, those of the global batch.
    """
    step = min(finding.step for finding in found)
    found = [finding for finding in found if finding.step == step]
    places = [(place, finding.rank) for finding in found for place in finding.losses]
    parts = documents_of(loader, step, places)
    norms = [finding.gradient_norm for finding in found if finding.gradient_norm is not None]
    weights = sorted({name for finding in found for name in finding.weights})
    of_what = "the micro-batches" if places else "the global batch"
    facts = {
        "step": step + 1,
        "losses": [
            {"rank": finding.rank, "micro_batch": place, "loss": loss}
            for finding in found
            for place, loss in finding.losses.items()
        ],
        "gradient_norm": norms[0] if norms else None,
        "weights": weights,
        "documents_of": of_what,
        "documents": [
            {"dataset": str(part.dataset), "document": part.document}
            | {"start": part.start, "stop": part.stop}
            for part in parts
        ],
    }
    path = run / f"nonfinite-step-{step + 1}.json"
    text = json.dumps(valid_json(facts), indent=1, allow_nan=False) + "\n"
    try:
        replace_text(path, text)
        where = f"all of them: {path}"
    except OSError as error:  # the finding is what matters
        where = f"the list of all could not be written: {error}"
    told = f"documents of {of_what}: {named_documents(parts)} ({where})"
    return NonFiniteReport(step + 1, _cause(found, norms, weights), told)


def documents_of(
    loader: TrainLoader, step: int, places: Sequence[tuple[int, int]]
) -> list[DocumentPart]:
    """Return the documents of a step's micro-batches, (place in the step, rank); of all if none."""
    sampler = loader.batch_sampler
    rows = sampler.rows_of_step(step)
    if places:
        micro_batches = rows.reshape(sampler.accumulation_steps, -1, sampler.micro_batch_size)
        rows = np.concatenate([micro_batches[place] for place in places])
    return loader.dataset.documents_in_rows(rows)


def named_documents(parts: Sequence[DocumentPart]) -> str:
    """Name the first few documents, by dataset."""
    by_dataset: dict[Path, list[int]] = {}
    documents = sorted({(part.dataset, part.document) for part in parts})
    for dataset, document in documents[:SHOWN_DOCUMENTS]:
        by_dataset.setdefault(dataset, []).append(document)
    named = [
        f"{', '.join(map(str, numbers))} of {dataset}" for dataset, numbers in by_dataset.items()
    ]
    more = len(documents) - SHOWN_DOCUMENTS
    return "; ".join(named) + (f"; and {more} more" if more > 0 else "")


def _cause(found: Sequence[Finding], norms: list[float], weights: list[str]) -> str:
    losses = [
        f"the loss of rank {finding.rank} in micro-batch {place + 1} is {_named(loss)}"
        for finding in found
        for place, loss in finding.losses.items()
    ]
    if losses:
        more = len(losses) - SHOWN_LOSSES
        told = ", ".join(losses[:SHOWN_LOSSES])
        return told + (f" (and those of {more} more micro-batches)" if more > 0 else "")
    if norms:
        return f"the gradient norm is {_named(norms[0])}, though the losses are finite"
    shown = ", ".join(weights[:SHOWN_WEIGHTS]) + (", ..." if len(weights) > SHOWN_WEIGHTS else "")
    return (
        f"{len(weights)} of the weights are not finite after it ({shown}), though its loss and "
        "gradient are: the optimizer's update overflowed"
    )


def _named(value: Any) -> str:
    """Name a number that is not finite; DeepSpeed says -1 for either kind."""
    return {"nan": "NaN", "inf": "infinite", "-inf": "infinite"}.get(str(value), "not finite")
