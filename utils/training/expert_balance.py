"""The load-balancing loss of experts over each global batch, whatever micro-batches it comes in."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from utils.callbacks.metrics import MetricCallback
from utils.callbacks.resume_state import carried_state
from utils.data.sequences import Batch
from utils.model.router_loss import RouterTerm, balance_loss

CARRIED = "unlogged_aux_loss"


class ExpertBalance(MetricCallback):
    """Adds the term to each micro-batch's loss, and logs its mean over steps as `aux_loss`.

    The term needs the assignments of the whole global batch. In one micro-batch a rank they are
    added up over ranks as the loss is computed; with more of them a pass without gradients counts
    them first. `aux_loss` is before its coefficient, as TRL logs it. Waits for no device but in a
    log. Steps that were not logged yet are carried by the checkpoint.
    """

    def __init__(self, term: RouterTerm, accelerator: Accelerator):
        self.term, self.accelerator = term, accelerator
        self.tokens: torch.Tensor | None = None  # of the global batch
        self.counted: torch.Tensor | None = None  # its assignments
        self.total: torch.Tensor | float = 0.0  # this rank's parts, of steps not logged yet
        self.steps = 0

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take over what was not logged before."""
        super().on_train_begin(args, state, control, **kwargs)
        sums, self.steps = carried_state(state).get(CARRIED, ([0.0], 0))
        same_ranks = len(sums) == args.world_size
        self.total = sums[args.process_index] if same_ranks else sum(sums) / len(sums)

    def begin_step(self, batches: Sequence[Batch], count: Callable[[Batch], Any]) -> None:
        """Prepare a step of these micro-batches, each of which `count` runs; collective."""
        self.steps += 1
        tokens = float(sum(batch["row_tokens"].sum() for batch in batches))
        self.tokens = self._over_ranks(torch.full((), tokens, device=self.device))
        self.counted = None
        if len(batches) > 1:
            self.counted = self._over_ranks(sum(count(batch).assignments for batch in batches))

    def weighted(self, made: Any) -> torch.Tensor:
        """Return a part of the term from a RoutedOutput, times the ranks: DDP takes their mean."""
        assert self.tokens is not None, "begin_step comes first"
        assignments = self._over_ranks(made.assignments) if self.counted is None else self.counted
        part = balance_loss(assignments, made.probabilities, self.tokens * made.layers)
        part = part * self.accelerator.num_processes
        self.total = self.total + part.detach()
        return self.term.coefficient * part

    def _over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(values, reduction="sum")

    def _by_rank(self) -> list[float]:
        own = torch.as_tensor(self.total, dtype=torch.float32, device=self.device)
        sums: torch.Tensor = self.accelerator.gather(own.reshape(1))
        return sums.tolist()

    @override
    def metrics(self) -> dict[str, float]:
        """Return the mean of the term since the last log."""
        if not self.steps:
            return {}
        sums = self._by_rank()
        mean = sum(sums) / len(sums) / self.steps
        self.total, self.steps = 0.0, 0
        return {"aux_loss": mean}

    @override
    def carried(self) -> dict[str, Any]:
        """Return each rank's sum over the steps that were not logged, and their number."""
        return {CARRIED: [self._by_rank(), self.steps]} if self.steps else {}
