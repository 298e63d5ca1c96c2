"""The trained part of a model: LoRA's adapters, or all weights that text passes through."""

import contextlib
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch
from huggingface_hub.dataclasses import type_validator
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from utils.config.arguments import ModelArguments, with_values
from utils.config.errors import ConfigurationError
from utils.host.faults import memory_error
from utils.host.foreign import foreign, limits, read_object, reason
from utils.host.machine import memory_room_bytes
from utils.model.architecture import (
    MISFITS,
    apart_inside,
    causal_lm_class,
    expert_count,
    first_line,
    gets_gradient,
    outside_text,
    text_model_of,
    without_weights,
)

ALL = "all-linear"
# PEFT's settings that determine the size of an adapter.
SIZES = ("r", "rank_pattern", "num_virtual_tokens", "encoder_hidden_size", "target_modules")
# Published recipes name the linear layers of each expert. transformers now has one parameter for
# all experts: old name -> new name.
FORMERLY = {
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "w1": "gate_up_proj",
    "w3": "gate_up_proj", "w2": "down_proj", "down_proj": "down_proj",
}  # fmt: skip


class Targets(NamedTuple):
    """Full names of the modules and of the experts' parameters that get adapters."""

    modules: list[str]
    parameters: list[str]
    head: bool  # whether the last layer is trained as well, without an adapter


@dataclass(frozen=True)
class AdapterPlan:
    """The parts of a model that LoRA trains.

    model: the model settings with the full names of the targets, and with lora_dropout 0 if the
    targets do not allow dropout. report: lines for the log.
    """

    targets: Targets
    model: ModelArguments
    report: tuple[str, ...]


def with_adapters(built: PreTrainedModel, model: ModelArguments) -> nn.Module:
    """Return the model with LoRA's adapters; without LoRA, freeze its unused weights."""
    if not model.use_peft:
        freeze_unused(built)
        return built
    from peft import get_peft_model
    from trl import get_peft_config  # slow: imports datasets and pandas

    adapters: Any = get_peft_config(model)
    return get_peft_model(built, adapters)


def load_adapter(model: PreTrainedModel, path: str, config_file: Path) -> nn.Module:
    """Return the model with the adapter at `path`, a folder or a Hub name.

    `config_file` is the adapter's adapter_config.json. Raises ConfigurationError if its settings or
    weights do not fit. Other errors of PEFT are raised unchanged.
    """
    from peft import PeftModel

    if read_object(config_file).get("megatron_config"):
        raise ConfigurationError(
            f"{config_file}: PEFT would import the module that megatron_core names. "
            "Code that a model names is not run: set megatron_config to null."
        )
    _check_adapter_size(model, config_file)
    try:
        with warnings.catch_warnings():
            # Without the adapter's weights the model would answer like the base model.
            warnings.filterwarnings("error", message="Found missing adapter keys")
            return PeftModel.from_pretrained(model, path)
    except (*MISFITS, UserWarning) as error:
        if memory_error(error):
            raise
        odd = ", ".join(_odd_settings(config_file)) or "it does not fit its weights or its base"
        raise ConfigurationError(f"{config_file}: {odd}: {reason(error)}.") from error


def _check_adapter_size(model: PreTrainedModel, config_file: Path) -> None:
    """Raise ConfigurationError if an adapter needs more memory than is free.

    PEFT allocates the sizes that the settings give before it reads the weights. If the adapter
    cannot be built on the meta device, nothing is raised here: PEFT then reports the error.
    """
    from peft import PeftConfig, get_peft_model

    needed, room = 0, memory_room_bytes()
    with limits(config_file), warnings.catch_warnings(), contextlib.suppress(*MISFITS):
        warnings.simplefilter("ignore")
        config: Any = PeftConfig.from_pretrained(str(config_file.parent))
        # Build for inference, as from_pretrained does. For training PEFT would load a tokenizer.
        config.inference_mode, config.init_lora_weights = True, False
        built = without_weights(model.config)
        base = sum(one.nbytes for one in built.parameters())
        with torch.device("meta"):
            adapted: Any = get_peft_model(built, config)
        needed = sum(one.nbytes for one in adapted.parameters()) - base
    if needed > room:
        sizes = {name: read_object(config_file).get(name) for name in SIZES}
        shown = ", ".join(f"{name} {value}" for name, value in sizes.items() if value)
        raise ConfigurationError(
            f"{config_file}: this adapter takes {needed / 2**30:,.0f} GiB, and here "
            f"{room / 2**30:,.0f} GiB are free: see that its sizes are right ({shown:.200})."
        )


