"""The trained part of a model: LoRA's adapters, or all weights that are not frozen."""

import contextlib
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from utils.config.arguments import ModelArguments, with_values
from utils.config.errors import ConfigurationError
from utils.host.faults import memory_error
from utils.host.foreign import read_object, reason, resource_limits
from utils.model.architecture import (
    MODEL_ERRORS,
    causal_lm_class,
    check_memory_room,
    error_text,
    expert_count,
    gets_gradient,
    non_text_name_parts,
    non_text_parameters,
    routers,
    text_model_of,
    without_weights,
)

ALL = "all-linear"
# Old name of one expert's linear layer -> new name of the parameter that stacks all experts.
# Published recipes have the old names. transformers now has the new names.
OLD_EXPERT_NAMES = {
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "w1": "gate_up_proj",
    "w3": "gate_up_proj", "w2": "down_proj", "down_proj": "down_proj",
}  # fmt: skip


@dataclass(frozen=True)
class AdapterPlan:
    """The layers of a model that get LoRA's adapters or are trained without adapters.

    model: the model settings, with full names of layers and weights in lora_target_modules and
    lora_target_parameters. lora_dropout is 0 if LoRA adapts experts. trains_head: whether the LM
    head itself is trained, without an adapter. report: lines for the log.
    """

    model: ModelArguments
    trains_head: bool
    report: tuple[str, ...]


def with_adapters(built: PreTrainedModel, model: ModelArguments) -> nn.Module:
    """Return the model with LoRA's adapters. Without LoRA, freeze weights and return the model.

    A weight is frozen if the loss gives it no gradient, or if --freeze or --train_only excludes it.
    """
    if not model.use_peft:
        freeze_unused(built)
        freeze_by_settings(built, model)
        return built
    from peft import get_peft_model
    from trl import get_peft_config  # slow: imports datasets and pandas

    adapters: Any = get_peft_config(model)
    return get_peft_model(built, adapters)


def load_adapter(model: PreTrainedModel, path: str, config_file: Path) -> nn.Module:
    """Return the model with the adapter at `path`, a folder or a Hub name.

    Raises ConfigurationError if the adapter's settings (`config_file`) or weights do not fit.
    """
    from peft import PeftModel

    settings = read_object(config_file)
    if settings.get("megatron_config"):
        raise ConfigurationError(
            f"{config_file}: PEFT would import the module that megatron_core names. "
            "Code that a model names is not run: set megatron_config to null."
        )
    initial = str(settings.get("init_lora_weights"))
    if re.fullmatch(r"pissa_niter_\d{4,}", initial):
        raise ConfigurationError(
            f"{config_file}: init_lora_weights {initial:.40} would compute for hours: set the "
            "number that the adapter was trained with, such as pissa_niter_16."
        )
    _check_adapter_size(model, config_file)
    try:
        with warnings.catch_warnings():
            # Without the adapter's weights the model would answer like the base model.
            warnings.filterwarnings("error", message="Found missing adapter keys")
            return PeftModel.from_pretrained(model, path)
    except (*MODEL_ERRORS, UserWarning) as error:
        if memory_error(error):
            raise
        raise ConfigurationError(
            f"{config_file}: it does not fit its weights, its base or this version of PEFT: "
            f"{reason(error)}."
        ) from error


def _check_adapter_size(model: PreTrainedModel, config_file: Path) -> None:
    """Raise ConfigurationError if an adapter needs more memory than is free.

    PEFT allocates the adapter from its settings before it reads any weight. If PEFT cannot build
    the adapter, this function raises nothing. `load_adapter` raises PEFT's error afterwards.
    """
    from peft import PeftConfig, get_peft_model

    needed = 0
    with (
        resource_limits(config_file),
        warnings.catch_warnings(),
        contextlib.suppress(*MODEL_ERRORS),
    ):
        warnings.simplefilter("ignore")
        config: Any = PeftConfig.from_pretrained(str(config_file.parent))
        # Build for inference, as from_pretrained does. For training PEFT would load a tokenizer.
        config.inference_mode, config.init_lora_weights = True, False
        built = without_weights(model.config)
        base = sum(weight.nbytes for weight in built.parameters())
        with torch.device("meta"):
            adapted: Any = get_peft_model(built, config)
        needed = sum(weight.nbytes for weight in adapted.parameters()) - base
    check_memory_room(needed, f"{config_file}: this adapter takes")


