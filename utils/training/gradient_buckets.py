"""Gradients lie in the buckets that DDP reduces, grouped alike in resumed and uninterrupted runs.

DDP groups gradients into buckets and groups them anew after the first backward pass, in the order
in which they became ready (`Reducer::rebuild_buckets` in torch/csrc/distributed/c10d/reducer.cpp).
With three ranks or more a ring adds each part of a bucket in an order of its own, so other buckets
mean other rounding: the first step after a resume would differ in its last bits from the same step
of an uninterrupted run. One backward pass before the first step puts that behind both.
"""

from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from utils.data.order import PADDING_ROW

if TYPE_CHECKING:
    from utils.training.packed_trainer import PackedTrainerMixin


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
        padding = [PADDING_ROW] * args.per_device_train_batch_size
        batch = self.trainer._prepare_inputs(self.trainer.train_rows.__getitems__(padding))
        model.train()
        devices = [args.device] if args.device.type == "cuda" else []
        with torch.random.fork_rng(devices), self.trainer.compute_loss_context_manager():
            loss = model(**batch, use_cache=False, num_items_in_batch=1)["loss"]
            self.trainer.accelerator.backward(loss)
        model.zero_grad()
