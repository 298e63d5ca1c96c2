"""What AdamW keeps for each weight, as the settings say: which optimizer does it, and its bytes."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from utils.cluster.launch import LaunchFacts
from utils.config.cpu_precision import BY_LAUNCH, FAST_BF16, NODE_UNKNOWN
from utils.config.errors import ConfigurationError
from utils.config.run_settings import RunSettings
from utils.planning.models import weights_dtype

STRATEGIES = ("single", "ddp", "fsdp2")  # whole weights, or shards of rows
# Two codes and, for each block of up to 256 of them, two float32 scales.
BYTES_A_STATE = {"float32": 4.0, "bfloat16": 2.0, "int8": 1 + 4 / 256}


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
    weights = weights_dtype(settings.model, config)
    parts = [f"{str(weights).removeprefix('torch.')} weights", _mixed_precision(settings, device)]
    if settings.model.use_peft and weights != torch.float32 and not _is_mixed(settings):
        parts.append(
            "adapters in float32, and so their products (--bf16 true computes those in bfloat16)"
        )
    if states is not None:
        parts.append(str(states))
    elif weights == torch.bfloat16 and not settings.model.use_peft:
        parts.append(
            "rounded to the nearest: updates below a 500th of a weight are lost "
            "(--stochastic_rounding true keeps them on average)"
        )
    return ", ".join(parts)


def _is_mixed(settings: RunSettings) -> bool:
    return settings.training.mixed_precision != "no"


def _mixed_precision(settings: RunSettings, device: str) -> str:
    training = settings.training
    mixed, why = training.mixed_precision, settings.values.sources["bf16"]
    if not _is_mixed(settings):
        remark = ""
        if why == NODE_UNKNOWN:
            remark = f" ({why})"
        elif why == "default" and device == "cuda" and not training.tf32:
            remark = " (--bf16 true is several times as fast on a GPU)"
        return f"no mixed precision{remark}"
    chosen = f" ({why}; --bf16 false for float32)" if why in (*FAST_BF16, BY_LAUNCH) else ""
    return f"mixed precision {mixed}{chosen}"
