"""Causal attention document by document through SDPA: any device, any dtype."""

from typing import NamedTuple

import torch
from torch.nn import functional

from utils.kernels.blocked_attention import LONGEST, attends_in_blocks, blocked_attention
from utils.kernels.cpu_products import by_onednn

HALF_TYPES = (torch.float16, torch.bfloat16)

# Up to this length torch's kernel for CPUs is faster in float32 than in half precision: 1.2 times
# at 256 tokens, 2.3 at 128, 5 at 16 (docs/experiments.md).
SHORT_ON_CPU = 256


def short_on_cpu() -> int:
    """Return up to which length documents on a CPU go another way than longer ones."""
    return LONGEST if by_onednn() else SHORT_ON_CPU


class Documents(NamedTuple):
    """Where documents lie: `cu_seq_lens` int32 (n + 1,), the last value repeated as padding.

    No document is longer than `max_length`, nor than a row of `row_length` tokens.
    """

    cu_seq_lens: torch.Tensor
    max_length: int
    row_length: int


class ScoreTerms(NamedTuple):
    """What shapes the scores besides queries and keys; `window` counts the query's own token."""

    scale: float | None = None
    dropout: float = 0.0
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


# Which lengths there are is known at run time alone: compiled layers call it as it is.
@torch.compiler.disable
def per_document_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    terms: ScoreTerms,
) -> torch.Tensor:
    """Run SDPA document by document: any device, any dtype, no (tokens, tokens) mask.

    Documents of one length go through one call. Reads the lengths on the host, which waits for
    the device when `cu_seq_lens` is not on the CPU.
    """
    lengths = [length for length in documents.cu_seq_lens.diff().tolist() if length]
    return attend_by_lengths(query, key, value, lengths, terms)


def attend_by_lengths(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    terms: ScoreTerms,
) -> torch.Tensor:
    """Attend in documents of these lengths, which lie end to end: (tokens, heads, dim)."""
    assert sum(lengths) == query.shape[0], "cu_seq_lens must cover every token"
    if _blocked(query, max(lengths), terms):
        return blocked_attention(query, key, value, lengths, _scale(query, terms))
    if len(set(lengths)) == 1:  # whole rows, say: nothing has to be gathered
        query, key, value = (
            states.unflatten(0, (-1, lengths[0])).transpose(1, 2) for states in (query, key, value)
        )
        return causal_sdpa(query, key, value, terms).transpose(1, 2).flatten(0, 1)
    same_length: dict[int, list[int]] = {}
    short: list[int] = []
    for document, length in enumerate(lengths):
        own = short if _blocked(query, length, terms) else same_length.setdefault(length, [])
        own.append(document)
    # split and cat have one backward node each; a slice per document would have a zero-filled
    # gradient of all tokens per document.
    pieces = [states.split(lengths) for states in (query, key, value)]
    outputs: list[torch.Tensor] = [query] * len(lengths)
    if short:
        joined = [torch.cat([part[document] for document in short]) for part in pieces]
        parts = [lengths[document] for document in short]
        attended = blocked_attention(*joined, parts, _scale(query, terms))
        for document, output in zip(short, attended.split(parts), strict=True):
            outputs[document] = output
    for members in same_length.values():
        rows = [torch.stack([part[document] for document in members]) for part in pieces]
        query_rows, key_rows, value_rows = (states.transpose(1, 2) for states in rows)
        attended = causal_sdpa(query_rows, key_rows, value_rows, terms)
        for document, output in zip(members, attended.transpose(1, 2).unbind(), strict=True):
            outputs[document] = output
    return torch.cat(outputs)


def _blocked(query: torch.Tensor, longest: int, terms: ScoreTerms) -> bool:
    """Whether documents up to this length go through products of our own."""
    plain = terms.softcap is None and terms.sinks is None and not terms.dropout
    windowed = terms.window is not None and longest > terms.window
    return plain and not windowed and attends_in_blocks(query, longest)


def _scale(query: torch.Tensor, terms: ScoreTerms) -> float:
    return query.shape[-1] ** -0.5 if terms.scale is None else terms.scale


def causal_sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: ScoreTerms
) -> torch.Tensor:
    """Attend causally within each row: (rows, heads, length, dim), fewer kv heads allowed."""
    if terms.softcap is not None or terms.sinks is not None:
        return _explicit_attention(query, key, value, terms)
    length = query.shape[2]
    if query.device.type == "cpu" and query.dtype in HALF_TYPES and length <= SHORT_ON_CPU:
        with torch.autocast("cpu", enabled=False):  # which would make them narrow again
            attended = causal_sdpa(query.float(), key.float(), value.float(), terms)
        return attended.to(query.dtype)
    windowed = terms.window is not None and length > terms.window
    mask = _visible(length, terms.window, query.device) if windowed else None
    grouped = query.shape[1] != key.shape[1]
    # CUDA has grouped heads in its half precision kernels alone: the rest would fall back to the
    # one that keeps all scores in memory.
    native = not query.is_cuda or (query.dtype in HALF_TYPES and mask is None)
    if grouped and not native:
        repeats = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(repeats, dim=1) for states in (key, value))
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=terms.dropout,
        is_causal=mask is None,
        scale=terms.scale,
        enable_gqa=grouped and native,
    )


def _explicit_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: ScoreTerms
) -> torch.Tensor:
    """Attend with all scores in memory, as SDPA has neither soft caps nor sinks.

    Soft caps as in Gemma 2 (arXiv 2408.00118, section 2), sinks as in gpt-oss: one more logit per
    head that takes weight and gives no value.
    """
    length, heads = query.shape[2], query.shape[1]
    key, value = (s.repeat_interleave(heads // s.shape[1], dim=1) for s in (key, value))
    scale = query.shape[-1] ** -0.5 if terms.scale is None else terms.scale
    scores = query @ key.transpose(2, 3) * scale
    if terms.softcap is not None:
        scores = terms.softcap * torch.tanh(scores / terms.softcap)
    scores = scores.float().masked_fill(~_visible(length, terms.window, query.device), -torch.inf)
    if terms.sinks is not None:
        sinks = terms.sinks.float().view(1, -1, 1, 1).expand(len(scores), -1, length, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., :length]
    return functional.dropout(weights, terms.dropout).to(value.dtype) @ value


def _visible(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return the (query, key) mask that is True where a query sees a key."""
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return causal if window is None else causal.triu(1 - window)
