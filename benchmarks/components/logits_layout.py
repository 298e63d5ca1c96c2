"""The three products of a loss head on a CPU, with logits as (V, tokens) or as (tokens, V)."""

from collections.abc import Callable

import torch

TITLE = (
    "Products of a loss head, 1,024 tokens of width 384, bf16; Stoker's logits lie as (V, tokens)"
)
UNIT = "tokens"
SIZES = (32_000, 64_000)
TOKENS, WIDTH = 1024, 384


def _made(vocabulary: int) -> list[torch.Tensor]:
    shapes = ((TOKENS, WIDTH), (vocabulary, WIDTH), (TOKENS, WIDTH), (vocabulary, WIDTH))
    return [torch.randn(shape).bfloat16() for shape in shapes]


def stoker(vocabulary: int) -> tuple[Callable[[], object], int]:
    """Logits as (V, tokens)."""
    hidden, weight, hidden_gradient, weight_gradient = _made(vocabulary)
    logits = weight.new_empty(vocabulary, TOKENS)

    def call() -> None:
        torch.mm(weight, hidden.T, out=logits)
        torch.mm(logits.T, weight, out=hidden_gradient)
        torch.mm(logits, hidden, out=weight_gradient)

    return call, TOKENS


def by_tokens(vocabulary: int) -> tuple[Callable[[], object], int]:
    """Logits as (tokens, V)."""
    hidden, weight, hidden_gradient, weight_gradient = _made(vocabulary)
    logits = weight.new_empty(TOKENS, vocabulary)

    def call() -> None:
        torch.mm(hidden, weight.T, out=logits)
        torch.mm(logits, weight, out=hidden_gradient)
        torch.mm(logits.T, hidden, out=weight_gradient)

    return call, TOKENS


BASELINES = {"Stoker": stoker, "logits as (tokens, V)": by_tokens}
