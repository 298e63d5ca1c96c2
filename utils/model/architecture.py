"""Properties of a model's architecture: class, text model, experts, image towers, xLSTM kernels."""

import copy
import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.xlstm import configuration_xlstm
from transformers.utils import is_xlstm_available

from utils.config.errors import ConfigurationError
from utils.host.foreign import library_errors, resource_limits
from utils.host.machine import memory_room_bytes

logger = logging.getLogger(__name__)

# Architectures use different names for the same setting. A config has one of them.
EXPERTS_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k", "moe_topk",
    "top_k_experts",
)  # fmt: skip
# Modules without a gradient: indexers of sparse attention only return indices, and BERT's pooler is
# not used.
WITHOUT_GRADIENT = {"indexer", "pooler"}
LAYER_TYPES = ("layer_types", "layers_block_type")
# Exceptions that a model's code raises for settings that do not fit each other, such as a width
# that is not a multiple of the heads.
MODEL_ERRORS = (
    RuntimeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError,
    AssertionError, StrictDataclassError,
)  # fmt: skip
# Published configurations of xLSTM name Triton's kernels and a mode without a backward pass.
# Training uses native kernels on a CPU, and Triton's on a GPU with the package xlstm.
NATIVE = {
    "chunkwise_kernel": "chunkwise--native_autograd", "sequence_kernel": "native_sequence__native",
    "step_kernel": "native", "mode": "inference", "return_last_states": True,
}  # fmt: skip
TRITON = NATIVE | {
    "chunkwise_kernel": "chunkwise--triton_xl_chunk", "sequence_kernel": "native_sequence__triton",
    "step_kernel": "triton",
}  # fmt: skip


def error_text(error: BaseException) -> str:
    """Return the first line of an error message."""
    text = error.problems[0] if isinstance(error, ConfigurationError) else str(error)
    return (text.strip().splitlines() or [repr(error)])[0]


def first_set_attribute(owner: Any, names: Sequence[str]) -> Any:
    """Return the first value of these attributes that is not None, 0 or empty. Default: None."""
    return next((getattr(owner, name) for name in names if getattr(owner, name, None)), None)


def layer_settings(config: PretrainedConfig) -> dict[int | str, dict[str, Any]]:
    """Return {layer index: {setting: value}} of layers that override settings of the model."""
    settings = config.to_dict().get("per_layer_config") or {}
    return {int(layer): own for layer, own in settings.items()}


