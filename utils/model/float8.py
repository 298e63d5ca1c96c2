"""Linear layers that multiply in 8-bit floating point (fp8), by torchao's Float8Linear.

A linear layer has three products in a step: its output, the gradient of its input and the gradient
of its weight. Before each product both factors are rounded to fp8. Their scales follow from the
largest value of each row (`rowwise`) or of the whole tensor (`tensorwise`). Weights, gradients and
optimizer states keep their types, so checkpoints and `final/` do not change.

In bf16 stay the last layer and routers, whose rounding changes the loss most, the first decoder
layer, experts (they are no linear layers), and sizes that the GPU's kernels do not take. torchtitan
leaves out the last layer, accelerate also the first.
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
    compiled: bool,
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
            f"{shown} was tried with DDP and FSDP2, not with {launch.strategy}: use strategy: "
            "multi_gpu or fsdp2, or leave it out"
        )
    own = weights_dtype(settings.model, config)
    if COMPUTED.get(settings.training.mixed_precision, own) != torch.bfloat16:
        raise ConfigurationError(f"{shown} needs --bf16 true, as the other layers compute in bf16")
    emulated = _emulates(settings, launch, elsewhere)
    length, rows = settings.data.sequence_length, settings.training.per_device_train_batch_size
    multiple = MULTIPLE * settings.run.context_parallel
    if length * rows % multiple:
        raise ConfigurationError(
            f"{shown} needs a multiple of {MULTIPLE} tokens on each rank: sequence_length {length} "
            f"x per_device_train_batch_size {rows} must be one of {multiple}: set "
            f"sequence_length: {-(-length // multiple) * multiple}"
        )
    layers, left_out = float8_layers(config)
    if not layers:
        raise ConfigurationError(
            f"{shown}: leave it out, no layer of {config.model_type} fits ({'; '.join(left_out)})"
        )
    report.say(f"fp8: {recipe}, {len(layers)} linear layers; in bf16: {'; '.join(left_out)}")
    if launch.strategy == "fsdp2":
        report.say("fp8: weights are gathered in bf16, then each GPU rounds them to fp8")
    if emulated:
        report.warn("fp8: emulated on this CPU, to try the settings; bf16 alone is faster")
    elif not compiled:
        report.warn("fp8: without compiled layers rounding to fp8 may take more time than it saves")
    return Float8Plan(recipe, layers, emulated)


def _emulates(settings: RunSettings, launch: LaunchFacts, elsewhere: bool) -> bool:
    """Return whether a CPU must emulate fp8. Raises ConfigurationError for a GPU without fp8."""
    found = ""
    if settings.run.assume:
        gpus = assumed_gpus(settings.run.assume)
        found = "" if gpus.fp8 else gpus.name
    elif not elsewhere and launch.device != "cpu":
        lowest = min(gathered(gpu_capability() or (0, 0)))
        found = "" if lowest >= LOWEST_CAPABILITY else f"capability {lowest[0]}.{lowest[1]}"
    if found:
        raise ConfigurationError(
            f"{settings.values.shown('fp8')} needs a GPU of compute capability 8.9 or newer (L4, "
            f"L40S, RTX 4090, H100), not {found}: leave it out"
        )
    return not elsewhere and launch.device == "cpu"


def float8_layers(config: PreTrainedConfig) -> tuple[tuple[str, ...], list[str]]:
    """Return the names of layers for fp8, and texts on the layers that stay in bf16."""
    built = without_weights(config)
    linear, experts = linear_and_experts(built)
    routing = {id(module) for router in routers(built) for module in router.modules()}
    groups: dict[str, list[str]] = {}
    for name in linear:
        layer: Any = built.get_submodule(name)
        decoder_layer = next(filter(str.isdigit, name.split(".")), "0")
        if id(layer) in routing:
            what = "of routers"
        elif type(layer) is not nn.Linear:
            what = "of another class than nn.Linear"
        elif layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
            what = f"with sizes that {MULTIPLE} does not divide"
        else:
            what = "of the first decoder layer" if decoder_layer == "0" else "chosen"
        groups.setdefault(what, []).append(name)
    chosen = tuple(groups.pop("chosen", ()))
    left_out = [f"{len(names)} {what} ({_kinds(names)})" for what, names in groups.items()]
    if experts:
        left_out.append(f"the experts' grouped matrices ({_kinds(experts)})")
    return chosen, ["the last layer", *left_out]


def _kinds(names: Sequence[str]) -> str:
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    return ", ".join(kinds[:SHOWN]) + (", ..." if len(kinds) > SHOWN else "")
