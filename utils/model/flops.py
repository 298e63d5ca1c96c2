"""Model FLOPs per token and peak FLOP/s of GPUs, for MFU.

Each weight that multiplies a token counts 6 FLOPs, or 4 if the weight is frozen. The LM head counts
once, even if it shares its weight with the embedding. The embedding does not count. An expert
counts only for the tokens that are routed to it. Each attention layer adds
12 * heads * head_dim * T per token of a sequence of T tokens. The causal mask does not reduce this
count. Recomputed activations do not count. torchtitan, nanochat and benchmarks/hardware/flops.py
count in the same way.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from utils.config.strategy import known_gpus
from utils.data.packing import PackPlan
from utils.model.architecture import (
    EXPERTS_PER_TOKEN,
    LAYER_TYPES,
    expert_count,
    first_set_attribute,
    non_text_name_parts,
    text_model_of,
)


@dataclass(frozen=True)
class TokenProducts:
    """Counts from which model FLOPs per token are computed.

    forward: the number of weights that multiply a token. Only experts to which a token is routed
    count. trained: the number of these weights that are trained. attention: for each attention
    layer, heads x head_dim and the window in tokens, or None for a layer without a window.
    """

    forward: float
    trained: float
    attention: tuple[tuple[float, int | None], ...]

    def flops(self, effective_length: float) -> float:
        """Return the FLOPs per token of forward and backward pass, for documents of this length."""
        return 4 * self.forward + 2 * self.trained + 12 * self.scores(effective_length)

    def scores(self, length: float) -> float:
        """Return the sum over attention layers of heads x head_dim x min(length, window)."""
        return sum(size * min(length, window or math.inf) for size, window in self.attention)


def token_products(model: Any) -> TokenProducts:
    """Count the weights that multiply each token in a model and its adapters.

    The counts are those of the whole model, even if ranks hold shards. Towers for images and sound
    do not count. `model` is a PreTrainedModel, or PEFT's wrapper of it.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config.get_text_config(decoder=True)
    experts = max(map(expert_count, base.modules()))
    routed = first_set_attribute(config, EXPERTS_PER_TOKEN) or 1
    forward = trained = 0.0
    excluded = non_text_name_parts(base)
    for part in (text_model_of(base), base.get_output_embeddings()):
        for name, module in part.named_modules():
            if name.split(".")[-1] == "original_module" or any(p in f".{name}." for p in excluded):
                continue  # PEFT trains a copy, which is counted
            among_experts = expert_count(module) or ".experts." in f".{name}."
            for weight, size in _matrices(module):
                used = size * (routed / experts if experts and among_experts else 1)
                forward += used
                trained += used * weight.requires_grad
    return TokenProducts(forward, trained, _attention_sizes(config))


def _matrices(module: nn.Module) -> list[tuple[torch.Tensor, int]]:
    """Return pairs (matrix, number of weights) of a layer.

    The number is that of the whole, unquantized matrix, even if `matrix` is a shard or in 4 bits.
    """
    if isinstance(module, nn.Linear):
        return [(module.weight, module.in_features * module.out_features)]
    if isinstance(module, Conv1D):
        return [(module.weight, module.nx * module.nf)]
    if not expert_count(module):
        return []
    own = module.parameters(recurse=False)
    shapes = ((weight, getattr(weight, "ds_shape", weight.shape)) for weight in own)
    return [(weight, math.prod(shape)) for weight, shape in shapes if len(shape) == 3]


def _attention_sizes(config: PreTrainedConfig) -> tuple[tuple[float, int | None], ...]:
    """Return (heads x head_dim, window or None) of each layer with softmax attention."""
    types = first_set_attribute(config, LAYER_TYPES)
    kinds = [str(kind) for kind in types] if types else [None] * config.num_hidden_layers
    sizes = []
    for layer, kind in zip(config.per_layer_config, kinds, strict=False):
        if kind is not None and ("attention" not in kind or "linear" in kind):
            continue
        heads = getattr(layer, "num_attention_heads", 0)
        head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // max(heads, 1)
        # Multi-head latent attention: keys and values have different sizes.
        keys = getattr(layer, "qk_head_dim", None) or head_dim
        if without_position := getattr(layer, "qk_nope_head_dim", None):
            keys = without_position + layer.qk_rope_head_dim
        values = getattr(layer, "v_head_dim", None) or head_dim
        window = None
        if kind is None or "sliding" in kind:
            window = getattr(layer, "sliding_window", None) or None
        sizes.append((heads * (keys + values) / 2, window))
    return tuple(sizes)


def effective_length(plans: Sequence[PackPlan], shares: np.ndarray) -> float:
    """Return the length of a token's document, averaged over all tokens.

    plans: the packed sequences of each dataset. shares (plans,): the fraction of the training
    sequences that comes from each dataset. Without the causal mask, an average token would attend
    to the returned number of tokens.
    """
    lengths = [plan.segments.lengths.astype(np.float64) for plan in plans]
    squares = [(each**2).sum() / plan.sequences for each, plan in zip(lengths, plans, strict=True)]
    tokens = [each.sum() / plan.sequences for each, plan in zip(lengths, plans, strict=True)]
    return float(shares @ squares / (shares @ tokens))


def peak_flops(device: torch.device) -> float | None:
    """Return a GPU's peak FLOP/s for dense bf16 from its data sheet, or None if unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    found = (gpu["tflops"] * 1e12 for gpu in known_gpus().values() if name in gpu["names"])
    return next(found, None)
