"""Attention on tensors without data: what a kernel keeps for its backward pass, and its result."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface

from utils.kernels.packed_varlen import packed_varlen
from utils.kernels.per_document import (
    Documents,
    ScoreTerms,
    attend_by_lengths,
    short_on_cpu,
)
from utils.kernels.varlen import VarlenKernel

NAME = "counted_attention"  # transformers looks for "flash", "sdpa" and the like inside a name
EVERYTHING = frozenset({"softcap", "sinks", "dropout"})


def register_counted_attention(lengths: Sequence[int] | None) -> str:
    """Register it and return its name; `lengths` of the documents on a CPU, None: a flash kernel.

    Which documents a micro-batch has is data, which is not there.
    """
    run = _flash if lengths is None else partial(_by_lengths, list(lengths))
    kernel = VarlenKernel(NAME, NAME, EVERYTHING, run, on_cuda_only=False)
    AttentionInterface.register(NAME, partial(packed_varlen, kernel=kernel))
    return NAME


def typical_lengths(lengths: Sequence[int], tokens: int) -> list[int]:
    """Return a few documents of `tokens` in all, as many of them in short ones as in `lengths`.

    Short documents are computed in float32 on a CPU, and kept in other ways than long ones.
    """
    limit = short_on_cpu()
    short = [length for length in lengths if length <= limit]
    long = [length for length in lengths if length > limit]
    in_short = round(tokens * sum(short) / max(1, sum(lengths)))
    found = _equal(in_short, short) + _equal(tokens - in_short, long)
    return [length for length in found if length]


def _equal(tokens: int, like: Sequence[int]) -> list[int]:
    """Cut `tokens` into documents as long as those, on the mean."""
    length = max(1, min(tokens, sum(like) // len(like))) if like else max(1, tokens)
    return [length] * (tokens // length) + [tokens % length]


def _by_lengths(
    lengths: list[int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _: Documents,
    terms: ScoreTerms,
) -> torch.Tensor:
    return attend_by_lengths(query, key, value, lengths, terms)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Documents | ScoreTerms,
) -> torch.Tensor:
    return counted_flash_attn(query, key, value)[0]


# Selective checkpointing keeps its results as it does those of the kernels it stands for.
@torch.library.custom_op("stoker::counted_flash_attn", mutates_args=())
def counted_flash_attn(
    query: torch.Tensor,
    key: torch.Tensor,  # noqa: ARG001 - kept for the backward pass
    value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the shapes of a flash kernel's output and of its softmax statistics, float32."""
    tokens, heads, _ = query.shape
    statistics = query.new_empty((heads, tokens), dtype=torch.float32)
    return query.new_empty((tokens, heads, value.shape[-1])), statistics


# An operator too, which needs the output's gradient: else the compiler's cut would compute all that
# comes of it with the forward pass.
@torch.library.custom_op("stoker::counted_flash_attn_backward", mutates_args=())
def counted_flash_attn_backward(
    gradient: torch.Tensor,  # noqa: ARG001 - needed, not read
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,  # noqa: ARG001 - kept for it, as a kernel's is
    statistics: torch.Tensor,  # noqa: ARG001 - kept for it
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the shapes of the gradients, and of the float32 in which queries' is added up."""
    wide = torch.empty_like(query, dtype=torch.float32)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), wide


def _backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor, ...]:
    return counted_flash_attn_backward(gradient, *ctx.saved_tensors)[:3]


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)


for _operator in (counted_flash_attn, counted_flash_attn_backward):
    _operator.register_fake(_operator._init_fn)
counted_flash_attn.register_autograd(_backward, setup_context=_keep)
