"""What a run needs on each device: weights, gradients, optimizer states and activations.

No weight is loaded. What a micro-batch takes is counted on the model itself (memory_trace.py).
"""

import logging
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from utils.config.arguments import ModelArguments
from utils.config.errors import ConfigurationError
from utils.config.precision import BY_LAUNCH, FAST_BF16, NODE_UNKNOWN
from utils.config.settings import RunSettings
from utils.kernels.linear_cross_entropy import working_bytes
from utils.launch.processes import LaunchFacts
from utils.model.adapters import with_adapters
from utils.model.architecture import MISFITS, causal_lm_class
from utils.model.weights import weights_dtype
from utils.planning.memory_trace import Phases, Workload, most_alive, trace

logger = logging.getLogger(__name__)

GIB = 2**30
STRATEGIES = ("single", "ddp", "fsdp2")  # whole weights, or shards of rows
# Two codes and, for each block of up to 256 of them, two float32 scales.
BYTES_A_STATE = {"float32": 4.0, "bfloat16": 2.0, "int8": 1 + 4 / 256}
# Without a trace: stored per layer, token and hidden unit at 16 bits, attention scores recomputed
# (Korthikanti et al. 2022, "Reducing Activation Recomputation", arXiv 2205.05198, section 4.1). Of
# these 34 bytes products and attention give 22; with full recomputation each layer's input stays.
FORMULA_16_BIT = {"none": 34, "selective": 22, "full": 2}
# cuBLAS's workspaces on Hopper, of a quarter of that elsewhere: one for the forward pass's thread,
# one for the backward pass's.
WORKSPACE_BYTES = 2 * 32 * 2**20
SHARDED_BY = {
    "weights": ("fsdp1", "fsdp2", "zero3"),
    "gradients": ("fsdp1", "fsdp2", "zero2", "zero3"),
    "optimizer": ("fsdp1", "fsdp2", "zero1", "zero2", "zero3"),
}


@dataclass(frozen=True)
class OptimizerStates:
    """What the moments are kept as, and whether weights are rounded up or down at random."""

    kept_as: str
    stochastic_rounding: bool

    def __str__(self) -> str:
        rounded = ", weights rounded stochastically" if self.stochastic_rounding else ""
        return f"Adam's states in {self.kept_as}{rounded}"


def choose_optimizer_states(
    settings: RunSettings, config: PreTrainedConfig, launch: LaunchFacts
) -> OptimizerStates | None:
    """Return what our own optimizer is to keep; None where torch's does the same.

    Raises ConfigurationError where it does not go with the strategy or the weights.
    """
    run = settings.run
    weights = weights_dtype(settings.model, config)
    trained = torch.float32 if settings.model.use_peft else weights  # PEFT's adapters
    own = str(trained).removeprefix("torch.")
    if run.optim_states in (None, own) and not run.stochastic_rounding:
        return None
    asked = settings.values.shown("optim_states" if run.optim_states else "stochastic_rounding")
    if launch.strategy not in STRATEGIES:
        raise ConfigurationError(
            f"{asked} does not go with {launch.strategy}, which keeps states in its own way: use "
            "multi_gpu.yaml or fsdp2.yaml, or leave it out."
        )
    if run.stochastic_rounding and weights != torch.bfloat16:
        raise ConfigurationError(
            f"{asked} has no effect on weights in {own}: set dtype: bfloat16 to keep them in 2 "
            "bytes."
        )
    return OptimizerStates(run.optim_states or own, run.stochastic_rounding)


def optimizer_bytes_per_parameter(optim_states: str | None, trained: torch.dtype) -> float:
    """Return the bytes that AdamW keeps for each trained parameter, beside it and its gradient."""
    return 2 * (BYTES_A_STATE[optim_states] if optim_states else trained.itemsize)


