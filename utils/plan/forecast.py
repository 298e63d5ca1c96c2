"""How fast a run will be on GPUs that are not here: a forecast, from what was measured on one.

A step takes the longer of two times: that of its products and its attention at a share of the GPU's
peak, and that of its exchange with the other GPUs. The shares were measured on one H200 with
compiled layers (benchmarks/results/gpu), by the width of the model. The constants below that nobody
measured say so.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedConfig

from utils.config.arguments import ModelArguments
from utils.config.assumed import AssumedGpus
from utils.model.adapters import with_adapters
from utils.model.architecture import has_experts, without_weights
from utils.model.flops import TokenProducts, token_products

# Share of the peak in bf16 by width of the hidden states: `causal_mfu` of "Stoker, tuned" in
# gpt2_124m, qwen3_600m_sft, llama_1b_pretrain and llama_8b_lora.json.
SHARES = {768: 0.3612, 1024: 0.4292, 2048: 0.4884, 4096: 0.5157}
SOURCE = "shares of the peak as measured on an H200"
# Not measured here: several GPUs reach about this part of one GPU's share. The source is two rows
# of MosaicML's llm-foundry (8 H100, FSDP, 2,048 tokens, nothing recomputed): 46.4 % for 7 B, 41.8 %
# for 1 B, with attention counted whole. Counted as here, these are 0.87 and 0.80 of the shares
# above. Rows with recomputation are higher.
SEVERAL = 0.87
# Not measured: the factors for layers that are not compiled, products of experts, and float32
# instead of bf16 (TF32 has half the peak). Selective recomputation adds a third of the time of
# norms and the like in benchmarks/hardware/roofline.py.
NOT_COMPILED, OF_EXPERTS, FLOAT32, SELECTIVE = 0.8, 0.5, 0.5, 1.04
# Not measured: the share of a link that an exchange reaches, and the bytes per second and GPU of a
# network of unknown speed (200 Gbit/s).
LINK_SHARE, NETWORK = 0.8, 25e9


@dataclass(frozen=True)
class ModelProducts(TokenProducts):
    """The products of a token with a model's weights, and other sizes that determine a step's time.

    head: weights of the last layer. width: size of the hidden states. parameters: all, and trained.
    """

    head: int
    width: int
    has_experts: bool
    parameters: tuple[int, int]

    def step_flops(self, document_tokens: float, recomputed: str) -> float:
        """Return the FLOPs per token of a step; a token sees half of `document_tokens` on average.

        Full recomputation adds 2 per weight of the forward pass, and 4 per number of attention.
        """
        unseen = self.scores(document_tokens) / 2
        again = 2 * (self.forward - self.head) + 4 * unseen if recomputed == "full" else 0
        return self.flops(document_tokens) - 12 * unseen + again


@dataclass(frozen=True)
class Step:
    """The shape of a step: sequences per rank and micro-batch, and micro-batches per step."""

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
    # The class itself: from_config would split the weights over the ranks under ZeRO-3.
    plain = without_weights(config)
    experts = has_experts(plain)
    with torch.device("meta"):
        built = with_adapters(plain, model)
    counted = token_products(built)
    sizes = [(weight.numel(), weight.requires_grad) for weight in built.parameters()]
    return ModelProducts(
        counted.forward, counted.trained, counted.attention, text.vocab_size * text.hidden_size,
        text.hidden_size, experts,
        (sum(size for size, _ in sizes), sum(size for size, grad in sizes if grad)),
    )  # fmt: skip


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
    """Return the tokens per second of all GPUs together, with padding; their peak must be known."""
    assert gpus.flops is not None
    assert gpus.link is not None
    tokens = step.rows * step.length
    flops = products.step_flops(step.document_tokens, step.recomputed)
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
    """Return the bytes that a GPU sends per micro-batch, and once per step.

    Sharded weights are gathered twice, with 2 bytes each. Gradients are summed with 4 bytes each
    (DeepSpeed: 2).
    """
    if ranks == 1:
        return 0.0, 0.0
    weights, trained = (number * (ranks - 1) / ranks for number in products.parameters)
    return {
        "ddp": (0.0, 8 * trained), "zero1": (0.0, 4 * trained),
        "zero2": (2 * trained, 2 * trained), "zero3": (4 * weights + 2 * trained, 0.0),
    }.get(strategy, (4 * weights + 4 * trained, 0.0))  # fmt: skip
