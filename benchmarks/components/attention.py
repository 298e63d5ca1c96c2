"""Causal attention inside each document of one packed row, forward and backward."""

from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional

TITLE = (
    "Attention in a packed sequence (documents of 300 tokens), 6 heads of size 64, bf16, "
    "forward and backward, by sequence length"
)
UNIT = "tokens"
SIZES = (2048, 4096, 8192)
HEADS, HEAD_DIM, MEAN, SIGMA = 6, 64, 300, 0.8


def boundaries(length: int) -> torch.Tensor:
    """Return where documents begin, and the end: int32."""
    random = np.random.default_rng(0)
    drawn = random.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, size=length).astype(np.int64)
    ends = np.cumsum(np.maximum(drawn, 8))
    return torch.tensor([0, *ends[ends < length].tolist(), length], dtype=torch.int32)


def _inputs(length: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    shape = (1, HEADS, length, HEAD_DIM)
    return [
        torch.randn(shape, generator=random, dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    ]


def _timed(length: int, attend: Callable[..., torch.Tensor]) -> tuple[Callable[[], object], int]:
    inputs = _inputs(length)
    gradient = torch.ones(1, length, HEADS, HEAD_DIM, dtype=torch.bfloat16)

    def call() -> None:
        for states in inputs:
            states.grad = None
        attend(*inputs).backward(gradient)

    return call, length


def stoker(length: int) -> tuple[Callable[[], object], int]:
    """Attend as our models do."""
    from utils.kernels.cpu_products import choose_products
    from utils.kernels.varlen import packed_varlen

    choose_products()
    module, ends = torch.nn.Module(), boundaries(length)

    def attend(*states: torch.Tensor) -> torch.Tensor:
        return packed_varlen(module, *states, cu_seq_lens_q=ends, max_length_q=length)[0]

    return _timed(length, attend)


def masked_sdpa(length: int) -> tuple[Callable[[], object], int]:
    """Attend with a block mask of all pairs of tokens, as transformers does under sdpa."""
    ends = boundaries(length).long()
    document = torch.bucketize(torch.arange(length), ends[1:], right=True)
    mask = (document[:, None] == document[None, :]).tril()[None, None]

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return attended.transpose(1, 2).contiguous()

    return _timed(length, attend)


BASELINES = {"Stoker": stoker, "sdpa with a block mask": masked_sdpa}
