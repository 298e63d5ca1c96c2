"""Attention of short documents on a CPU: computed in float32, or in bf16 as it comes."""

from collections.abc import Callable
from unittest import mock

import torch

TITLE = "Attention of documents of one length, 6 heads of 64, bf16; Stoker computes it in float32"
UNIT = "tokens"
SIZES = (16, 64, 128, 192, 256, 384, 512)
TOKENS, HEADS, HEAD_DIM = 2048, 6, 64


def _timed(length: int, float32_up_to: int) -> tuple[Callable[[], object], int]:
    from utils.kernels import per_document

    tokens = TOKENS // length * length
    ends = torch.arange(0, tokens + 1, length, dtype=torch.int32)
    random = torch.Generator().manual_seed(0)
    shape = (tokens, HEADS, HEAD_DIM)
    states = [torch.randn(shape, generator=random).bfloat16().requires_grad_() for _ in range(3)]
    gradient = torch.ones(shape, dtype=torch.bfloat16)

    def call() -> None:
        for one in states:
            one.grad = None
        with mock.patch.object(per_document, "SHORT_ON_CPU", float32_up_to):
            attended = per_document.per_document_sdpa(
                *states, per_document.Documents(ends, length, length), per_document.ScoreTerms()
            )
        attended.backward(gradient)

    return call, tokens


def stoker(length: int) -> tuple[Callable[[], object], int]:
    """Compute all lengths in float32."""
    return _timed(length, length)


def half(length: int) -> tuple[Callable[[], object], int]:
    """Compute all lengths in bf16."""
    return _timed(length, 0)


BASELINES = {"Stoker": stoker, "in bf16": half}
