"""The load-balancing loss of experts over each global batch, whatever micro-batches it comes in."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from utils.callbacks.metrics import MetricCallback
from utils.data.loader import Batch
from utils.model.loss_head import RouterTerm, balance_loss
from utils.support.collectives import gathered
from utils.training.resume_state import rank_share

if TYPE_CHECKING:
    from utils.training.trainer import PackedTrainer

KEY = "unlogged_aux_loss"  # in each checkpoint


class ExpertBalance(MetricCallback):
    """Adds the term to each micro-batch's loss, and logs its mean over steps as `aux_loss`.

    The term needs the assignments of the whole global batch: with several micro-batches a step, a
    pass without gradients counts them first. `aux_loss` is before its coefficient, as TRL logs it.
    Only a log waits for the device. Checkpoints hold the steps that were not logged yet.
    """

    def __init__(self, term: RouterTerm, trainer: "PackedTrainer"):
        self.term, self.trainer, self.accelerator = term, trainer, trainer.accelerator
        self.tokens: torch.Tensor | None = None  # of the global batch
        self.counted: torch.Tensor | None = None  # its assignments
        self.total: torch.Tensor | float = 0.0  # this rank's parts, of steps not logged yet
        self.steps = 0

    def resume_from(self, saved: dict[str, Any]) -> None:
        """Take over what was not logged before."""
        sums, self.steps = saved.get(KEY, ([0.0], 0))
        self.total = rank_share(sums, self.trainer.args)

    def resume_state(self) -> dict[str, Any]:
        """Return each rank's sum over the steps that were not logged, and their number."""
        return {KEY: [gathered(float(self.total)), self.steps]} if self.steps else {}

    def begin_step(self, batches: Sequence[Batch]) -> None:
        """Prepare a step of these micro-batches; collective over ranks."""
        self.steps += 1
        tokens = float(sum(batch["sequence_tokens"].sum() for batch in batches))
        self.tokens = self._over_ranks(torch.full((), tokens, device=self.accelerator.device))
        several = len(batches) > 1
        self.counted = self._over_ranks(sum(map(self._assignments, batches))) if several else None

    def _assignments(self, batch: Batch) -> Any:
        model: Any = self.trainer.model_wrapped
        model.train()  # as it routes when it trains
        with torch.no_grad(), self.trainer.compute_loss_context_manager():
            prepared = self.trainer._prepare_inputs(batch)
            return model(**prepared, use_cache=False, count_only=True).assignments

    def weighted(self, made: Any) -> torch.Tensor:
        """Return a part of the term from a LossOutput, times the ranks: DDP takes their mean."""
        assert self.tokens is not None, "begin_step comes first"
        assignments = self._over_ranks(made.assignments) if self.counted is None else self.counted
        part = balance_loss(assignments, made.probabilities, self.tokens * made.layers)
        part = part * self.accelerator.num_processes
        self.total = self.total + part.detach()
        return self.term.coefficient * part

    def _over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(values, reduction="sum")

    @override
    def metrics(self) -> dict[str, float]:
        """Return the mean of the term since the last log."""
        if not self.steps:
            return {}
        sums, steps = gathered(float(self.total)), self.steps
        self.total, self.steps = 0.0, 0
        return {"aux_loss": sum(sums) / len(sums) / steps}
