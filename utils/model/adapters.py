"""What of a model trains: LoRA's adapters, or all weights that text goes through.

Both are found before any weight is loaded, on the model without any.
"""

import copy
import logging
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from utils.config.arguments import ModelArguments
from utils.config.errors import ConfigurationError
from utils.config.settings import RunSettings
from utils.model.architecture import (
    EXPERTS,
    MISFITS,
    causal_lm_class,
    experts_by_shape,
    text_model_of,
)

logger = logging.getLogger(__name__)

ALL = "all-linear"
TEXT_PATH = "text_path"  # without a mask, which would ask tensors without data for numbers
AttentionInterface.register(TEXT_PATH, sdpa_attention_forward)
# Published recipes name each expert's own layers, which transformers keeps in one parameter now.
FORMERLY = {
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "w1": "gate_up_proj",
    "w3": "gate_up_proj", "w2": "down_proj", "down_proj": "down_proj",
}  # fmt: skip


class Targets(NamedTuple):
    """What adapters are put on: full names of modules, and of parameters that experts hold."""

    modules: list[str]
    parameters: list[str]
    head: bool  # whether the last layer is trained whole beside them


def with_adapters(built: PreTrainedModel, model: ModelArguments) -> nn.Module:
    """Return the model with LoRA's adapters, without LoRA itself; what is unused is frozen."""
    if not model.use_peft:
        freeze_unused(built)
        return built
    from peft import get_peft_model
    from trl import get_peft_config  # brings datasets and pandas along

    adapters: Any = get_peft_config(model)
    return get_peft_model(built, adapters)


def freeze_unused(model: PreTrainedModel) -> list[str]:
    """Freeze the parameters that text does not go through, and return their names.

    Towers for images and sound, and what projects them, in a model that has them beside its text
    model: DDP waits for gradients of all that is not frozen.
    """
    unused = set(_unused(model.config))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in unused)
    return [name for name, _ in model.named_parameters() if name in unused]


def _unused(config: PreTrainedConfig) -> list[str]:
    """Return the parameters without a gradient; of a model for text alone none is looked for."""
    if not set(getattr(config, "sub_configs", {})) - {"text_config"}:
        return []
    config = copy.deepcopy(config)  # its attention is changed below, not that of the run's model
    with torch.device("meta"), experts_by_shape():
        model: Any = causal_lm_class(config)(config).train()
        text = text_model_of(model)
        try:
            model.set_attn_implementation(TEXT_PATH)
            places = torch.arange(8)[None]
            made = model(input_ids=places, position_ids=places, use_cache=False).logits
            used = _leaves(made.sum())
        except MISFITS as error:
            logger.debug("%s: text's path by its modules: %s", config.model_type, error)
            used = set(map(id, [*text.parameters(), *model.get_output_embeddings().parameters()]))
    # An attention that takes less than the run's may leave some of a layer out.
    used |= {id(one) for one in getattr(text, "layers", nn.Module()).parameters()}
    return [name for name, parameter in model.named_parameters() if id(parameter) not in used]


def _leaves(value: torch.Tensor) -> set[int]:
    """Return the ids of all parameters that a value was computed from."""
    left, seen, found = [value.grad_fn], set(), set()
    while left:
        node: Any = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found |= {id(node.variable)} if hasattr(node, "variable") else set()
            left += [one for one, _ in node.next_functions]
    return found