def trained_bytes(
    model: ModelArguments, config: PreTrainedConfig, dtype: torch.dtype, trained: int
) -> int:
    """Return the bytes of the trained weights. Their gradients take as many bytes.

    dtype: the type of the model's weights. trained: the number of trained weights. PEFT keeps
    adapters in float32 (autocast_adapter_dtype). Layers that are trained without an adapter
    (lora_modules_to_save) keep `dtype`. With QLoRA these layers are float32 as well.
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
    """Freeze the parameters that never get a gradient, and return their names.

    DDP would wait for gradients of these parameters. They belong to encoders of images and sound,
    to indexers of sparse attention, and to poolers.
    """
    frozen = non_text_parameters(model)
    frozen |= {name: each for name, each in model.named_parameters() if not gets_gradient(name)}
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    return list(frozen)


def freeze_by_settings(built: PreTrainedModel, model: ModelArguments) -> None:
    """Freeze the weights that the settings --freeze and --train_only exclude from training.

    --freeze names the weights to freeze. --train_only names the only weights to train. Raises
    ConfigurationError if a name matches no layer or weight, or if all weights are frozen.
    """
    if not (model.freeze or model.train_only):
        return
    named = dict(built.named_parameters(remove_duplicate=False))  # a tied weight has several names
    known = [*(name for name, _ in built.named_modules() if name), *named]
    problems: list[str] = []
    frozen = _matching("freeze", model.freeze, known, problems)
    trained = _matching("train_only", model.train_only, known, problems) or [""]
    to_train = _weights_in(named, trained) - _weights_in(named, frozen)
    for weight in named.values():
        if weight not in to_train:
            weight.requires_grad_(False)
    if not problems and not any(weight.requires_grad for weight in named.values()):
        problems.append("--freeze and --train_only leave no weight to train.")
    if problems:
        raise ConfigurationError(problems)


def frozen_lines(model: ModelArguments, config: PreTrainedConfig) -> list[str]:
    """Return a list with one log line on the weights that `freeze_by_settings` freezes, or []."""
    if not (model.freeze or model.train_only):
        return []
    built = without_weights(config)
    freeze_unused(built)
    before = {weight for weight in built.parameters() if weight.requires_grad}
    freeze_by_settings(built, model)
    named = dict(built.named_parameters(remove_duplicate=False))
    frozen = {weight for weight in before if not weight.requires_grad}
    layers = {name: set(module.parameters()) for name, module in built.named_modules() if name}
    # Layers whose weights are all frozen, and frozen weights of other layers.
    frozen_names: list[str] = []
    for name, weights in (layers | {name: {weight} for name, weight in named.items()}).items():
        if weights and weights <= frozen and not f"{name}.".startswith(tuple(frozen_names)):
            frozen_names.append(f"{name}.")
    by_pattern: dict[str, list[str]] = {}  # in the keys, N replaces the layer numbers
    for name in frozen_names:
        by_pattern.setdefault(re.sub(r"\d+", "N", name), []).append(name[:-1])
    ranges = [" to ".join(dict.fromkeys((each[0], each[-1]))) for each in by_pattern.values()]
    counts = [f" ({len(each)})" if len(each) > 1 else "" for each in by_pattern.values()]
    names = ", ".join(map("".join, zip(ranges, counts, strict=True)))
    head: Any = built.get_output_embeddings()
    tied = [name for name, each in named.items() if head and each is getattr(head, "weight", None)]
    state = "frozen" if tied and named[tied[0]] in frozen else "trained"
    note = f"; {' and '.join(tied)} are one weight (tied), so both are {state}"
    total, count = (sum(weight.numel() for weight in each) for each in (before, frozen))
    return [f"frozen: {count:,} of {total:,} parameters: {names}{note if len(tied) > 1 else ''}"]


def _weights_in(named: Mapping[str, nn.Parameter], layers: Sequence[str]) -> set[nn.Parameter]:
    """Return the weights inside the layers with these full names. "" names the whole model."""
    inside = tuple(f"{layer}." if layer else "" for layer in layers)
    return {weight for name, weight in named.items() if f"{name}.".startswith(inside)}


def plan_adapters(model: ModelArguments, config: PreTrainedConfig) -> AdapterPlan | None:
    """Return the plan of the layers that LoRA adapts, or None if LoRA is off.

    By default LoRA adapts the experts and all linear layers of the text model except the LM head.
    Raises ConfigurationError if LoRA does not fit the model. This function tries PEFT on a model
    without weights, so the error appears before the weights load.
    """
    if not model.use_peft:
        return None
    modules, parameters, trains_head = _targets(without_weights(config), model)
    experts, report = _last_names(parameters), list[str]()
    if experts and model.lora_dropout:
        report.append(
            f"lora_dropout: 0, not {model.lora_dropout:g}: experts ({', '.join(experts)}) take none"
        )
        model = with_values(model, lora_dropout=0.0)
    names = ", ".join([*_last_names(modules), *(f"experts' {name}" for name in experts)])
    try:
        model, adapted, missed = _try_adapters(config, model, modules, parameters)
        if missed:
            # PEFT skips modules that have old names of experts' layers. It adapts the weights of
            # these modules if they are target_parameters.
            modules = [name for name in modules if name not in missed]
            parameters = [*parameters, *(f"{name}.weight" for name in missed)]
            model, adapted, _ = _try_adapters(config, model, modules, parameters)
    except MODEL_ERRORS as error:
        raise ConfigurationError(
            f"LoRA does not fit {config.model_type}: {error_text(error)} Set "
            "lora_target_modules to other layers."
        ) from error
    # PEFT would repeat this warning for each further copy of the model.
    warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
    trained, total = adapted.get_nb_trainable_parameters()
    report.append(
        f"LoRA: rank {model.lora_r} on {names}: {trained:,} of {total:,} parameters "
        f"({trained / total:.2%}) train"
    )
    return AdapterPlan(model, trains_head, tuple(report))


def _try_adapters(
    config: PreTrainedConfig, model: ModelArguments, modules: list[str], parameters: list[str]
) -> tuple[ModelArguments, Any, list[str]]:
    """Build a model without weights and with LoRA's adapters on `modules` and `parameters`.

    modules, parameters: full names of layers and of weights. Returns the settings with these names,
    the adapted model, and the names in `modules` that PEFT did not adapt.
    """
    from peft.tuners.lora import LoraLayer

    model = with_values(
        model, lora_target_modules=list(modules), lora_target_parameters=list(parameters) or None
    )
    adapted = with_adapters(without_weights(config), model)
    layers = {name for name, module in adapted.named_modules() if isinstance(module, LoraLayer)}
    missed = [name for name in modules if f"base_model.model.{name}" not in layers]
    return model, adapted, missed


def _targets(built: PreTrainedModel, model: ModelArguments) -> tuple[list[str], list[str], bool]:
    """Return LoRA's target modules and target parameters, and whether the LM head is trained.

    Targets are full names. The LM head is trained if lora_modules_to_save names it. Raises
    ConfigurationError for names that the model lacks, and for an adapter on the LM head.
    """
    head: Any = built.get_output_embeddings()
    known = [name for name, _ in built.named_modules() if name and gets_gradient(name)]
    targets, target_weights = model.lora_target_modules, model.lora_target_parameters
    problems: list[str] = []
    modules, parameters = linear_and_experts(built)
    if targets is None and target_weights is not None:
        modules = []
    elif targets is not None and targets != ALL:
        names = [targets] if isinstance(targets, str) else targets
        stacked = {OLD_EXPERT_NAMES.get(name) for name in names}
        parameters = [name for name in parameters if name.rpartition(".")[2] in stacked]
        modules = _matching("lora_target_modules", targets, known, problems, bool(parameters))
    if target_weights is not None:
        weights = [name for name, _ in built.named_parameters()]
        parameters = _matching("lora_target_parameters", target_weights, weights, problems)
    saved = _matching("lora_modules_to_save", model.lora_modules_to_save or [], known, problems)
    if heads := [name for name in modules if built.get_submodule(name) is head]:
        problems.append(
            f"--lora_target_modules {heads[0]}: SFTTrainer takes no adapters on the last layer: "
            f"train it whole by --lora_modules_to_save {heads[0]}, or leave it out."
        )
    if problems:
        raise ConfigurationError(problems)
    return modules, parameters, any(built.get_submodule(name) is head for name in saved)


def _matching(
    setting: str,
    asked: str | Sequence[str],
    known: Sequence[str],
    problems: list[str],
    had_experts: bool = False,
) -> list[str]:
    """Return the full names in `known` that match a name or regular expression in `asked`.

    A name matches all full names that end with this name. Each name without a match adds a message
    about `setting` to `problems`. had_experts: whether names in OLD_EXPERT_NAMES need no match.
    """
    matched: set[str] = set()
    for name in [asked] if isinstance(asked, str) else asked:
        matches = [each for each in known if f".{each}".endswith(f".{name}")]
        if not matches:
            with contextlib.suppress(re.error):
                matches = [each for each in known if re.fullmatch(name, each)]
        if not matches and not (had_experts and name in OLD_EXPERT_NAMES):
            names = [each for each in _last_names(known) if not each.isdigit()]
            problems.append(
                f"--{setting} {name}: nothing in the model has this name, nor does it match as a "
                f"pattern. The model has {', '.join(names)}."
            )
        matched.update(matches)
    return [name for name in known if name in matched]


def linear_and_experts(built: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Return the full names of the text model's linear layers, and of the weights of experts.

    A layer is linear if its class has the forward method of a linear layer. Routers that derive
    from nn.Linear but return several tensors are not linear. The LM head is left out. Some layers
    of Mamba are left out, because Mamba's fused kernels read their weights directly, and PEFT
    refuses such layers. The weights of all experts of a layer are one tensor, (experts, in, out)
    or (experts, out, in).
    """
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    forwards = (nn.Linear.forward, Conv1D.forward, FalconLinear.forward)
    head, text = built.get_output_embeddings(), text_model_of(built)
    inside = next(name for name, module in built.named_modules() if module is text)
    modules, experts, excluded = [], [], non_text_name_parts(built)
    for name, module in text.named_modules(prefix=inside):
        linear = type(module).forward in forwards and module is not head
        if linear and gets_gradient(name) and not any(part in f"{name}." for part in excluded):
            with contextlib.suppress(ValueError):
                _check_lora_target_modules_mamba(LoraConfig(), built, name.rpartition(".")[2])
                modules.append(name)
        if expert_count(module):
            own = module.named_parameters(recurse=False)
            experts += [f"{name}.{weight}" for weight, value in own if value.ndim == 3]
    return modules, experts


def trained_matrices(model: Any) -> list[nn.Parameter]:
    """Return the trained matrices between embedding and LM head, which Muon updates.

    These are the weights of linear layers, including LoRA's, and the stacked weights of experts.
    Routers are left out, because each row of a router scores one expert. LoRA's adapters of experts
    are left out, because one tensor of such an adapter holds several matrices.
    """
    from peft.tuners.lora.layer import ParamWrapper

    built = model.get_base_model() if hasattr(model, "get_base_model") else model
    wrappers = [module for module in built.modules() if isinstance(module, ParamWrapper)]
    others = {inner for outer in [*routers(built), *wrappers] for inner in outer.modules()}
    modules, experts = linear_and_experts(built)
    layers = [built.get_submodule(name) for name in modules]
    weights = [layer.weight for layer in layers if layer not in others]
    weights += [built.get_parameter(name) for name in experts]
    return [weight for weight in weights if weight.requires_grad]


def _last_names(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))
