"""What a run will need on each device, from sizes alone: no weight is loaded."""

from dataclasses import dataclass

import torch
from peft import get_peft_model
from transformers import PreTrainedConfig
from trl import get_peft_config

from utils.cluster.launch import LaunchFacts
from utils.config.arguments import ModelArguments
from utils.config.run_settings import RunSettings
from utils.kernels.linear_cross_entropy import working_bytes
from utils.kernels.loss_head import LossHeadChoice
from utils.kernels.probe_model import causal_lm_class
from utils.planning.models import weights_dtype
from utils.planning.optimizer_states import optimizer_bytes_per_parameter

GIB = 2**30
# Stored per layer, token and hidden unit at 16 bits, attention scores recomputed (Korthikanti et
# al. 2022, "Reducing Activation Recomputation", arXiv 2205.05198, section 4.1).
ACTIVATION_BYTES_16_BIT = 34
CHECKPOINT_BYTES_16_BIT = 2  # with recomputation only each layer's input stays
SHARDED_BY = {
    "weights": ("fsdp1", "fsdp2", "zero3"),
    "gradients": ("fsdp1", "fsdp2", "zero2", "zero3"),
    "optimizer": ("fsdp1", "fsdp2", "zero1", "zero2", "zero3"),
}


@dataclass(frozen=True)
class MemoryEstimate:
    """GiB on each device, and the parameters they come from."""

    parameters: int
    trainable: int
    weights_gib: float
    gradients_gib: float
    optimizer_gib: float
    activations_gib: float
    loss_gib: float

    def __str__(self) -> str:
        total = (
            self.weights_gib
            + self.gradients_gib
            + self.optimizer_gib
            + self.activations_gib
            + self.loss_gib
        )
        trainable = "" if self.trainable == self.parameters else f", {self.trainable:,} trained"
        return (
            f"{self.parameters:,} parameters{trainable}; about {total:.2f} GiB a device = weights "
            f"{self.weights_gib:.2f} + gradients {self.gradients_gib:.2f} + AdamW "
            f"{self.optimizer_gib:.2f} + activations {self.activations_gib:.2f} + loss "
            f"{self.loss_gib:.2f}"
        )


def estimate_memory(
    settings: RunSettings,
    config: PreTrainedConfig,
    launch: LaunchFacts,
    loss_head: LossHeadChoice,
) -> MemoryEstimate:
    """Estimate the memory of one device; a rule of thumb, the memory callback measures.

    The launch's strategy says what is sharded over the ranks. Activations follow the formula for a
    dense transformer. All logits count in float32 with their gradient and once more in the
    precision of the matrix product; with the fused head a part of them and the last layer's
    gradient do.
    """
    parameters, trainable = count_parameters(settings.model, config)
    weights = weights_dtype(settings.model, config)
    weight_bytes = weights.itemsize
    state_bytes = optimizer_bytes_per_parameter(settings.run.optim_states, weights)
    training = settings.training
    micro_batch_tokens = training.per_device_train_batch_size * settings.data.sequence_length
    shards = {
        kind: launch.world_size if launch.strategy in strategies else 1
        for kind, strategies in SHARDED_BY.items()
    }
    text = config.get_text_config()
    compute_bytes = 4 if training.mixed_precision == "no" and weight_bytes == 4 else 2
    if loss_head.name == "fused":
        loss_bytes = working_bytes(
            micro_batch_tokens, text.vocab_size, text.hidden_size, launch.device, compute_bytes
        )
    else:
        loss_bytes = micro_batch_tokens * text.vocab_size * (8 + compute_bytes)
    recompute = training.gradient_checkpointing  # both of its names, old and new, in transformers 5
    stored = CHECKPOINT_BYTES_16_BIT if recompute else ACTIVATION_BYTES_16_BIT
    layer_bytes = micro_batch_tokens * text.hidden_size * stored * compute_bytes / 2
    return MemoryEstimate(
        parameters=parameters,
        trainable=trainable,
        weights_gib=parameters * weight_bytes / shards["weights"] / GIB,
        gradients_gib=trainable * weight_bytes / shards["gradients"] / GIB,
        optimizer_gib=trainable * state_bytes / shards["optimizer"] / GIB,
        activations_gib=layer_bytes * text.num_hidden_layers / GIB,
        loss_gib=loss_bytes / GIB,
    )


def checkpoint_bytes(settings: RunSettings, config: PreTrainedConfig, launch: LaunchFacts) -> int:
    """Return about what one checkpoint takes on disk, over all ranks: weights and AdamW's states.

    With adapters only they are saved. DeepSpeed keeps the weights once more in its own shards, and
    in mixed precision float32 masters and states of all that is trained, 12 bytes a parameter
    (Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054, section 3.1).
    """
    parameters, trainable = count_parameters(settings.model, config)
    kept = trainable if settings.model.use_peft else parameters
    dtype = weights_dtype(settings.model, config)
    weight_bytes = dtype.itemsize
    state_bytes = optimizer_bytes_per_parameter(settings.run.optim_states, dtype)
    weights, optimizer = kept * weight_bytes, round(trainable * state_bytes)
    training = settings.training
    if launch.strategy.startswith("zero"):
        mixed = training.mixed_precision != "no"
        weights += kept * (2 if mixed else weight_bytes)
        optimizer = trainable * (12 if mixed else 2 * weight_bytes)
    if training.save_only_model or training.save_strategy == "no":  # then final/ is all there is
        return weights
    return weights + optimizer


def count_parameters(model: ModelArguments, config: PreTrainedConfig) -> tuple[int, int]:
    """Return (all, trained) parameters, counted on the meta device."""
    with torch.device("meta"):
        # The class itself: from_config would split the weights over the ranks under ZeRO-3.
        built: torch.nn.Module = causal_lm_class(config)(config)
        adapters = get_peft_config(model)
        if adapters is not None:
            built = get_peft_model(built, adapters)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in built.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)
