"""Linear layers that multiply in 8-bit floating point (fp8), by torchao's Float8Linear.

A linear layer has three products in a step: its output, the gradient of its input and the gradient
of its weight. Before each product both factors are rounded to fp8. Their scales follow from the
largest value of each row (`rowwise`) or of the whole tensor (`tensorwise`). Weights, gradients and
optimizer states keep their types, so checkpoints and `final/` do not change.

These layers stay in bf16: the last layer and routers, whose rounding changes the loss most; the
first decoder layer, as its input are the embeddings; experts, which are no linear layers; and
layers whose sizes the GPU's kernels do not take. torchtitan and accelerate leave out similar ones.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from utils.config.errors import ConfigurationError, Report
from utils.config.precision import gpu_capability
from utils.config.settings import RunSettings
from utils.config.strategy import assumed_gpus
from utils.host.collectives import gathered
from utils.launch.processes import LaunchFacts
from utils.model.adapters import linear_and_experts
from utils.model.architecture import routers, without_weights
from utils.model.weights import COMPUTED, weights_dtype

ROWWISE, TENSORWISE = "rowwise", "tensorwise"  # torchao's names
MULTIPLE = 16  # torch's kernels take rows and columns in multiples of this number
LOWEST_CAPABILITY = (8, 9)  # the first GPUs with products in fp8: L4, L40S, RTX 4090
STRATEGIES = ("single", "ddp", "fsdp2")
SHOWN = 3


@dataclass(frozen=True)
class Float8Plan:
    """The layers that multiply in fp8.

    recipe: torchao's name of the scaling. layers: full names. emulated: round to fp8 but multiply
    in another type, for devices without such products.
    """

    recipe: str
    layers: tuple[str, ...]
    emulated: bool

    def convert(self, model: nn.Module) -> None:
        """Replace the layers in `model`; call before PEFT wraps them. Their weights stay."""
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(self.recipe)
        config = dataclasses.replace(config, emulate=self.emulated)
        chosen = frozenset(self.layers)
        convert_to_float8_training(
            model, config=config, module_filter_fn=lambda _, name: name in chosen
        )


def plan_float8(
    settings: RunSettings,
    config: PreTrainedConfig,
    launch: LaunchFacts,
    elsewhere: bool,
    report: Report,
) -> Float8Plan | None:
    """Return the layers for `fp8`, or None if it is off; add lines to `report`.

    All ranks call this. `elsewhere`: the run trains on another machine. Raises ConfigurationError
    if the GPU, the strategy, the sizes or the model do not allow fp8.
    """
    if not settings.model.fp8:
        return None
    shown = settings.values.shown("fp8")
    recipe = TENSORWISE if settings.model.fp8 == TENSORWISE else ROWWISE
    if launch.strategy not in STRATEGIES:
        raise ConfigurationError(
            f"{shown} does not go with {launch.strategy}, which keeps weights in its own way: use "
            "strategy: multi_gpu or fsdp2, or leave it out"
        )
    computed = COMPUTED.get(settings.training.mixed_precision) or weights_dtype(
        settings.model, config
    )
    if computed != torch.bfloat16:
        raise ConfigurationError(f"{shown} needs --bf16 true, as the other layers compute in bf16")
    emulated = _checked_device(settings, launch, elsewhere, shown)
    length, rows = settings.data.sequence_length, settings.training.per_device_train_batch_size
    if length * rows % MULTIPLE:
        raise ConfigurationError(
            f"{shown} needs a multiple of {MULTIPLE} tokens in a micro-batch, and "
            f"sequence_length {length} x per_device_train_batch_size {rows} is {length * rows}: "
            f"set sequence_length: {-(-length // MULTIPLE) * MULTIPLE}"
        )
    layers, left_out = float8_layers(config)
    if not layers:
        raise ConfigurationError(
            f"{shown}: no layer of {config.model_type} can use it ({'; '.join(left_out)}): leave "
            "it out"
        )
    report.say(f"fp8: {recipe}, {len(layers)} linear layers; in bf16: {'; '.join(left_out)}")
    if launch.strategy == "fsdp2":
        report.say("fp8: FSDP2 gathers weights in bf16, each GPU rounds them to fp8")
    if emulated:
        report.warn("fp8: emulated on this CPU, to try the settings; bf16 alone is faster")
    return Float8Plan(recipe, layers, emulated)


def _checked_device(
    settings: RunSettings, launch: LaunchFacts, elsewhere: bool, shown: str
) -> bool:
    """Return whether fp8 must be emulated. Raises ConfigurationError for a GPU without fp8."""
    needed = "needs a GPU of compute capability 8.9 or newer (H100, L40S, RTX 4090)"
    if settings.run.assume:
        gpus = assumed_gpus(settings.run.assume)
        if not gpus.fp8:
            raise ConfigurationError(f"{shown} {needed}, not {gpus.name}: leave it out")
        return False
    if elsewhere or launch.device == "cpu":
        return not elsewhere
    capability = gpu_capability() if launch.device == "cuda" else None
    lowest = min(gathered(capability or (0, 0)))
    if lowest < LOWEST_CAPABILITY:
        found = ".".join(map(str, lowest)) if capability else launch.device
        raise ConfigurationError(f"{shown} {needed}, and this run has {found}: leave it out")
    return False


def float8_layers(config: PreTrainedConfig) -> tuple[tuple[str, ...], list[str]]:
    """Return the names of layers for fp8, and texts on the layers that stay in bf16."""
    built = without_weights(config)
    linear, experts = linear_and_experts(built)
    routing = {id(module) for router in routers(built) for module in router.modules()}
    chosen: list[str] = []
    first, others, misfits, of_routers = [], [], [], []
    for name in linear:
        layer: Any = built.get_submodule(name)
        number = next((part for part in name.split(".") if part.isdigit()), None)
        if id(layer) in routing:
            of_routers.append(name)
        elif type(layer) is not nn.Linear:
            others.append(name)
        elif layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
            misfits.append(name)
        elif number in (None, "0"):
            first.append(name)
        else:
            chosen.append(name)
    texts = {
        "of the first decoder layer": first,
        f"with sizes that {MULTIPLE} does not divide": misfits,
        "of another class than nn.Linear": others,
        "of routers": of_routers,
    }
    left_out = ["the last layer"]
    left_out += [f"{len(names)} {what} ({_kinds(names)})" for what, names in texts.items() if names]
    if experts:
        left_out.append(f"the experts' grouped matrices ({_kinds(experts)})")
    return tuple(chosen), left_out


def _kinds(names: Sequence[str]) -> str:
    """Return up to three last parts of module names as text."""
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    return ", ".join(kinds[:SHOWN]) + (", ..." if len(kinds) > SHOWN else "")
