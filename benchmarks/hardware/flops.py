"""Model FLOPs per token: those of the mathematics of a training step, not of its kernels.

The convention of torchtitan, nanochat and TRL: 6 for each weight that multiplies the tokens (the
last layer counts once, tied or not; the embedding does not), and 12 * layers * heads * head_dim *
T_eff for attention, as if no token were masked. Frozen weights count 4: they get no gradient.
Recomputed activations are not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from benchmarks.cells.shapes import ModelShape


@dataclass(frozen=True)
class ModelSize:
    """The sizes from which FLOPs and moved bytes are computed.

    `linear` are weights that multiply tokens, `adapters` those of LoRA among all `parameters`,
    which are then frozen; `inner` is the MLP's width; `attention` is layers * heads * head_dim.
    """

    parameters: int
    linear: int
    adapters: int
    layers: int
    hidden: int
    inner: int
    attention: int
    vocabulary: int

    @property
    def trained(self) -> int:
        """How many parameters an optimizer steps."""
        return self.adapters or self.parameters

    def linear_flops(self) -> float:
        """Return the FLOPs a token of all products with weights, both passes."""
        return 4 * self.linear + 6 * self.adapters if self.adapters else 6 * self.linear

    def attention_flops(self, effective_length: float) -> float:
        """Return the FLOPs a token of attention, both passes, no token masked."""
        return 12 * self.attention * effective_length

    def flops(self, effective_length: float) -> float:
        """Return the model FLOPs a token."""
        return self.linear_flops() + self.attention_flops(effective_length)


def model_size(shape: ModelShape, lora_rank: int = 0) -> ModelSize:
    """Measure a model of this shape without allocating it."""
    config = AutoConfig.for_model(**shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    products = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }
    adapted = (module for name, module in products.items() if name != "lm_head")
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size  # GPT-2's
    return ModelSize(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        linear=sum(module.weight.numel() for module in products.values()),
        adapters=lora_rank * sum(sum(module.weight.shape) for module in adapted),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        inner=inner,
        attention=config.num_hidden_layers * heads * head_dim,
        vocabulary=config.vocab_size,
    )


def effective_length(lengths: Sequence[int]) -> float:
    """Return how many tokens a token sees, were none masked, on average over documents."""
    return sum(length * length for length in lengths) / sum(lengths)