def plan_adapters(settings: RunSettings, config: PreTrainedConfig) -> Targets | None:
    """Find what LoRA adapts, hand it to the model's settings, and log it.

    None without LoRA: what is logged then is what stays frozen, if anything.

    By default that is every linear layer but the last, and the experts, of the text model. PEFT
    adapts the model without weights here, so that whatever it refuses is refused now. Raises
    ConfigurationError for names that the model does not have, with the nearest ones, and for
    lora_dropout where experts are adapted, which take none.
    """
    model = settings.model
    if not model.use_peft:
        if unused := _unused(config):
            parts = dict.fromkeys(".".join(name.split(".")[:2]) for name in unused)
            logger.info(
                "frozen: %d tensors of %s, which text does not go through",
                len(unused),
                ", ".join(parts),
            )
        return None
    with torch.device("meta"):
        built: Any = causal_lm_class(config)(config)
    targets = _targets(built, model)
    if targets.parameters and model.lora_dropout:
        _settle_dropout(settings, targets.parameters)
    adapted = _adapt(built, model, targets)
    missed = [name for name in targets.modules if name not in _adapted_names(adapted)]
    if missed:
        # PEFT takes these names for those of former experts; as parameters it knows them.
        with torch.device("meta"):
            built = causal_lm_class(config)(config)
        rest = [name for name in targets.modules if name not in missed]
        weights = [f"{name}.weight" for name in missed]
        adapted = _adapt(built, model, Targets(rest, targets.parameters + weights, targets.head))
    kinds = _last_names(targets.modules), _last_names(targets.parameters)
    sizes = [(value.numel(), value.requires_grad) for value in adapted.parameters()]
    trained, total = sum(size for size, own in sizes if own), sum(size for size, _ in sizes)
    logger.info(
        "LoRA: rank %d on %s: %s of %s parameters (%.2f %%) train",
        model.lora_r,
        ", ".join([*kinds[0], *(f"experts' {name}" for name in kinds[1])]),
        f"{trained:,}",
        f"{total:,}",
        100 * trained / total,
    )
    return targets


def _adapt(built: PreTrainedModel, model: ModelArguments, targets: Targets) -> nn.Module:
    """Let PEFT adapt these targets, which the model's settings then name."""
    everything = [name for name, _ in built.named_modules()]
    parameters = [name for name, _ in built.named_parameters()]
    model.lora_target_modules = _shortest(targets.modules, everything, 1)
    model.lora_target_parameters = _shortest(targets.parameters, parameters, 2) or None
    try:
        return with_adapters(built, model)
    except MISFITS as error:
        raise ConfigurationError(
            f"LoRA does not fit {built.config.model_type}: {str(error).strip().splitlines()[0]} "
            "Set lora_target_modules to other layers."
        ) from error


def _adapted_names(adapted: nn.Module) -> set[str]:
    from peft.tuners.lora import LoraLayer

    return {
        name.removeprefix("base_model.model.")
        for name, module in adapted.named_modules()
        if isinstance(module, LoraLayer)
    }


def _targets(built: PreTrainedModel, model: ModelArguments) -> Targets:
    head: Any = built.get_output_embeddings()
    everything = [name for name, _ in built.named_modules() if name]
    prefix = _name_of(built, text_model_of(built))
    unused = {name.rpartition(".")[0] for name in _unused(built.config)}
    experts = [name for name in _experts(built) if name.startswith(prefix)]
    asked, parameters = model.lora_target_modules, model.lora_target_parameters
    problems: list[str] = []
    if asked is None and parameters is not None:
        modules = []
    elif asked is None or asked == ALL:
        modules = [name for name in _linear(built) if name.startswith(prefix)]
        modules = [n for n in modules if n not in unused and not _is(built, n, head)]
        modules = [n for n in modules if _adaptable(built, n)]
        parameters = experts if parameters is None else parameters
    else:
        former = set() if parameters else _former([asked] if isinstance(asked, str) else asked)
        parameters = [n for n in experts if n.rpartition(".")[2] in former] or parameters
        own = everything if not parameters else [*everything, *FORMERLY]
        modules = _matched("lora_target_modules", asked, own, problems)
        modules = [name for name in modules if name not in FORMERLY]
    if (named := model.lora_target_parameters) is not None:
        known = [name for name, _ in built.named_parameters()]
        parameters = _matched("lora_target_parameters", named, known, problems)
    saved = _matched("lora_modules_to_save", model.lora_modules_to_save or [], everything, problems)
    if heads := [name for name in modules if _is(built, name, head)]:
        problems.append(
            f"--lora_target_modules {heads[0]}: SFTTrainer takes no adapters on the last layer: "
            f"train it whole by --lora_modules_to_save {heads[0]}, or leave it out."
        )
    if problems:
        raise ConfigurationError(problems)
    return Targets(modules, list(parameters or []), any(_is(built, n, head) for n in saved))