def _odd_settings(config_file: Path) -> list[str]:
    """Return the settings of an adapter whose values are not of the types that PEFT declares."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    settings = read_object(config_file)
    kinds: Mapping[Any, type[Any]] = PEFT_TYPE_TO_CONFIG_MAPPING
    kind = kinds.get(str(settings.get("peft_type")))
    if kind is None:
        return [f"peft_type is {settings.get('peft_type')!r:.40}, which PEFT does not have"]
    odd = []
    for name, hint in get_type_hints(kind).items():
        value = settings.get(name)
        # In JSON a dict may represent an object of PEFT, and a list a tuple.
        stands_for_object = isinstance(value, dict | list) and re.search("peft|tuple", str(hint))
        if name in settings and not stands_for_object:
            try:
                type_validator(name, value, hint)
            except TypeError:
                odd.append(f"{name} is {value!r:.40}")
    return odd


def trained_bytes(
    model: ModelArguments, config: PreTrainedConfig, dtype: torch.dtype, trained: int
) -> int:
    """Return the bytes of the trained weights. Their gradients take as many bytes.

    PEFT keeps adapters in float32 even if the weights are in half precision
    (autocast_adapter_dtype). Layers that PEFT trains whole (lora_modules_to_save) keep their type,
    except with QLoRA, where they are float32.
    """
    if not model.use_peft:
        return trained * dtype.itemsize
    if model.load_in_4bit or not model.lora_modules_to_save:
        return trained * torch.float32.itemsize
    with torch.device("meta"):
        plain: Any = causal_lm_class(config)(config)
        built = with_adapters(plain.to(dtype), model)
    return sum(weight.nbytes for weight in built.parameters() if weight.requires_grad)


def freeze_unused(model: PreTrainedModel) -> list[str]:
    """Freeze the parameters that the loss does not reach; return their names.

    These are towers for images and sound, and indexers of sparse attention. If they were not
    frozen, DDP would wait for their gradients.
    """
    frozen = outside_text(model)
    frozen |= {name: each for name, each in model.named_parameters() if not gets_gradient(name)}
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    return list(frozen)


def plan_adapters(model: ModelArguments, config: PreTrainedConfig) -> AdapterPlan | None:
    """Find the layers that LoRA adapts. Return None without LoRA. Raises ConfigurationError.

    By default LoRA adapts every linear layer of the text model except the last, and the experts.
    PEFT adapts a model without weights here, so that a refusal comes before the weights load.
    """
    if not model.use_peft:
        return None
    from peft.tuners.lora import LoraLayer

    targets = _targets(without_weights(config), model)
    experts, report = _last_names(targets.parameters), list[str]()
    if experts and model.lora_dropout:
        report.append(
            f"lora_dropout: 0, not {model.lora_dropout:g}: experts ({', '.join(experts)}) take none"
        )
        model = with_values(model, lora_dropout=0.0)
    model, adapted = _adapt(config, model, targets.modules, targets.parameters)
    layers = {name for name, module in adapted.named_modules() if isinstance(module, LoraLayer)}
    missed = [name for name in targets.modules if f"base_model.model.{name}" not in layers]
    if missed:
        # PEFT mistakes these names for old names of experts' layers. It accepts their weights as
        # parameters.
        rest = [name for name in targets.modules if name not in missed]
        weights = [f"{name}.weight" for name in missed]
        model, adapted = _adapt(config, model, rest, targets.parameters + weights)
    trained, total = adapted.get_nb_trainable_parameters()
    names = ", ".join([*_last_names(targets.modules), *(f"experts' {name}" for name in experts)])
    report.append(
        f"LoRA: rank {model.lora_r} on {names}: {trained:,} of {total:,} parameters "
        f"({trained / total:.2%}) train"
    )
    return AdapterPlan(targets, model, tuple(report))


def check_model(config: PreTrainedConfig) -> None:
    """Raise ConfigurationError unless the model can be built and its text model has a head."""
    kind = f"model type {config.model_type!r}"
    with foreign(config.name_or_path or kind, f"transformers cannot build this model of {kind}"):
        built = without_weights(config)
    text, head = text_model_of(built), built.get_output_embeddings()
    if head is None or not any(module is text for module in built.modules()):
        raise ConfigurationError(
            f"{kind}: {type(built).__name__} has no text model with a last layer that transformers "
            "names: use another architecture."
        )


def _adapt(
    config: PreTrainedConfig, model: ModelArguments, modules: list[str], parameters: list[str]
) -> tuple[ModelArguments, Any]:
    """Return the model settings with these targets, and the model with PEFT's adapters."""
    named = with_values(
        model, lora_target_modules=list(modules), lora_target_parameters=list(parameters) or None
    )
    try:
        return named, with_adapters(without_weights(config), named)
    except MISFITS as error:
        raise ConfigurationError(
            f"LoRA does not fit {config.model_type}: {first_line(error)} Set lora_target_modules "
            "to other layers."
        ) from error