def causal_lm_class(model_config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class of the model to train, including its encoders of images or sound.

    Raises ConfigurationError if transformers has no class that trains on text alone.
    """
    # The mappings have no public name; `_model_mapping` has had this one since transformers 4.
    multimodal = AutoModelForMultimodalLM._model_mapping
    mapping = (
        multimodal if type(model_config) in multimodal else AutoModelForCausalLM._model_mapping
    )
    kind = f"model type {model_config.model_type!r} ({type(model_config).__name__})"
    if type(model_config) not in mapping:
        raise ConfigurationError(
            f"{kind}: transformers has no causal language model for it. Code that comes with a "
            "model is not run: use an architecture that transformers has."
        )
    found: Any = mapping[type(model_config)]
    model_class: Any = found[0] if isinstance(found, tuple) else found
    if problem := _text_only_problem(model_class, model_config):
        raise ConfigurationError(f"{kind}: {model_class.__name__} {problem}")
    return model_class


def is_multimodal(model_config: PretrainedConfig) -> bool:
    """Return whether the model to train has parts that AutoModelForCausalLM does not load.

    Gemma 3 gives False, because AutoModelForCausalLM also loads its image tower.
    """
    causal = AutoModelForCausalLM._model_mapping.get(type(model_config), None)
    return causal is not causal_lm_class(model_config)


def text_model_config(model_config: PretrainedConfig) -> PretrainedConfig | None:
    """Return the configuration of a model's text part, or None if it cannot be a model by itself.

    It is a model by itself if AutoModelForCausalLM loads it from its own configuration, and loads
    only this part from the whole model's configuration.
    """
    found: Any = AutoModelForCausalLM._model_mapping.get(type(model_config), None)
    if found is None or found.config_class is not model_config.sub_configs.get("text_config"):
        return None
    text = model_config.get_text_config(decoder=True)
    return text if type(text) in AutoModelForCausalLM._model_mapping else None


def _text_only_problem(model_class: Any, model_config: PretrainedConfig) -> str | None:
    """Return why a model cannot train on text alone, or None. The text is the end of a message."""
    text = model_config.get_text_config(decoder=True)
    if model_config.is_encoder_decoder or getattr(text, "is_encoder_decoder", False):
        return "is an encoder with a decoder, and Stoker trains decoders alone: use one of those."
    arguments = inspect.signature(model_class.forward).parameters
    if "labels" not in arguments:
        thinker = getattr(model_config, "thinker_config", None)
        if thinker is None:
            return "computes no loss of the next token: use another model."
        part: Any = AutoModelForMultimodalLM._model_mapping[type(thinker)]
        return (
            "computes no loss of the next token: train its text part, saved by "
            f"{part.__name__}.from_pretrained(MODEL).save_pretrained(DIRECTORY)."
        )
    needed = [
        name
        for name, parameter in arguments.items()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and name not in ("self", "input_ids")
    ]
    if needed:
        return f"needs {' and '.join(needed)} beside text: use a model that runs on text alone."
    return None


def body_of(model: PreTrainedModel) -> Any:
    """Return the model without its LM head: the part that computes the last hidden states."""
    body: Any = model.base_model
    # Llama 4 names a base model that it does not have; `base_model` is then the model itself.
    return model.model if body is model else body


def text_model_of(model: PreTrainedModel) -> Any:
    """Return the text decoder, without the LM head and without the encoders of images."""
    decoder: Any = model.get_decoder()
    return body_of(model) if decoder is model else decoder


def without_weights(config: PretrainedConfig) -> PreTrainedModel:
    """Return the model on the meta device, without weights.

    The model uses eager attention, because loading an attention that the configuration names could
    run foreign code. Raises ConfigurationError if the model's buffers do not fit into memory. If
    the model cannot be built, transformers' code may raise any Exception.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    name = config.name_or_path or f"a model of type {config.model_type}"
    with resource_limits(f"building {name}"), torch.device("meta"):
        built: Any = causal_lm_class(config)(config)
    # from_pretrained computes the buffers (tables of positions) on the CPU, even without weights.
    # It computes them in int64 first, which needs more memory for a moment.
    check_memory_room(
        4 * sum(value.nbytes for value in built.buffers()), f"{name}: its buffers take"
    )
    return built


def check_memory_room(needed: int, what: str) -> None:
    """Raise ConfigurationError if fewer than `needed` bytes are free. `what` begins the message."""
    room = memory_room_bytes()
    if needed > room:
        raise ConfigurationError(
            f"{what} {needed / 2**30:,.1f} GiB, and {room / 2**30:,.1f} GiB are free here: see "
            "that its head_dim and other sizes are right, or take a larger machine."
        )


def check_model(config: PretrainedConfig) -> None:
    """Raise ConfigurationError if the model cannot be built, or lacks a text model or LM head."""
    kind = f"model type {config.model_type!r}"
    with library_errors(
        config.name_or_path or kind, f"transformers cannot build this model of {kind}"
    ):
        built = without_weights(config)
    text, head = text_model_of(built), built.get_output_embeddings()
    if head is None or not any(module is text for module in built.modules()):
        raise ConfigurationError(
            f"{kind}: {type(built).__name__} has no text model with a last layer that transformers "
            "names: use another architecture."
        )


def expert_count(layer: torch.nn.Module) -> int:
    """Return the number of experts in a layer with one weight tensor for all experts, else 0."""
    own = layer.parameters(recurse=False)
    stacked = any(len(getattr(weight, "ds_shape", weight.shape)) == 3 for weight in own)
    return (
        (first_set_attribute(layer, ("num_experts", "num_routed_experts")) or 0) if stacked else 0
    )


def routers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return a model's routers: the layers that choose each token's experts."""
    parts = (model, text_model_of(model))
    tables = [getattr(part, "_can_record_outputs", None) or {} for part in parts]
    recorded: Any = next(filter(None, (table.get("router_logits") for table in tables)), [])
    entries = recorded if isinstance(recorded, list | tuple) else [recorded]
    classes: tuple[Any, ...] = tuple(getattr(entry, "target_class", entry) for entry in entries)
    found = (module for module in model.modules() if isinstance(module, classes))
    # Granite's small models have routers for zero experts, which have no weights.
    return [router for router in found if any(weight.numel() for weight in router.parameters())]


def has_experts(built: PreTrainedModel) -> bool:
    """Return whether a model routes tokens to experts.

    This function reads the layers, because no setting says so in all architectures.
    """
    return bool(routers(built)) or any(map(expert_count, built.modules()))


def add_input_hooks(model: PreTrainedModel) -> None:
    """Add forward hooks to a Molmo 2 or xLSTM model. Other models are unchanged.

    Molmo 2 gets token types that say "text". xLSTM's kernels get the mode, train or inference.
    """
    if model.config.model_type == "molmo2":

        def add_types(_: Any, args: Any, inputs: dict[str, Any]) -> Any:
            if inputs.get("mm_token_type_ids") is None and inputs.get("input_ids") is not None:
                inputs["mm_token_type_ids"] = torch.zeros_like(inputs["input_ids"])
            return args, inputs

        body_of(model).register_forward_pre_hook(add_types, with_kwargs=True)
    if getattr(model.config, "chunkwise_kernel", None) == TRITON["chunkwise_kernel"]:
        backends: list[Any] = [m for m in model.modules() if type(m).__name__ == "mLSTMBackend"]

        def set_mode(module: torch.nn.Module, _: Any) -> None:
            for backend in backends:
                backend.config.mode = "train" if module.training else "inference"

        model.register_forward_pre_hook(set_mode)


def accept_xlstm_kernels() -> None:
    """Let xLSTM configurations name Triton's kernels even if these are not installed.

    `choose_xlstm_kernels` replaces these names later.
    """
    if not is_xlstm_available():
        config_class: Any = configuration_xlstm.xLSTMConfig
        for name in ("chunkwise_kernel", "sequence_kernel", "step_kernel"):
            config_class.__validators__.pop(name, None)


def choose_xlstm_kernels(
    config: PretrainedConfig, device_type: str, length: int | None = None
) -> None:
    """Set and log the kernels in an xLSTM's configuration. Other configurations are unchanged.

    length: sequence_length. Raises ConfigurationError if Triton's kernels exclude this length.
    """
    if config.model_type != "xlstm":
        return
    triton = device_type == "cuda" and is_xlstm_available()
    chunk: int = config.chunk_size
    if triton and length is not None and length % chunk:
        raise ConfigurationError(
            f"--sequence_length {length:,}: Triton's kernels of xLSTM train on multiples of its "
            f"chunk_size, {chunk}: set it to {-(-length // chunk) * chunk:,}."
        )
    for name, value in (TRITON if triton else NATIVE).items():
        setattr(config, name, value)
    hint = "; pip install xlstm for Triton's" if device_type == "cuda" and not triton else ""
    logger.info("xLSTM: kernels %s%s", config.chunkwise_kernel, hint)


def non_text_name_parts(model: PreTrainedModel) -> tuple[str, ...]:
    """Return name parts, such as ".layers.3.", of the modules that process images or sound.

    Only modules inside the text model count. The text models of Chameleon and Phi-4 contain image
    towers. Llama 3.2 Vision has layers that attend to images.
    """
    config: Any = model.config
    text_config, text = config.get_text_config(decoder=True), text_model_of(model)
    kinds = {type(getattr(config, name, None)) for name in config.sub_configs} - {type(text_config)}
    towers = [
        name
        for name, module in text.named_modules()
        if isinstance(module, PreTrainedModel) and type(module.config) in kinds
    ]
    layers = getattr(text_config, "cross_attention_layers", None) or ()
    parts = [*towers, "embed_tokens_extend", *(f"layers.{layer}" for layer in layers)]
    return tuple(f".{name}." for name in parts)


def non_text_parameters(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """Return {name: parameter} of parts for other modalities than text, such as image towers."""
    if not set(getattr(model.config, "sub_configs", {})) - {"text_config"}:
        return {}
    used = {
        id(weight)
        for part in (text_model_of(model), model.get_output_embeddings())
        for weight in part.parameters()
    }
    excluded = non_text_name_parts(model)
    return {
        name: value
        for name, value in model.named_parameters()
        if id(value) not in used or any(part in name for part in excluded)
    }


def gets_gradient(name: str) -> bool:
    """Return whether the text model's module or parameter with this full name gets a gradient."""
    return WITHOUT_GRADIENT.isdisjoint(name.split("."))
