"""QLoRA (arXiv 2305.14314): linear layers in 4 bits by bitsandbytes, under LoRA's adapters.

Each rank quantizes the published weights when it loads them, with the same outcome every time, so
no checkpoint holds them. A layer computes with its weights dequantized, and so does `final/`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedConfig
from transformers.integrations import is_fsdp_enabled
from transformers.pytorch_utils import Conv1D

from utils.config.arguments import ModelArguments
from utils.config.errors import ConfigurationError
from utils.config.settings import RunSettings
from utils.model.adapters import linear_and_experts
from utils.model.architecture import without_weights

# Of bitsandbytes: a float32 scale for each block of weights; nested ones are in 8 bits, with a
# float32 one for each group of them.
BLOCK, GROUP = 64, 256
STRATEGIES = ("single", "ddp", "zero1", "zero2", "fsdp2")
COMPUTED = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Quantized(NamedTuple):
    """What is kept in 4 bits: layers by name, all their weights, and those of the largest layer."""

    layers: list[str]
    weights: int
    largest: int

    def bytes_saved(self, model: ModelArguments, dtype: torch.dtype) -> int:
        """Return how much less memory they take than in this type."""
        scale_bytes = 1 + 4 / GROUP if model.use_bnb_nested_quant else 4
        return round(self.weights * (dtype.itemsize - 1 / 2 - scale_bytes / BLOCK))


def quantized_layers(model: ModelArguments, config: PreTrainedConfig) -> Quantized | None:
    """Return what of a model is in 4 bits, once the adapters are planned; None: nothing.

    That are the text model's linear layers but the last, whatever LoRA adapts. Experts are one
    tensor, which bitsandbytes does not take; embeddings and norms stay as they are.
    """
    if not model.load_in_4bit:
        return None
    built: Any = without_weights(config)
    # PEFT adapts some layers as parameters, which packed ones cannot be.
    as_parameters = set(model.lora_target_parameters or ())
    sizes = {
        name: layer.weight.numel()
        for name in linear_and_experts(built)[0]
        if type(layer := built.get_submodule(name)) in (nn.Linear, Conv1D)  # bitsandbytes' rule
        and f"{name}.weight" not in as_parameters
    }
    return Quantized([*sizes], sum(sizes.values()), max(sizes.values(), default=0))


def check_quantization(settings: RunSettings, config: PreTrainedConfig, strategy: str) -> None:
    """Refuse 4 bits where they cannot be; raises ConfigurationError."""
    model, shown = settings.model, settings.values.shown("load_in_4bit")
    published = getattr(config, "quantization_config", None) or {}
    method = dict(published).get("quant_method")
    if method == "bitsandbytes" or (method and model.load_in_4bit):
        raise ConfigurationError(
            f"the weights of {model.model_name_or_path} are quantized already ({method}): name the "
            "model that they were made of, in bfloat16, and set load_in_4bit: true"
        )
    if model.load_in_4bit and strategy not in STRATEGIES:
        raise ConfigurationError(
            f"{shown} does not go with {strategy}: use accelerate_configs/multi_gpu.yaml, where "
            "each GPU has all weights, or fsdp2.yaml, which shards them"
        )


def quantized_loading(
    settings: RunSettings, config: PreTrainedConfig, dtype: torch.dtype
) -> dict[str, Any]:
    """Return what from_pretrained is to be told for 4 bits; nothing without.

    Layers compute in the type of mixed precision, else in `dtype`, that of the other weights.
    """
    model, training = settings.model, settings.training
    found = quantized_layers(model, config)
    if found is None:
        return {}
    linear, computed = (nn.Linear, Conv1D), COMPUTED.get(training.mixed_precision, dtype)
    modules = without_weights(config).named_modules()
    names = {name for name, module in modules if isinstance(module, linear)}
    asked = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=model.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model.use_bnb_nested_quant,
        bnb_4bit_compute_dtype=computed,
        # FSDP2 shards floating types alone.
        bnb_4bit_quant_storage=computed if is_fsdp_enabled() else torch.uint8,
        llm_int8_skip_modules=sorted(names - {*found.layers}),
    )
    return {"quantization_config": asked, "device_map": {"": training.device}}


def compute_alike(model: nn.Module) -> None:
    """Let evaluation on a CPU compute as training does: bitsandbytes would pack weights anew."""
    for layer in packed_layers(model).values():
        layer.support_avx512bf16_for_cpu = False


def packed_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers in 4 bits by name: bitsandbytes' own, not PEFT's around them."""
    modules = model.named_modules()
    return {name: module for name, module in modules if "quant_state" in vars(module)}


def dequantized(layer: Any, packed: Tensor) -> Tensor:
    """Return a layer's weight as it computes with it, on the CPU, shaped as in the published file.

    `packed` is what it holds, of all ranks. The type is the one that it was loaded in.
    """
    from bitsandbytes.functional import dequantize_4bit

    state = layer.quant_state
    weight = dequantize_4bit(packed.to(state.absmax.device), state).cpu()
    return weight.T.contiguous() if layer.source_cls is Conv1D else weight
