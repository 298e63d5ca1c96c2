"""Estimates of the memory that a run needs on each device and on disk. No weights are loaded."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from utils.config.arguments import MUON, ModelArguments
from utils.model.adapters import trained_bytes, trained_matrices, with_adapters
from utils.model.architecture import MODEL_ERRORS, causal_lm_class
from utils.plan.memory_trace import Setup, StepPart, trace

GIB = 2**30
# Bytes per parameter of one of Adam's moments. int8 adds a float32 scale for every 256 values.
BYTES_A_STATE = {"float32": 4.0, "bfloat16": 2.0, "int8": 1 + 4 / 256}
# cuBLAS's workspaces on Hopper: one for the thread of the forward pass, one for the backward pass.
WORKSPACE_BYTES = 2 * 32 * 2**20
SHARDED_BY = {
    "weights": ("fsdp1", "fsdp2", "zero3"),
    "gradients": ("fsdp1", "fsdp2", "zero2", "zero3"),
    "optimizer": ("fsdp1", "fsdp2", "zero1", "zero2", "zero3"),
}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on each device at the peak of a step.

    activations: all tensors except this rank's weights, gradients and optimizer states, such as
    layers' inputs for the backward pass, logits, and weights gathered from other ranks. counted:
    False if the activations could not be counted. fault: a warning, or "".
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    counted: bool
    fault: str = ""

    @property
    def total(self) -> int:
        """The sum of weights, gradients, optimizer states and activations, in bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations

    def __str__(self) -> str:
        names = ("weights", "gradients", "optimizer", "activations")
        parts = [f"{name} {getattr(self, name) / GIB:.2f}" for name in names if getattr(self, name)]
        bound = "at most" if self.counted else "over"
        return f"{bound} {self.total / GIB:.2f} GiB a device = {' + '.join(parts)}"


def estimate_memory(setup: Setup, choice: str, micro_batch: int | None = None) -> MemoryEstimate:
    """Estimate the memory of one training device.

    choice: the mode of activation checkpointing. micro_batch: sequences per forward pass, by
    default the number in the settings. The settings, not `micro_batch`, decide whether gradients
    accumulate. If the model cannot run on fake tensors, activations are left out.
    """
    settings, launch, dtype = setup.settings, setup.launch, setup.dtype
    (parameters, trained), quantized = setup.parameters, setup.quantized
    size, gradients = dtype.itemsize, trained_bytes(settings.model, setup.config, dtype, trained)
    states = _optimizer_bytes(setup, gradients)
    if launch.strategy.startswith("zero") and setup.autocast is not None:
        size, gradients = 2, 2 * trained  # DeepSpeed computes with half precision
    weights = (parameters - trained) * size + gradients
    shards = {
        kind: launch.shards if launch.strategy in strategies else 1
        for kind, strategies in SHARDED_BY.items()
    }
    gradients //= shards["gradients"]
    accumulates = settings.run.global_batch_size > setup.micro_batch * setup.data_ranks
    ddp = launch.strategy == "ddp"
    # DDP keeps the gradients in its buckets from the first step on.
    accumulated = gradients if accumulates or ddp else 0
    peak = peak_gradients = gradients  # during the optimizer step
    gathered_weights, counted, fault = 0, False, ""
    try:
        parts, gathered_weights, fault = trace(setup, choice, micro_batch or setup.micro_batch)
        # FSDP2 adds a layer's gradients over the ranks in float32 (utils/launch/processes.py).
        ratio = 0.0
        if launch.strategy == "fsdp2" and launch.world_size > 1:
            ratio = 4 / setup.computed_dtype.itemsize if setup.autocast else 1.0
        found = step_peak(parts, shards["gradients"], accumulated=accumulated, buffer_ratio=ratio)
        peak, peak_gradients = max((peak, peak_gradients), found)
        counted = True
    except MODEL_ERRORS as error:
        fault = (
            f"memory: {type(setup.config).__name__} does not run without data "
            f"({type(error).__name__}: {error!s:.200}), so activations are not counted"
        )
    activations = peak - peak_gradients
    if shards["weights"] > 1:
        activations += gathered_weights
    if launch.device == "cuda" or setup.elsewhere:
        activations += WORKSPACE_BYTES
    if ddp and accumulates:
        peak_gradients += gradients  # DDP's buckets and the accumulated gradients
    if quantized is not None:
        # At the peak, one layer's weights are dequantized. Assume the largest layer.
        activations += quantized.largest * dtype.itemsize
        weights -= quantized.bytes_saved(settings.model, dtype)
    weights, states = weights // shards["weights"], states // shards["optimizer"]
    return MemoryEstimate(weights, peak_gradients, states, activations, counted, fault)