def _targets(built: PreTrainedModel, model: ModelArguments) -> Targets:
    """Resolve LoRA's settings to full names. Raises ConfigurationError for unknown names."""
    head: Any = built.get_output_embeddings()
    known = [name for name, _ in built.named_modules() if name and gets_gradient(name)]
    asked, named = model.lora_target_modules, model.lora_target_parameters
    problems: list[str] = []
    modules, parameters = linear_and_experts(built)
    if asked is None and named is not None:
        modules = []
    elif asked is not None and asked != ALL:
        former = {FORMERLY.get(name) for name in ([asked] if isinstance(asked, str) else asked)}
        parameters = [name for name in parameters if name.rpartition(".")[2] in former]
        modules = _matched("lora_target_modules", asked, known, problems, bool(parameters))
    if named is not None:
        weights = [name for name, _ in built.named_parameters()]
        parameters = _matched("lora_target_parameters", named, weights, problems)
    saved = _matched("lora_modules_to_save", model.lora_modules_to_save or [], known, problems)
    if heads := [name for name in modules if built.get_submodule(name) is head]:
        problems.append(
            f"--lora_target_modules {heads[0]}: SFTTrainer takes no adapters on the last layer: "
            f"train it whole by --lora_modules_to_save {heads[0]}, or leave it out."
        )
    if problems:
        raise ConfigurationError(problems)
    return Targets(modules, parameters, any(built.get_submodule(name) is head for name in saved))


def _matched(
    setting: str,
    asked: str | Sequence[str],
    known: Sequence[str],
    problems: list[str],
    had_experts: bool = False,
) -> list[str]:
    """Return the known names that end in a requested name, or match a single requested pattern.

    Add a problem for each requested name without a match. With `had_experts`, an old name of an
    expert's layer (see FORMERLY) is not a problem.
    """
    found: set[str] = set()
    for name in [asked] if isinstance(asked, str) else asked:
        own = [each for each in known if f".{each}".endswith(f".{name}")]
        if not own and isinstance(asked, str):
            with contextlib.suppress(re.error):
                own = [each for each in known if re.fullmatch(asked, each)]
        if not own and not (had_experts and name in FORMERLY):
            names = [each for each in _last_names(known) if not each.isdigit()]
            problems.append(
                f"--{setting} {name}: nothing in the model has this name, nor does it match as a "
                f"pattern. The model has {', '.join(names)}."
            )
        found.update(own)
    return [name for name in known if name in found]


def linear_and_experts(built: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Return the names of the text model's linear layers, except the last, and of experts' weights.

    A layer counts as linear by its forward method: some routers derive from nn.Linear but return
    more than a tensor. Layers are left out if Mamba's fused kernels read their weights directly,
    because PEFT refuses these. An expert weight is one tensor for all experts, (experts, in, out)
    or (experts, out, in).
    """
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    forwards = (nn.Linear.forward, Conv1D.forward, FalconLinear.forward)
    head, text = built.get_output_embeddings(), text_model_of(built)
    inside = next(name for name, module in built.named_modules() if module is text)
    modules, apart = [], apart_inside(built)
    for name, module in text.named_modules(prefix=inside):
        linear = type(module).forward in forwards and module is not head
        if linear and gets_gradient(name) and not any(part in f"{name}." for part in apart):
            with contextlib.suppress(ValueError):
                _check_lora_target_modules_mamba(LoraConfig(), built, name.rpartition(".")[2])
                modules.append(name)
    experts = [
        f"{name}.{weight}"
        for name, module in text.named_modules(prefix=inside)
        if expert_count(module)
        for weight, value in module.named_parameters(recurse=False)
        if value.ndim == 3
    ]
    return modules, experts


def _last_names(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))
