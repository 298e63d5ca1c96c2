"""Shows the guard every loss and gradient, and asks it before anything is kept of them."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from utils.callbacks.nonfinite import NonFiniteGuard
from utils.config.errors import ConfigurationError
from utils.data.order import PADDING_SEQUENCE
from utils.model.stages import OPTIMIZER
from utils.training.low_precision_adam import FIRST_SCALES, LowPrecisionAdamW

if TYPE_CHECKING:
    from utils.training.trainer import PackedTrainerMixin


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


# Gradients lie in the buckets that DDP reduces, grouped alike in resumed and uninterrupted runs.


def keep_gradients_in_buckets(accelerator: Accelerator) -> None:
    """Let DDP's gradients be views of its buckets: they are not copied there and back.

    With accumulation the first micro-batches' gradients lie beside the buckets until the last one.
    """
    if accelerator.ddp_handler is not None:
        accelerator.ddp_handler.gradient_as_bucket_view = True


class GradientBuckets(TrainerCallback):
    """Take one micro-batch of padding forward and back before the first step, under DDP alone.

    Its gradients are zero and dropped, and the random state is put back, so no number changes. It
    also shows within the first seconds whether a micro-batch fits into memory.
    """

    def __init__(self, trainer: "PackedTrainerMixin"):
        self.trainer = trainer

    @override
    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Settle the buckets; the first forward pass of training lays them out."""
        model = self.trainer.model_wrapped
        if not isinstance(model, DistributedDataParallel):
            return
        padding = [PADDING_SEQUENCE] * args.per_device_train_batch_size
        batch = self.trainer._prepare_inputs(self.trainer.train_rows.__getitems__(padding))
        model.train()
        devices = [args.device] if args.device.type == "cuda" else []
        with torch.random.fork_rng(devices), self.trainer.compute_loss_context_manager():
            loss = model(**batch, use_cache=False, num_items_in_batch=1)["loss"]
            self.trainer.accelerator.backward(loss)
        model.zero_grad()


# Gives a new run the optimizer's state of an earlier stage, under its own schedule.

logger = logging.getLogger(__name__)

SHOWN_PROBLEMS = 5


class InheritedOptimizer(TrainerCallback):
    """Loads moments and step counts before the first step.

    Learning rate, weight decay and the like are this run's: what a checkpoint keeps of them would
    undo the new schedule. `directory` is a checkpoint whose optimizer.pt was looked at, see
    utils/checkpoints/pickles.py.
    """

    def __init__(self, directory: Path):
        self.path = directory / OPTIMIZER

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        optimizer = kwargs["optimizer"]
        saved = torch.load(self.path, map_location="cpu", weights_only=True)
        fresh = optimizer.state_dict()
        problems = _misfits(saved, fresh, optimizer)
        if problems:
            raise ConfigurationError(
                [f"init_optimizer: {self.path}: {problem}" for problem in problems[:SHOWN_PROBLEMS]]
            )
        optimizer.load_state_dict({**fresh, "state": saved["state"]})
        steps = {float(values["step"]) for values in saved["state"].values() if "step" in values}
        after = f" after {max(steps):,.0f} steps" if steps else ""
        logger.info(
            "optimizer: the state of %d tensors%s from %s, under this run's own schedule",
            len(saved["state"]),
            after,
            self.path,
        )


def _misfits(saved: dict[str, Any], fresh: dict[str, Any], optimizer: Any) -> list[str]:
    """Return why the saved state is no state of this optimizer and its parameters."""
    sizes = [[len(group["params"]) for group in each["param_groups"]] for each in (saved, fresh)]
    if sizes[0] != sizes[1]:
        return [f"it is of groups of {sizes[0]} tensors, this run trains groups of {sizes[1]}."]
    keys = [set(each["param_groups"][0]) - {"initial_lr"} for each in (saved, fresh)]
    if keys[0] != keys[1]:
        other = ", ".join(sorted(keys[0] ^ keys[1]))
        return [f"it is of another kind of optimizer (they differ in {other}): set the same optim."]
    torchs_own = not isinstance(getattr(optimizer, "optimizer", optimizer), LowPrecisionAdamW)
    if torchs_own and any(FIRST_SCALES in values for values in saved["state"].values()):
        return ["it keeps Adam's moments in 8 bits: set optim_states, which reads them."]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        f"{key} of tensor {index} has shape {tuple(value.shape)}, the tensor has "
        f"{tuple(parameter.shape)}: the architectures differ."
        for index, parameter in enumerate(parameters)
        for key, value in saved["state"].get(index, {}).items()
        if isinstance(value, torch.Tensor)
        and value.dim() == parameter.dim()
        and value.shape != parameter.shape
    ]
