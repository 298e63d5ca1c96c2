"""A forecast of a run's speed on the GPUs of another machine.

A step takes the longer of two times: the time of its matrix products and attention, and the time of
its exchange with the other GPUs. Products and attention reach only a share of the GPU's peak speed.
This share depends on the model's width. It was measured on one H200 with compiled layers
(benchmarks/results/gpu). A comment marks each constant below that nobody measured.
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
# Not measured here: each of several GPUs reaches about this part of a single GPU's share. The
# source is two rows of a table in MosaicML's llm-foundry (8 H100, FSDP, 2,048 tokens, nothing
# recomputed): 46.4 % of the peak for 7 B parameters, 41.8 % for 1 B. The table counts attention as
# if there were no causal mask. Counted as in this module, the two are 0.87 and 0.80 of the shares
# above. The table's rows with recomputation are higher.
SEVERAL = 0.87
# Not measured: factors on the share for layers that are not compiled, for experts, and for float32
# instead of bf16 (the peak of TF32 is half). SELECTIVE is a factor on the time: recomputation
# repeats a third of the time of norms and the like in benchmarks/hardware/roofline.py.
NOT_COMPILED, OF_EXPERTS, FLOAT32, SELECTIVE = 0.8, 0.5, 0.5, 1.04
# Not measured: the share of a link's speed that an exchange reaches. The network's speed is not
# known: 200 Gbit/s per GPU are assumed, in bytes per second.
LINK_SHARE, NETWORK = 0.8, 25e9


@dataclass(frozen=True)
class ModelProducts(TokenProducts):
    """The multiplications per token and other sizes of a model that determine a step's time.

    head: number of weights of the output layer. width: size of the hidden states. parameters:
    number of all parameters, and of the trained ones.
    """

    head: int
    width: int
    has_experts: bool
    parameters: tuple[int, int]

    def step_flops(self, document_tokens: float, recomputed: str) -> float:
        """Return the FLOPs per token of a step. A token sees half of its document on average.

        Full recomputation repeats the forward pass without the output layer. It adds 2 FLOPs per
        weight, and in attention 4 per head, head dimension and visible token.
        """
        unseen = self.scores(document_tokens) / 2
        again = 2 * (self.forward - self.head) + 4 * unseen if recomputed == "full" else 0
        return self.flops(document_tokens) - 12 * unseen + again


@dataclass(frozen=True)
class Step:
    """The shape of a step, and how it is computed.

    rows: sequences per rank and micro-batch. accumulation: micro-batches per step. length: tokens
    per sequence. document_tokens: mean, over all tokens, of the length of the token's document.
    recomputed: the activation checkpointing.
    """

    rows: int
    accumulation: int
    length: int
    document_tokens: float
    recomputed: str
    compiled: bool
    bf16: bool


def model_products(model: ModelArguments, config: PreTrainedConfig) -> ModelProducts:
    """Count the multiplications and weights of a model on the meta device."""
    text = config.get_text_config(decoder=True)
    # Call the class: AutoModel.from_config would split the weights over the ranks under ZeRO-3.
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
    """Return the share of the GPU's bf16 peak that the matrix products of a step reach."""
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
    """Return tokens per second of all GPUs together, padding included. Needs `gpus.flops`."""
    assert gpus.flops is not None
    assert gpus.link is not None
    tokens = step.rows * step.length
    flops = products.step_flops(step.document_tokens, step.recomputed)
    work_s = tokens * flops / (share_of_peak(products, step, gpus.world_size) * gpus.flops)
    # The exchange is a ring through all GPUs. Between nodes it uses one network card per GPU.
    link = gpus.link if gpus.nodes == 1 else min(gpus.link, gpus.per_node * NETWORK)
    per_micro_batch, at_the_end = exchanged_bytes(products, strategy, gpus.world_size)
    each_s = max(work_s, per_micro_batch / (link * LINK_SHARE))
    # The exchange at the end overlaps with the last backward pass, 2/3 of a micro-batch's time.
    last_s = max(at_the_end / (link * LINK_SHARE) - work_s * 2 / 3, 0)
    step_s = step.accumulation * each_s + last_s
    return tokens * step.accumulation * gpus.world_size / step_s


def exchanged_bytes(products: ModelProducts, strategy: str, ranks: int) -> tuple[float, float]:
    """Return the bytes that each GPU sends: (per micro-batch, at the end of each step).

    Sharded weights are gathered for the forward and the backward pass, with 2 bytes each. Gradients
    are summed over the ranks with 4 bytes each (DeepSpeed: 2).
    """
    if ranks == 1:
        return 0.0, 0.0
    weights, trained = (number * (ranks - 1) / ranks for number in products.parameters)
    return {
        "ddp": (0.0, 8 * trained), "zero1": (0.0, 4 * trained),
        "zero2": (2 * trained, 2 * trained), "zero3": (4 * weights + 2 * trained, 0.0),
    }.get(strategy, (4 * weights + 4 * trained, 0.0))  # fmt: skip