def _adaptable(built: PreTrainedModel, name: str) -> bool:
    """Say whether PEFT adapts a layer: not what Mamba's fused kernels read as a weight."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    try:
        _check_lora_target_modules_mamba(LoraConfig(), built, name.rpartition(".")[2])
    except ValueError:
        return False
    return True


def _matched(
    setting: str, asked: str | Sequence[str], known: Sequence[str], problems: list[str]
) -> list[str]:
    """Return the names that PEFT would take: of a list those that end in one, else a pattern's."""
    if isinstance(asked, str) and not re.fullmatch(r"[\w.]+", asked):
        try:
            found = [name for name in known if re.fullmatch(asked, name)]
        except re.error as error:
            problems.append(f"--{setting} {asked}: no name and no regular expression: {error}.")
            return []
        if not found:
            problems.append(f"--{setting} {asked}: no name in the model matches, as {known[-1]}.")
        return found
    found = []
    last_names = _last_names(known)
    for name in [asked] if isinstance(asked, str) else asked:
        own = [each for each in known if each == name or each.endswith(f".{name}")]
        found += own
        if not own:
            nearest = get_close_matches(name, last_names, n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]}?" if nearest else "it has " + ", ".join(last_names)
            problems.append(f"--{setting} {name}: the model has nothing of this name; {hint}")
    return [name for name in known if name in set(found)]


def _settle_dropout(settings: RunSettings, parameters: Sequence[str]) -> None:
    kinds = ", ".join(_last_names(parameters))
    if "lora_dropout" in settings.values.given:
        raise ConfigurationError(
            f"--lora_dropout {settings.model.lora_dropout:g}: experts ({kinds}) are adapted by a "
            "change of their weights, which knows no dropout of what goes in: set it to 0, or name "
            "the layers beside the experts by lora_target_modules."
        )
    logger.info("lora_dropout: 0, for experts (%s) take none", kinds)
    settings.model.lora_dropout = 0.0


def _linear(built: nn.Module) -> list[str]:
    """Return the linear layers; some routers are made of one and return more than a tensor."""
    forwards = (nn.Linear.forward, Conv1D.forward, FalconLinear.forward)
    return [n for n, module in built.named_modules() if type(module).forward in forwards]


def _experts(built: PreTrainedModel) -> list[str]:
    """Return the weights that hold all experts: (experts, in, out) or (experts, out, in)."""
    text = built.config.get_text_config(decoder=True)
    counts = {getattr(text, name, None) for name in EXPERTS} - {None, 0}
    return [
        name
        for name, value in built.named_parameters()
        if value.ndim == 3 and value.shape[0] in counts
    ]


def _former(asked: Sequence[str]) -> set[str]:
    return {FORMERLY[name] for name in asked if name in FORMERLY}


def _is(built: nn.Module, name: str, module: nn.Module | None) -> bool:
    return module is not None and built.get_submodule(name) is module


def _name_of(built: nn.Module, part: nn.Module) -> str:
    found = next(name for name, module in built.named_modules() if module is part)
    return f"{found}." if found else ""


def _last_names(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _shortest(names: Sequence[str], among: Sequence[str], parts: int) -> list[str]:
    """Return the names' last `parts` where they mean just these names, else the whole names."""
    short = list(dict.fromkeys(".".join(name.split(".")[-parts:]) for name in names))
    meant = {name for name in among if any(f".{name}".endswith(f".{each}") for each in short)}
    return short if meant == set(names) else list(names)
