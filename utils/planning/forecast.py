"""How fast a run will be on GPUs that are not here: a forecast, from what was measured on one.

A step takes as long as its products and its attention take at a share of the GPU's peak, or as its
exchange with the other GPUs, whichever is longer. The shares are those that Stoker reached on one
H200 with compiled layers (benchmarks/results/gpu), by the width of the model. What was not measured
is taken as said beside the constants below.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from utils.config.arguments import ModelArguments
from utils.config.assumed import AssumedGpus
from utils.data.packing import PackPlan
from utils.model.adapters import with_adapters
from utils.model.architecture import (
    EXPERTS,
    EXPERTS_PER_TOKEN,
    LAYER_TYPES,
    causal_lm_class,
    first_set,
)

# Share of the peak in bf16 by width of the hidden states: `causal_mfu` of "Stoker, tuned" in
# gpt2_124m, qwen3_600m_sft, llama_1b_pretrain and llama_8b_lora.json.
SHARES = {768: 0.3612, 1024: 0.4292, 2048: 0.4884, 4096: 0.5157}
SOURCE = "shares of the peak as measured on an H200"
# Of one GPU's share several reach this: on eight H100 under FSDP MosaicML's llm-foundry has 41.8 %
# for 1 B parameters and 46.4 % for 7 B, where one GPU has 48.8 and 51.6 here.
SEVERAL = 0.87
# Not measured: layers that are not compiled, products of experts, float32 instead of bf16 (TF32 has
# half the peak), and what selective recomputation adds, a third of what norms and the like take in
# benchmarks/hardware/roofline.py.
NOT_COMPILED, OF_EXPERTS, FLOAT32, SELECTIVE = 0.8, 0.5, 0.5, 1.04
# Of a link; and of a network between nodes of unknown speed: 200 Gbit/s for each GPU.
LINK_SHARE, NETWORK = 0.8, 25e9


@dataclass(frozen=True)
class ModelProducts:
    """What a token is multiplied by.

    forward: weights (of experts those it is routed to); trained: those with gradients among them;
    head: the last layer's. width: of the hidden states. attention: heads x head dimension and, if
    it attends in a window, its length, of each layer that attends. parameters: all, trained or not.
    """

    forward: float
    trained: float
    head: int
    width: int
    attention: tuple[tuple[int, int | None], ...]
    has_experts: bool
    parameters: tuple[int, int]

    def flops(self, document_tokens: float, recomputed: str) -> float:
        """Return the FLOPs a token of a step; it sees half of `document_tokens` on average.

        2 for each weight of the forward pass, 2 for the gradient of what came in, 2 for that of a
        trained weight; 4 for each number of attention, and 8 in the backward pass.
        """
        scores = sum(size * min(document_tokens, window or math.inf) / 2
                     for size, window in self.attention)  # fmt: skip
        again = 2 * (self.forward - self.head) + 4 * scores if recomputed == "full" else 0
        return 4 * self.forward + 2 * self.trained + 12 * scores + again


@dataclass(frozen=True)
class Step:
    """How a step is done: sequences of a rank at a time, and how often before the optimizer."""

    rows: int
    accumulation: int
    length: int
    document_tokens: float
    recomputed: str
    compiled: bool
    bf16: bool


def model_products(model: ModelArguments, config: PreTrainedConfig) -> ModelProducts:
    """Count a model's products on the meta device."""
    text = config.get_text_config(decoder=True)
    experts, routed = first_set(text, EXPERTS), first_set(text, EXPERTS_PER_TOKEN) or 1
    with torch.device("meta"):
        # The class itself: from_config would split the weights over the ranks under ZeRO-3.
        built = with_adapters(causal_lm_class(config)(config), model)
    forward = trained = 0.0
    for name, module in built.named_modules():
        linear = isinstance(module, nn.Linear | Conv1D)
        for weight in module.parameters(recurse=False):
            if weight.dim() != (2 if linear else 3):
                continue
            among_experts = experts and (".experts." in f".{name}." or weight.shape[0] == experts)
            used = weight.numel() * (routed / experts if among_experts and experts else 1)
            forward += used
            trained += used * weight.requires_grad
    sizes = [(weight.numel(), weight.requires_grad) for weight in built.parameters()]
    return ModelProducts(
        forward, trained, text.vocab_size * text.hidden_size, text.hidden_size, _attention(text),
        experts is not None, (sum(size for size, _ in sizes), sum(n for n, grad in sizes if grad)),
    )  # fmt: skip


