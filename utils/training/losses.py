"""Losses that are logged beside that of the global batch: by source of a mixture, and held out."""

import logging
import math
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from typing_extensions import override

from utils.callbacks.metrics import MetricCallback
from utils.data.loader import source_names
from utils.support.collectives import gathered

if TYPE_CHECKING:
    from utils.training.trainer import PackedTrainer

KEY = "unlogged_source_losses"  # in each checkpoint

logger = logging.getLogger(__name__)


class SourceLosses(MetricCallback):
    """Logs `loss/NAME` of each source of a mixture: the mean of its loss tokens since the last log.

    The same for any ranks and micro-batches, up to rounding. Only a log or a save waits for the
    device. Checkpoints hold each rank's sums of the steps that were not logged yet.
    """

    def __init__(self, trainer: "PackedTrainer"):
        self.names = source_names([each.path for each in trainer.train_sequences.datasets])
        self.args, self.accelerator = trainer.args, trainer.accelerator
        shape = 2, len(self.names)  # losses, and how many tokens they are of
        self.totals = torch.zeros(shape, dtype=torch.float64, device=self.args.device)

    def take(self, outputs: Any) -> None:
        """Add what a micro-batch's LossOutput has."""
        self.totals += outputs.by_source

    def resume_from(self, saved: dict[str, Any]) -> None:
        """Take over this rank's sums; rank 0 takes all of another number of ranks."""
        by_rank = saved.get(KEY, [])
        same = len(by_rank) == self.args.world_size
        for rank, sums in enumerate(by_rank):  # by name: a resumed run may have other sources
            if self.args.process_index == (rank if same else 0):
                own = [sums.get(name, (0.0, 0.0)) for name in self.names]
                self.totals += torch.tensor(own, dtype=torch.float64).T.to(self.totals.device)

    def resume_state(self) -> dict[str, Any]:
        """Return each rank's sums by source."""
        return {KEY: gathered(dict(zip(self.names, self.totals.T.tolist(), strict=True)))}

    @override
    def metrics(self) -> dict[str, float]:
        """Return the mean losses since the last log, of the sources that had a loss token."""
        sums = self.accelerator.reduce(self.totals, reduction="sum").tolist()
        self.totals.zero_()
        each = zip(self.names, *sums, strict=True)
        return {f"loss/{name}": loss / count for name, loss, count in each if count}


def losses_by_source(trainer: "PackedTrainer") -> SourceLosses | None:
    """Give the trainer of a mixture its callback; None, and a log line where it knows nothing."""
    if len(trainer.train_sequences.datasets) == 1:
        return None
    if not trainer.fused_head:
        logger.info("loss/NAME is left out: loss_head logits tells no token's loss from another's")
        return None
    callback = SourceLosses(trainer)
    trainer.add_callback(callback)
    return callback


class EvaluationTotals:
    """Losses, loss tokens and hits of a split, summed on the device, this rank's part."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.totals = torch.zeros(3, dtype=torch.float64, device=accelerator.device)

    def add(self, outputs: Any, labels: torch.Tensor) -> None:
        """Add a micro-batch: its loss summed, not averaged; labels (B, T) unshifted."""
        following, hits = labels[:, 1:], outputs.get("hits")
        if hits is None:  # all logits are there; -100 is no word
            hits = outputs["logits"][:, :-1].argmax(-1) == following
        own = outputs["loss"], following.ne(-100).sum(), hits.sum()
        self.totals += torch.stack([value.double() for value in own])

    def figures(self, prefix: str) -> dict[str, float]:
        """Return the means over all loss tokens of the split; collective over ranks."""
        loss_sum, tokens, hits = self.accelerator.reduce(self.totals, reduction="sum").tolist()
        if not tokens:
            logger.warning("%s: not one loss token in the sequences evaluated: no loss", prefix)
        loss, accuracy = (total / tokens if tokens else math.nan for total in (loss_sum, hits))
        perplexity = math.inf if loss > 700 else math.exp(loss)  # float64 overflows at 709
        figures = {"loss": loss, "perplexity": perplexity, "accuracy": accuracy}
        figures["tokens"] = int(tokens)
        return {f"{prefix}_{name}": figure for name, figure in figures.items()}
