"""Finds steps whose loss, gradient or weights are not finite before anything of them is kept."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.state import GradientState
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from utils.callbacks.agreement import Agreement
from utils.callbacks.metrics import MetricCallback
from utils.callbacks.nonfinite_report import Finding, NonFiniteReport, write_report
from utils.callbacks.weights import spoilt_weights
from utils.cluster.decisions import gathered, on_rank_0
from utils.config.errors import NotFiniteError

logger = logging.getLogger(__name__)

# Under this name trainer_state.json carries how many steps of the run were skipped.
CARRIED = "nonfinite_steps"


@dataclass(frozen=True)
class _StepFigures:
    """Figures of a step of this rank on their way from the device; `step` counts from 0.

    values: float32 on the CPU, the losses of the micro-batches and then the gradient norm and the
    loss-bearing tokens of the global batch. Complete when `ready` has passed (None: already).
    """

    step: int
    values: torch.Tensor
    ready: torch.cuda.Event | None

    def arrived(self, wait: bool) -> bool:
        if self.ready is not None and wait:
            self.ready.synchronize()
        return self.ready is None or self.ready.query()


class NonFiniteGuard(MetricCallback):
    """Ends the run, or skips the step, when a loss or gradient of any rank is not finite.

    The trainer hands over each loss and gradient norm as it has them (`take_loss`, `take_step`),
    and asks before it evaluates, saves or ends whether all was finite so far (`settle`). With
    `on_nonfinite` stop the figures come from the device when they are ready, and the ranks agree a
    step later, so that no step waits; with skip every step waits before its optimizer step.

    nonfinite_steps          steps skipped so far, over all starts of the run (with skip)
    judges_gradients         False where a loss scaler (fp16) deals with gradients that overflow
    """

    def __init__(
        self, output_dir: str | os.PathLike[str], on_nonfinite: str = "stop", limit: int = 3
    ):
        self.output_dir = Path(output_dir)
        self.skips, self.limit = on_nonfinite == "skip", limit
        self.judges_gradients = True
        self.skipped_steps = 0
        self.skipping = False
        self.agreement: Agreement | None = None  # while training
        self.losses: list[torch.Tensor] = []  # of the step under way
        self.targets: torch.Tensor | None = None
        self.on_their_way: list[_StepFigures] = []
        self.findings: list[Finding] = []  # of this rank, not dealt with yet

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take over how many steps were skipped; collective over ranks."""
        super().on_train_begin(args, state, control, **kwargs)
        self.rank, self.loader = args.process_index, kwargs["train_dataloader"]
        kept: Any = state.stateful_callbacks  # a dict, whatever its annotation says
        self.skipped_steps = kept.get(CARRIED, 0)
        self.last_step = state.global_step - 1
        self.agreement = Agreement(args.ddp_timeout)
        if self.skips:
            logger.info(
                "on_nonfinite skip: every step waits for the device before its optimizer step; "
                "%d of at most %d steps skipped so far",
                self.skipped_steps,
                self.limit,
            )

    def take_loss(self, loss: torch.Tensor, targets: torch.Tensor | None) -> None:
        """Note a micro-batch's loss, and how many loss-bearing tokens the global batch has."""
        # A copy: a compiled model may use the memory of its output again.
        self.losses.append(loss.detach().float().clone())
        self.targets = targets

    def take_step(self, step: int, gradient_norm: torch.Tensor | float | None) -> None:
        """Note the gradient norm of a step (counted from 0), and send its figures on their way."""
        norm = gradient_norm if self.judges_gradients and gradient_norm is not None else 0.0
        if hasattr(norm, "full_tensor"):  # FSDP2's, summed up over ranks here, on the device
            norm = norm.full_tensor()
        targets = 1.0 if self.targets is None else self.targets
        others = [torch.as_tensor(value, device=self.device).float() for value in (norm, targets)]
        values = torch.stack([loss.reshape(()) for loss in (*self.losses, *others)])
        self.losses = []
        values = values.to("cpu", non_blocking=True)  # into pinned memory, where there is a GPU
        ready = None
        if self.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        self.on_their_way.append(_StepFigures(step, values, ready))

    @override
    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Act on what the ranks agreed on about earlier steps; it waits for no device."""
        if self.skips:
            return
        assert self.agreement is not None, "on_train_begin comes first"
        self._read(wait=False)
        alone = self.agreement.group is None
        agreed = bool(self.findings) if alone else self.agreement.result()
        if agreed:
            self._stop()
        if not alone:
            self.agreement.put_forward(int(bool(self.findings)))

    @override
    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """With skip: wait for the step's figures, and keep the optimizer from a spoilt gradient."""
        if not self.skips:
            return
        self._read(wait=True)
        if not self._agree_at_once():
            return
        report = self._report()
        if self.skipped_steps >= self.limit:
            raise NotFiniteError(report.limit_reached(self.limit))
        self.skipped_steps += 1
        kept: Any = state.stateful_callbacks
        kept[CARRIED] = self.skipped_steps
        self.findings = []
        if self.rank == 0:
            logger.warning("%s", report.skipped(self.skipped_steps, self.limit))
        # Accelerate's optimizer does nothing where gradients are not to be synchronised; to take
        # them away would not do: optimizers count steps and parameters without gradients too.
        self.skipping = True
        GradientState()._set_sync_gradients(False)

    @override
    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let the optimizer step again."""
        if self.skipping:
            self.skipping = False
            GradientState()._set_sync_gradients(True)

    def settle(self, model: nn.Module | None = None) -> None:
        """Know of every step so far, and of the model's weights, whether all was finite.

        Collective over ranks; waits for the device. Raises NotFiniteError on all ranks.
        """
        if self.agreement is None:
            return  # training is over, and was settled
        self._read(wait=True)
        weights = [] if model is None else spoilt_weights(model)
        if weights and not self.findings:
            self.findings.append(Finding(self.rank, self.last_step, weights=tuple(weights)))
        if self._agree_at_once():
            self._stop()

    def _read(self, wait: bool) -> None:
        """Judge the figures that have arrived, in the order of the steps."""
        while self.on_their_way and self.on_their_way[0].arrived(wait):
            figures = self.on_their_way.pop(0)
            self.last_step = figures.step
            *losses, norm, targets = figures.values.tolist()
            finding = Finding.of_step(self.rank, figures.step, losses, norm)
            if finding is not None:
                self.findings.append(finding)
            if targets == 0 and self.rank == 0:
                logger.warning(
                    "step %d: the global batch has no loss-bearing token, so its loss and gradient "
                    "are 0; a larger global_batch_size makes that rarer",
                    figures.step + 1,
                )

    def _agree_at_once(self) -> bool:
        assert self.agreement is not None, "on_train_begin comes first"
        # The turn that a step began is read first; without one `result` says what this rank said.
        agreed = self.agreement.result() if self.agreement.pending is not None else 0
        self.agreement.put_forward(int(bool(self.findings)))
        return bool(max(agreed, self.agreement.result()))

    def _stop(self) -> None:
        self._read(wait=True)
        raise NotFiniteError(self._report().stopped())

    def _report(self) -> NonFiniteReport:
        """Bring the ranks' findings together, and let rank 0 write what is to be known of them."""
        assert self.agreement is not None, "on_train_begin comes first"
        group = self.agreement.group
        found = [one for own in gathered(self.findings, group) for one in own]
        return on_rank_0(lambda: write_report(found, self.loader, self.output_dir), group)

    def metrics(self) -> dict[str, float]:
        """Return how many steps of the run were skipped."""
        return {"nonfinite_steps": self.skipped_steps} if self.skips or self.skipped_steps else {}

    @override
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Give the group up; collective over ranks."""
        if self.agreement is not None:
            self.agreement.close()
            self.agreement = None


def guard_among(callbacks: list[TrainerCallback]) -> NonFiniteGuard:
    """Return the guard among a trainer's callbacks."""
    return next(callback for callback in callbacks if isinstance(callback, NonFiniteGuard))
