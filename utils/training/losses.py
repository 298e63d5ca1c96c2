"""Training loss by data source, load-balancing loss of experts, and loss on held-out splits.

Losses are summed on the device. The host reads the sums only for a log or a save, so that training
steps do not wait. Checkpoints store the sums of the steps since the last log, so that a resumed run
logs the same losses as an uninterrupted run.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.utils import reduce
from transformers import TrainerState, TrainingArguments

from utils.data.loader import Batch
from utils.host.collectives import gathered
from utils.model.loss_head import RouterTerm, balance_loss

# Keys of these values in a checkpoint.
UNLOGGED_BY_SOURCE, UNLOGGED_BALANCE = "unlogged_source_losses", "unlogged_aux_loss"

logger = logging.getLogger(__name__)


def rank_share(sums: list[float], args: TrainingArguments) -> float:
    """Return this rank's loss sum from a checkpoint's `sums`, which has one sum for each rank.

    If the number of ranks has changed since the save, return the mean of the sums.
    """
    same = len(sums) == args.world_size
    return sums[args.process_index] if same else sum(sums) / len(sums)


class SourceLosses:
    """Sums of losses by source of a data mixture. They give the metrics `loss/NAME`.

    `loss/NAME` is the mean loss per token of the source NAME since the last training log. Apart
    from rounding, the mean does not depend on the number of ranks or the micro-batch size.
    """

    def __init__(self, names: Sequence[str], args: TrainingArguments):
        self.names, self.args = names, args
        shape = 2, len(names)  # sums of losses, numbers of loss tokens
        self.totals = torch.zeros(shape, dtype=torch.float64, device=args.device)

    def add(self, outputs: Any) -> None:
        """Add a micro-batch's loss sums and loss tokens, from its LossOutput (`outputs`)."""
        self.totals += outputs.by_source

    def state(self) -> dict[str, Any]:
        """Return {"unlogged_source_losses": a list with one dict per rank} for a checkpoint.

        A rank's dict is {source: [loss sum, loss tokens]}. All ranks must call this.
        """
        own = dict(zip(self.names, self.totals.T.tolist(), strict=True))
        return {UNLOGGED_BY_SOURCE: gathered(own)}

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore this rank's loss sums.

        If the number of ranks has changed, rank 0 restores the sums of all ranks.
        """
        by_rank = saved.get(UNLOGGED_BY_SOURCE, [])
        same = len(by_rank) == self.args.world_size
        for rank, sums in enumerate(by_rank):
            if self.args.process_index == (rank if same else 0):
                # Look sums up by name: the resumed run may have other sources.
                own = [sums.get(name, (0.0, 0.0)) for name in self.names]
                self.totals += torch.tensor(own, dtype=torch.float64).T.to(self.totals.device)

    def metrics(self) -> dict[str, float]:
        """Return {"loss/NAME": mean loss since the last log}. All ranks must call this.

        Sources without a loss token since the last log are left out.
        """
        sums = reduce(self.totals, reduction="sum").tolist()
        self.totals.zero_()
        each = zip(self.names, *sums, strict=True)
        return {f"loss/{name}": loss / count for name, loss, count in each if count}


class ExpertBalance:
    """The load-balancing loss of experts in each global batch, and its metric `aux_loss`.

    The loss depends on how many tokens of the global batch each expert gets. If a step has several
    micro-batches, a forward pass without gradients first counts these tokens. The metric is the
    mean loss since the last log. Like TRL's metric, it does not include the loss's coefficient.
    """

    def __init__(self, term: RouterTerm, args: TrainingArguments, context_parallel: int = 1):
        self.term, self.args, self.context_parallel = term, args, context_parallel
        self.tokens: torch.Tensor | None = None  # in the global batch
        self.counted: torch.Tensor | None = None  # assignments of the global batch, if counted
        self.total: torch.Tensor | float = 0.0  # this rank's sum since the last log
        self.steps = 0

    def state(self) -> dict[str, Any]:
        """Return {"unlogged_aux_loss": [loss sums, steps]}, or {} if all steps are logged.

        The loss sums are a list with the sum of each rank, over the steps since the last log. All
        ranks must call this.
        """
        return {UNLOGGED_BALANCE: [gathered(float(self.total)), self.steps]} if self.steps else {}

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore this rank's loss sum, and the number of steps from the last log to the save."""
        sums, self.steps = saved.get(UNLOGGED_BALANCE, ([0.0], 0))
        self.total = rank_share(sums, self.args)

    def begin_step(
        self, batches: Sequence[Batch], count_assignments: Callable[[Batch], torch.Tensor]
    ) -> None:
        """Count the tokens of a step's global batch. All ranks must call this.

        If the step has several micro-batches, also count the tokens that each expert gets.
        count_assignments: returns these counts for one micro-batch, (experts,)
        """
        self.steps += 1
        tokens = float(sum(batch["sequence_tokens"].sum() for batch in batches))
        tokens /= self.context_parallel  # this many ranks count the same micro-batch
        self.tokens = reduce(torch.full((), tokens, device=self.args.device), reduction="sum")
        self.counted = None
        if len(batches) > 1:
            own: Any = sum(count_assignments(batch) for batch in batches)
            self.counted = reduce(own, reduction="sum")

    def weighted(self, outputs: Any) -> torch.Tensor:
        """Return the load-balancing loss to add to a micro-batch's loss. All ranks must call this.

        The result includes the loss's coefficient. The result is multiplied by the number of ranks,
        because DDP averages gradients over ranks.
        """
        assert self.tokens is not None, "begin_step comes first"
        assignments = self.counted
        if assignments is None:
            assignments = reduce(outputs.assignments, reduction="sum")
        part = balance_loss(assignments, outputs.probabilities, self.tokens * outputs.layers)
        part = part * self.args.world_size
        self.total = self.total + part.detach()
        return self.term.coefficient * part

    def metrics(self) -> dict[str, float]:
        """Return {"aux_loss": mean since the last log}, or {} if no step followed this log.

        All ranks must call this.
        """
        if not self.steps:
            return {}
        sums, steps = gathered(float(self.total)), self.steps
        self.total, self.steps = 0.0, 0
        return {"aux_loss": sum(sums) / len(sums) / steps}


