"""Shows the guard every loss and gradient, and asks it before anything is kept of them."""

from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import nn
from transformers import Trainer
from typing_extensions import override

from utils.callbacks.nonfinite import NonFiniteGuard

# Where each rank has all gradients as plain tensors.
WHOLE_GRADIENTS = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


class FiniteTrainerMixin(Trainer):
    """Keeps, evaluates and exports no weights of a step that was not finite.

    Put before what writes checkpoints; `NonFiniteGuard` is among the callbacks.
    tests/integration/test_hooks.py holds the contract of the hooks.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.guard = next(
            callback
            for callback in self.callback_handler.callbacks
            if isinstance(callback, NonFiniteGuard)
        )
        # A loss scaler tries whether gradients overflow, and leaves those steps out itself.
        self.guard.judges_gradients = self.accelerator.mixed_precision != "fp16"

    @override
    def _get_grad_norm(
        self, model: nn.Module, grad_norm: torch.Tensor | float | None = None
    ) -> torch.Tensor | float | None:
        """Return the norm of the step's gradient; the step's figures are complete with it."""
        if grad_norm is None and self.accelerator.distributed_type in WHOLE_GRADIENTS:
            self.accelerator.unscale_gradients()
            grad_norm = gradient_norm(model)
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self.guard.take_step(self.state.global_step, norm)
        return norm

    @override
    def _run_epoch(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Train; what is exported after it is finite."""
        super()._run_epoch(model, *args, **kwargs)
        self.guard.settle(model)

    @override
    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate after finite steps alone: it may take long."""
        self.guard.settle()
        return super()._evaluate(*args, **kwargs)

    @override
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save weights that are finite after finite steps alone; collective over ranks."""
        self.guard.settle(model)
        super()._save_checkpoint(model, trial)


def gradient_norm(model: nn.Module) -> torch.Tensor:
    """Return the norm of all gradients, on their device, and leave them as they are.

    For `max_grad_norm: 0`: Trainer clips to infinity then, which multiplies every gradient by one.
    """
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)