def precision_line(
    settings: RunSettings, config: PreTrainedConfig, states: OptimizerStates | None, device: str
) -> str:
    """Say in which types weights and states are kept and computed with, and who chose that."""
    training, peft = settings.training, settings.model.use_peft
    weights, mixed = weights_dtype(settings.model, config), training.mixed_precision
    why = settings.values.source("bf16")
    parts = [f"{str(weights).removeprefix('torch.')} weights"]
    if mixed != "no":
        chosen = f" ({why}; --bf16 false for float32)" if why in (FAST_BF16, BY_LAUNCH) else ""
        parts.append(f"mixed precision {mixed}{chosen}")
    elif why == NODE_UNKNOWN:
        parts.append(f"no mixed precision ({why})")
    elif why == "default" and device == "cuda" and not training.tf32:
        parts.append("no mixed precision (--bf16 true is several times as fast on a GPU)")
    else:
        parts.append("no mixed precision")
    if peft and weights != torch.float32 and mixed == "no":
        parts.append("adapters and their products in float32 (--bf16 true: products in bfloat16)")
    if states is not None:
        parts.append(str(states))
    elif weights == torch.bfloat16 and not peft:
        parts.append(
            "rounded to the nearest: updates below a 500th of a weight are lost "
            "(--stochastic_rounding true keeps them on average)"
        )
    return ", ".join(parts)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on each device when most are in use, and the parameters they come from.

    `working` comes and goes within an operation or a layer (the loss head's logits, for one);
    `process` is what libraries take on a GPU.
    """

    parameters: int
    trainable: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    process: int
    counted: bool

    @property
    def total(self) -> int:
        """Return all of it together."""
        return sum(self._parts().values())

    def _parts(self) -> dict[str, int]:
        names = ("weights", "gradients", "optimizer", "activations", "working", "process")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        trainable = "" if self.trainable == self.parameters else f", {self.trainable:,} trained"
        parts = [f"{name} {size / GIB:.2f}" for name, size in self._parts().items() if size]
        how = "counted on the model" if self.counted else "a rule of thumb"
        return (
            f"{self.parameters:,} parameters{trainable}; at most {self.total / GIB:.2f} GiB a "
            f"device = {' + '.join(parts)} ({how})"
        )


def estimate_memory(
    settings: RunSettings,
    config: PreTrainedConfig,
    launch: LaunchFacts,
    work: Workload,
    choice: str,
) -> MemoryEstimate:
    """Estimate the memory of one device while it trains with this activation checkpointing.

    The launch's strategy says what is sharded over the ranks. Where the architecture cannot run
    without data a formula for dense transformers takes the place of the count, with a warning.
    """
    parameters, trainable = count_parameters(settings.model, config)
    training, mixed = settings.training, work.autocast is not None
    shards = {
        kind: launch.world_size if launch.strategy in strategies else 1
        for kind, strategies in SHARDED_BY.items()
    }
    dtype = weights_dtype(settings.model, config)
    weights, gradients = parameters * dtype.itemsize, trainable * dtype.itemsize
    moments = optimizer_bytes_per_parameter(settings.run.optim_states, dtype)
    states = round(trainable * optimizer_bytes(training.optim, moments))
    if launch.strategy.startswith("zero") and mixed:
        # Half precision to compute with, float32 masters and states of what is trained ("ZeRO",
        # arXiv 1910.02054, section 3.1).
        weights, gradients, states = parameters * 2, trainable * 2, trainable * 12
    gradients //= shards["gradients"]
    accumulates = training.gradient_accumulation_steps > 1
    # DDP's buckets are the gradients' place from the first step on.
    held = gradients if accumulates or launch.strategy == "ddp" else 0
    step = None
    try:
        step = trace(settings, config, work, choice)
        phases = most_alive(step, shards["gradients"], held=held)
    except MISFITS as error:
        logger.warning(
            "memory: %s does not run without data (%s: %.200s); a rule of thumb takes the place of "
            "the count",
            type(config).__name__, type(error).__name__, error,
        )  # fmt: skip
        phases = _by_formula(config, work, choice, held or gradients)
    if phases.peak < gradients:  # more is in use while the optimizer steps
        phases = Phases(gradients, 0, gradients, 0)
    # The first micro-batches' gradients lie beside the buckets.
    buckets = gradients if launch.strategy == "ddp" and accumulates else 0
    on_cpu = work.device == "cpu" and work.attention is not None  # else a dry run for a GPU
    # Two layers at a time, and what is in none of them, whole and in the type of the products.
    gathered = step.gathered_weights if shards["weights"] > 1 and step is not None else 0
    return MemoryEstimate(
        parameters=parameters,
        trainable=trainable,
        weights=weights // shards["weights"],
        gradients=phases.gradients + buckets,
        optimizer=states // shards["optimizer"],
        activations=phases.activations,
        working=phases.working + gathered,
        process=0 if on_cpu else WORKSPACE_BYTES,
        counted=step is not None,
    )


def optimizer_bytes(name: str, both_moments: float) -> float:
    """Return what an optimizer keeps for each weight that it trains; AdamW's where not known.

    both_moments: the bytes of AdamW's two.
    """
    name = str(getattr(name, "value", name))
    if name in ("sgd", "adafactor", "lomo", "adalomo"):
        return 0
    kept = 2 if "8bit" in name else both_moments
    return kept / 2 if "lion" in name or name in ("adagrad", "rmsprop") else kept


def _by_formula(config: PreTrainedConfig, work: Workload, choice: str, gradients: int) -> Phases:
    text, tokens = config.get_text_config(), work.rows * work.sequence_length
    size = (work.autocast or work.weights).itemsize
    layer = tokens * text.hidden_size * FORMULA_16_BIT[choice] * size // 2
    if work.loss_head.name == "fused":
        head = working_bytes(tokens, text.vocab_size, text.hidden_size, work.device, size)
    else:
        head = tokens * text.vocab_size * (8 + size)
    kept = layer * text.num_hidden_layers
    return Phases(kept + gradients + head, kept, gradients, head)


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
        built = with_adapters(causal_lm_class(config)(config), model)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in built.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)