def mean_loss(state: TrainerState, unlogged: torch.Tensor) -> float:
    """Return the mean loss of all steps of the run, including steps before a resume.

    unlogged: this rank's loss sum over the steps since the last log. All ranks must call this.
    """
    total, counted = 0.0, 0.0
    for entry in state.log_history:
        if "loss" in entry:
            total += entry["loss"] * (entry["step"] - counted)
            counted = entry["step"]
    if state.global_step > counted:
        sums = gathered(unlogged.item())
        total += sum(sums) / len(sums)
    return total / max(state.global_step, 1)


class EvaluationTotals:
    """This rank's sums over a held-out split, on the device: loss, loss tokens, correct tokens."""

    def __init__(self, device: torch.device):
        self.totals = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, outputs: Any, following: torch.Tensor) -> None:
        """Add a micro-batch's loss sum, loss tokens and correct tokens.

        outputs: the micro-batch's LossOutput. following: for each token the next token's label,
        (B, T)
        """
        hits = outputs.get("hits")
        if hits is None:  # compute from all logits; argmax never equals -100
            hits = outputs["logits"].argmax(-1) == following
        own = outputs["loss"], following.ne(-100).sum(), hits.sum()
        self.totals += torch.stack([value.double() for value in own])

    def figures(self, prefix: str) -> dict[str, float]:
        """Return the split's PREFIX_loss, PREFIX_perplexity, PREFIX_accuracy and PREFIX_tokens.

        If the split has no loss tokens, loss, perplexity and accuracy are NaN. All ranks must call
        this.
        """
        loss_sum, tokens, hits = reduce(self.totals, reduction="sum").tolist()
        if not tokens:
            logger.warning("%s: not one loss token in the sequences evaluated: no loss", prefix)
        loss, accuracy = (total / tokens if tokens else math.nan for total in (loss_sum, hits))
        perplexity = math.inf if loss > 700 else math.exp(loss)  # float64 overflows at 709
        figures = {"loss": loss, "perplexity": perplexity, "accuracy": accuracy}
        figures["tokens"] = int(tokens)
        return {f"{prefix}_{name}": figure for name, figure in figures.items()}