def step_peak(
    parts: list[StepPart], shards: int, *, accumulated: int, buffer_ratio: float = 0.0
) -> tuple[int, int]:
    """Return the peak bytes of a step, and the bytes of gradients at this peak.

    Weights and optimizer states are not counted. parts: the parts of a step. shards: number of
    ranks over which gradients are sharded. A rank keeps its shard of a layer's gradients after
    the layer's backward pass. accumulated: bytes of gradients from earlier micro-batches, to which
    the new gradients are added. buffer_ratio: bytes of the communication buffer per byte of a
    layer's gradients. A layer's buffer lives until the next layer's buffer is allocated. The last
    buffer is for weights outside the layers.
    """
    live = peak = gradients = peak_gradients = accumulated
    buffer = 0
    for part in parts:
        if live + buffer + part.peak > peak:
            peak, peak_gradients = live + buffer + part.peak, gradients
        kept = 0 if accumulated else part.gradients // shards
        live += part.live - part.gradients + kept
        gradients += kept
        if part.gradients:
            buffer = int(part.gradients * buffer_ratio)
    if not buffer_ratio:
        return peak, peak_gradients
    at_end = live + int(max(live - gradients, 0) * buffer_ratio)
    return max((peak, peak_gradients), (at_end, gradients))


def optimizer_bytes_per_parameter(optim_states: str | None, trained_size: float) -> float:
    """Return the bytes of AdamW's two moments per trained parameter.

    optim_states: the type of the moments. None means the parameter's own type, which has
    `trained_size` bytes.
    """
    return 2 * (BYTES_A_STATE[optim_states] if optim_states else trained_size)


def _optimizer_bytes(setup: Setup, weight_bytes: int) -> int:
    """Return the bytes of optimizer states and averaged weights (EMA), summed over all ranks.

    Unknown optimizers count as AdamW. weight_bytes: bytes of the trained weights.
    """
    settings, count = setup.settings, setup.parameters[1]
    averages = 0 if settings.run.ema_decay is None else 4 * count
    if setup.launch.strategy.startswith("zero") and setup.autocast is not None:
        return 12 * count  # float32 masters, two states ("ZeRO", arXiv 1910.02054, section 3.1)
    name = str(getattr(settings.training.optim, "value", settings.training.optim))
    if name in ("sgd", "adafactor", "lomo", "adalomo") or not count:
        return averages
    adamw = optimizer_bytes_per_parameter(settings.run.optim_states, weight_bytes / count)
    two_states = 2 if "8bit" in name else adamw
    if name == MUON:  # one state instead of two for its matrices
        matrices = trained_matrices(_build_on_meta(settings.model, setup.config))
        saved = sum(each.numel() for each in matrices) / 2
        return averages + round((count - saved) * adamw)
    has_one_state = "lion" in name or name in ("adagrad", "rmsprop")
    return averages + round(count * (two_states / 2 if has_one_state else two_states))


def checkpoint_bytes(setup: Setup) -> int:
    """Return the approximate bytes of a checkpoint on disk: weights and states of all ranks.

    LoRA saves only the adapters. DeepSpeed saves a second copy of the weights. In mixed precision
    this copy has 2 bytes per weight.
    """
    model, dtype = setup.settings.model, setup.dtype
    parameters, trained = setup.parameters
    trained_size = trained_bytes(model, setup.config, dtype, trained)
    saved = trained if model.use_peft else parameters
    weights = trained_size if model.use_peft else parameters * dtype.itemsize
    if setup.launch.strategy.startswith("zero"):
        weights += saved * (dtype.itemsize if setup.autocast is None else 2)
    if setup.settings.training.save_strategy == "no":  # final/ alone
        return weights
    return weights + _optimizer_bytes(setup, trained_size)


def count_parameters(model: ModelArguments, config: PreTrainedConfig) -> tuple[int, int]:
    """Return the number of parameters and the number of trained parameters. No weights load."""
    meta_model = _build_on_meta(model, config)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in meta_model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def _build_on_meta(model: ModelArguments, config: PreTrainedConfig) -> torch.nn.Module:
    with torch.device("meta"):
        # Call the class: AutoModel.from_config would split the weights over the ranks under ZeRO-3.
        return with_adapters(causal_lm_class(config)(config), model)
