"""The number types of a run: of its weights, Adam's states and computations."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from utils.config.errors import ConfigurationError
from utils.config.precision import BY_LAUNCH, FAST_BF16, NODE_UNKNOWN
from utils.config.settings import RunSettings
from utils.launch.processes import LaunchFacts
from utils.model.finished_model import name_of
from utils.model.weights import weights_dtype

# Strategies of our own optimizer. It needs whole weights, or weights sharded by rows.
STRATEGIES = ("single", "ddp", "fsdp2")


@dataclass(frozen=True)
class OptimizerStates:
    """The type of Adam's moments, and whether weights are rounded stochastically (up or down)."""

    kept_as: str
    stochastic_rounding: bool


def choose_optimizer_states(
    settings: RunSettings, config: PreTrainedConfig, launch: LaunchFacts
) -> OptimizerStates | None:
    """Return the number types of our own optimizer; None: the run uses torch's optimizer.

    Raises ConfigurationError if the strategy or the type of the weights rules the settings out.
    """
    run, weights = settings.run, weights_dtype(settings.model, config)
    trained = torch.float32 if settings.model.use_peft else weights  # PEFT's adapters are float32
    own = name_of(trained)
    if run.ema_decay is not None and launch.strategy not in STRATEGIES:
        raise ConfigurationError(
            f"{settings.values.shown('ema_decay')} does not go with {launch.strategy}, which keeps "
            "weights in its own way: use multi_gpu.yaml or fsdp2.yaml, or leave it out."
        )
    if run.optim_states in (None, own) and not run.stochastic_rounding:
        return None
    asked = settings.values.shown("optim_states" if run.optim_states else "stochastic_rounding")
    if launch.strategy not in STRATEGIES:
        raise ConfigurationError(
            f"{asked} does not go with {launch.strategy}, which keeps states in its own way: use "
            "strategy: multi_gpu or fsdp2, or leave it out."
        )
    if run.stochastic_rounding and weights != torch.bfloat16:
        raise ConfigurationError(
            f"{asked} has no effect on weights in {own}: set dtype: bfloat16 to keep them in 2 "
            "bytes."
        )
    return OptimizerStates(run.optim_states or own, run.stochastic_rounding)


def precision_line(
    settings: RunSettings, config: PreTrainedConfig, states: OptimizerStates | None, device: str
) -> str:
    """Return the log line on the types of weights, computations and states, and who chose them."""
    training, why = settings.training, settings.values.source("bf16")
    weights, mixed = weights_dtype(settings.model, config), training.mixed_precision
    hint = ""
    if settings.run.assume:
        device = "cuda"
    if mixed != "no" and why in (FAST_BF16, BY_LAUNCH):
        hint = f" ({why}; --bf16 false for float32)"
    elif why == NODE_UNKNOWN:
        hint = f" ({why})"
    elif why == "default" and mixed == "no" and device == "cuda" and not training.tf32:
        hint = " (--bf16 true is several times as fast on a GPU)"
    computed = "no mixed precision" if mixed == "no" else f"mixed precision {mixed}"
    parts = [f"{name_of(weights)} weights", f"{computed}{hint}"]
    if states is not None:
        rounded = ", weights rounded stochastically" if states.stochastic_rounding else ""
        parts.append(f"Adam's states in {states.kept_as}{rounded}")
    elif weights == torch.bfloat16 and not settings.model.use_peft:
        parts.append(
            "rounded to the nearest: updates below a 500th of a weight are lost "
            "(--stochastic_rounding true keeps them on average)"
        )
    return ", ".join(parts)