def _attention(text: PreTrainedConfig) -> tuple[tuple[int, int | None], ...]:
    heads = getattr(text, "num_attention_heads", 0)
    size = heads * (getattr(text, "head_dim", None) or text.hidden_size // max(heads, 1))
    layers: int = getattr(text, "num_hidden_layers", 0)
    kinds = [str(kind) for kind in first_set(text, LAYER_TYPES) or ["full_attention"] * layers]
    window = getattr(text, "sliding_window", None)
    return tuple(
        (size, window if "sliding" in kind else None) for kind in kinds if "attention" in kind
        and "linear" not in kind
    )  # fmt: skip


def document_tokens(plans: Sequence[PackPlan]) -> float:
    """Return how long the document is that a token is in, on average over tokens."""
    lengths = np.concatenate([plan.segments.lengths for plan in plans]).astype(np.float64)
    return float((lengths**2).sum() / lengths.sum())


def share_of_peak(products: ModelProducts, step: Step, ranks: int) -> float:
    """Return the share of the peak in bf16 that the products of a step reach."""
    widths = np.log([*SHARES])
    share = float(np.interp(math.log(products.width), widths, [*SHARES.values()]))
    factors = (
        (SEVERAL, ranks > 1),
        (NOT_COMPILED, not step.compiled),
        (OF_EXPERTS, products.has_experts),
        (FLOAT32, not step.bf16),
        (1 / SELECTIVE, step.recomputed == "selective"),
    )
    return share * math.prod(factor for factor, applies in factors if applies)


def tokens_per_s(products: ModelProducts, step: Step, strategy: str, gpus: AssumedGpus) -> float:
    """Return the tokens a second of all GPUs together, padding counted; their peak is known."""
    assert gpus.flops is not None
    assert gpus.link is not None
    tokens = step.rows * step.length
    flops = products.flops(step.document_tokens, step.recomputed)
    work_s = tokens * flops / (share_of_peak(products, step, gpus.world_size) * gpus.flops)
    # A ring through all GPUs leaves a node by as many network cards as it has GPUs.
    link = gpus.link if gpus.nodes == 1 else min(gpus.link, gpus.per_node * NETWORK)
    per_micro_batch, at_the_end = exchanged_bytes(products, strategy, gpus.world_size)
    each_s = max(work_s, per_micro_batch / (link * LINK_SHARE))
    # The last backward pass, two thirds of a micro-batch, hides what is exchanged at the end.
    last_s = max(at_the_end / (link * LINK_SHARE) - work_s * 2 / 3, 0)
    step_s = step.accumulation * each_s + last_s
    return tokens * step.accumulation * gpus.world_size / step_s


def exchanged_bytes(products: ModelProducts, strategy: str, ranks: int) -> tuple[float, float]:
    """Return what a GPU sends for a micro-batch, and once a step.

    Sharded weights are gathered twice in 2 bytes, their gradients added up in 4 (DeepSpeed: 2).
    """
    if ranks == 1:
        return 0.0, 0.0
    weights, trained = (number * (ranks - 1) / ranks for number in products.parameters)
    return {
        "ddp": (0.0, 8 * trained), "zero1": (0.0, 4 * trained),
        "zero2": (2 * trained, 2 * trained), "zero3": (4 * weights + 2 * trained, 0.0),
    }.get(strategy, (4 * weights + 4 * trained, 0.0))  # fmt: skip
