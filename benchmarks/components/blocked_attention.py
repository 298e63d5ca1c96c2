"""Attention of documents on a CPU: out of our own products, or torch's kernel for each length."""

from collections.abc import Callable
from unittest import mock

import torch

TITLE = "Attention of documents of one length, 6 heads of 64, both passes"
UNIT = "tokens"
SIZES = (16, 64, 128, 300, 512, 1024)
TOKENS, HEADS, HEAD_DIM = 2048, 6, 64


def _timed(length: int, dtype: torch.dtype, blocked: bool) -> tuple[Callable[[], object], int]:
    from utils.kernels import per_document
    from utils.kernels.cpu_products import settle_products

    settle_products("cpu")
    tokens = TOKENS // length * length
    lengths = [length] * (tokens // length)
    random = torch.Generator().manual_seed(0)
    shape = (tokens, HEADS, HEAD_DIM)
    states = [torch.randn(shape, generator=random).to(dtype).requires_grad_() for _ in range(3)]
    gradient = torch.ones(shape, dtype=dtype)

    def call() -> None:
        for one in states:
            one.grad = None
        wanted = per_document.attends_in_blocks if blocked else lambda *_: False
        with mock.patch.object(per_document, "attends_in_blocks", wanted):
            query, key, value = states
            terms = per_document.ScoreTerms()
            attended = per_document.attend_by_lengths(query, key, value, lengths, terms)
        attended.backward(gradient)

    return call, tokens


def stoker(length: int) -> tuple[Callable[[], object], int]:
    """Attend in bf16 as a run does."""
    return _timed(length, torch.bfloat16, blocked=True)


def kernel(length: int) -> tuple[Callable[[], object], int]:
    """Attend in bf16 by torch's kernel, which takes short documents in float32."""
    return _timed(length, torch.bfloat16, blocked=False)


def stoker_float32(length: int) -> tuple[Callable[[], object], int]:
    """Attend in float32 as a run does."""
    return _timed(length, torch.float32, blocked=True)


def kernel_float32(length: int) -> tuple[Callable[[], object], int]:
    """Attend in float32 by torch's kernel."""
    return _timed(length, torch.float32, blocked=False)


BASELINES = {
    "Stoker": stoker,
    "torch's kernel, bf16": kernel,
    "Stoker, float32": stoker_float32,
    "torch's kernel, float32": kernel_float32,
}
