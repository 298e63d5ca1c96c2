"""QLoRA (arXiv 2305.14314): linear layers in 4 bits by bitsandbytes, under LoRA's adapters.

Each rank quantizes the published weights when it loads them, with the same result every time, so
checkpoints do not contain them. Layers compute with the dequantized weights, and `final/` contains
the dequantized weights with the adapters merged.
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

# bitsandbytes has a float32 scale per block of weights. With nested quantization a block's scale
# has 8 bits, and each group of scales has a float32 scale.
BLOCK, GROUP = 64, 256
STRATEGIES = ("single", "ddp", "zero1", "zero2", "fsdp2")
COMPUTED = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Quantized(NamedTuple):
    """The layers in 4 bits, the number of weights of all of them, and of the largest one."""

    layers: list[str]
    weights: int
    largest: int

    def bytes_saved(self, model: ModelArguments, dtype: torch.dtype) -> int:
        """Return how many bytes 4 bits save compared with this type."""
        scale_bytes = 1 + 4 / GROUP if model.use_bnb_nested_quant else 4
        return round(self.weights * (dtype.itemsize - 1 / 2 - scale_bytes / BLOCK))


def quantized_layers(model: ModelArguments, config: PreTrainedConfig) -> Quantized | None:
    """Return the layers of a model that are in 4 bits, or None.

    These are the text model's linear layers except the last, with or without adapters. Embeddings,
    norms and stacked experts are not quantized. `model` contains the full names of LoRA's targets,
    as in AdapterPlan.
    """
    if not model.load_in_4bit:
        return None
    built: Any = without_weights(config)
    # PEFT adapts some layers as parameters, which does not work for packed weights.
    as_parameters = set(model.lora_target_parameters or ())
    sizes = {
        name: layer.weight.numel()
        for name in linear_and_experts(built)[0]
        if type(layer := built.get_submodule(name)) in (nn.Linear, Conv1D)  # bitsandbytes' rule
        and f"{name}.weight" not in as_parameters
    }
    return Quantized([*sizes], sum(sizes.values()), max(sizes.values(), default=0))


def check_quantization(settings: RunSettings, config: PreTrainedConfig, strategy: str) -> None:
    """Raise ConfigurationError if the weights cannot be loaded in 4 bits."""
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
    settings: RunSettings, config: PreTrainedConfig, dtype: torch.dtype, found: Quantized | None
) -> dict[str, Any]:
    """Return the arguments of from_pretrained for 4 bits; empty if nothing is quantized.

    Layers compute in the type of mixed precision, or in `dtype`, the type of the other weights.
    """
    model, training = settings.model, settings.training
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
        # FSDP2 only shards floating-point types.
        bnb_4bit_quant_storage=computed if is_fsdp_enabled() else torch.uint8,
        llm_int8_skip_modules=sorted(names - {*found.layers}),
    )
    return {"quantization_config": asked, "device_map": {"": training.device}}


def compute_alike(model: nn.Module) -> None:
    """Keep bitsandbytes from packing weights differently for evaluation on a CPU."""
    for layer in packed_layers(model).values():
        layer.support_avx512bf16_for_cpu = False


def packed_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers in 4 bits by name: bitsandbytes' layers, not PEFT's wrappers."""
    modules = model.named_modules()
    return {name: module for name, module in modules if "quant_state" in vars(module)}


def dequantized(layer: Any, packed: Tensor) -> Tensor:
    """Return a layer's dequantized weight on the CPU, shaped as in the published file.

    `packed` is the layer's packed tensor, gathered from all ranks. The result has the type in which
    the layer was loaded.
    """
    from bitsandbytes.functional import dequantize_4bit

    state = layer.quant_state
    weight = dequantize_4bit(packed.to(state.absmax.device), state).cpu()
    return weight.T.contiguous() if layer.source_cls is Conv1D else weight
