"""Causal attention of one document at a time with torch's SDPA, on any device in any dtype."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from utils.kernels.cpu_products import uses_onednn

HALF_TYPES = (torch.float16, torch.bfloat16)

# On a CPU, torch's kernel is slower in half precision than in float32 up to SHORT_ON_CPU tokens,
# and slower than oneDNN's batched products up to BLOCKED_ON_CPU tokens.
SHORT_ON_CPU, BLOCKED_ON_CPU = 256, 1024
QUERIES = 128  # queries of a batched product
SCORES = 2**21  # float32 scores that fit a CPU's caches


class Documents(NamedTuple):
    """Boundaries of documents, as indices into all tokens of a micro-batch.

    cu_seq_lens  int32 (n + 1,), 0 and the end of each document; the last value may be repeated
    max_length   upper bound of document lengths
    row_length   number of tokens of a packed sequence
    """

    cu_seq_lens: Tensor
    max_length: int
    row_length: int


class ScoreTerms(NamedTuple):
    """Options of an attention function.

    window: the number of tokens that a query sees, including its own token. sinks (heads,): extra
    logits in the softmax.
    """

    scale: float | None = None
    dropout: float = 0.0
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


# Document lengths are known only at run time, so this function cannot be compiled.
@torch.compiler.disable
def per_document_sdpa(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, terms: ScoreTerms
) -> Tensor:
    """Return causal attention inside each document, (tokens, heads, dim).

    SDPA is called once for all documents of the same length. If `cu_seq_lens` is on a GPU, reading
    the lengths blocks the host.
    """
    lengths = [length for length in documents.cu_seq_lens.diff().tolist() if length]
    assert sum(lengths) == query.shape[0], "cu_seq_lens must cover every token"
    if len(set(lengths)) == 1:  # views are enough
        query, key, value = (
            states.unflatten(0, (-1, lengths[0])).transpose(1, 2) for states in (query, key, value)
        )
        return causal_sdpa(query, key, value, terms).transpose(1, 2).flatten(0, 1)
    by_length: dict[int, list[int]] = {}
    for document, length in enumerate(lengths):
        blocked = _uses_blocks(query, length, terms)
        # oneDNN compiles code for each shape, so round lengths up. Causal attention cannot see the
        # padding after a document.
        by_length.setdefault(-(-length // 64) * 64 if blocked else length, []).append(document)
    # split and cat have one backward node each. Slices would create a zero-filled gradient of all
    # tokens for each document.
    pieces = [states.split(lengths) for states in (query, key, value)]
    outputs: list[Tensor] = [query] * len(lengths)
    for length, members in by_length.items():
        rows, keys, values = (
            torch.stack([_padded(part[document], length) for document in members]).transpose(1, 2)
            for part in pieces
        )
        attended = causal_sdpa(rows, keys, values, terms).transpose(1, 2)
        for document, output in zip(members, attended, strict=True):
            outputs[document] = output[: lengths[document]]
    return torch.cat(outputs)


def _padded(states: Tensor, length: int) -> Tensor:
    missing = length - len(states)
    return functional.pad(states, (0, 0, 0, 0, 0, missing)) if missing else states


def causal_sdpa(query: Tensor, key: Tensor, value: Tensor, terms: ScoreTerms) -> Tensor:
    """Return causal attention (batch, heads, length, dim). Key and value may have fewer heads."""
    if terms.softcap is not None or terms.sinks is not None:
        return _explicit_attention(query, key, value, terms)
    length = query.shape[2]
    if terms.window is not None and terms.window >= length:
        terms = terms._replace(window=None)  # the window hides nothing
    blocked = _uses_blocks(query, length, terms)
    short = query.device.type == "cpu" and length <= SHORT_ON_CPU
    if query.dtype in HALF_TYPES and (blocked or short):
        with torch.autocast("cpu", enabled=False):  # autocast would cast back to half precision
            attended = causal_sdpa(query.float(), key.float(), value.float(), terms)
        return attended.to(query.dtype)
    if blocked:
        return _blocked_attention(query, key, value, terms.scale)
    mask = None if terms.window is None else _causal_mask(length, terms.window, query.device)
    grouped = query.shape[1] != key.shape[1]
    # On CUDA only half-precision kernels without mask support grouped heads. Otherwise torch would
    # use a kernel that keeps all scores in memory.
    native = not query.is_cuda or (query.dtype in HALF_TYPES and mask is None)
    if grouped and not native:
        repeats = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(repeats, dim=1) for states in (key, value))
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=terms.dropout, is_causal=mask is None,
        scale=terms.scale, enable_gqa=grouped and native,
    )  # fmt: skip


def _uses_blocks(query: Tensor, length: int, terms: ScoreTerms) -> bool:
    plain = terms._replace(scale=None, window=None) == ScoreTerms()
    whole = terms.window is None or terms.window >= length
    supported = query.device.type == "cpu" and query.dtype in (torch.float32, *HALF_TYPES)
    return plain and whole and supported and length <= BLOCKED_ON_CPU and uses_onednn()


def _blocked_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Return causal attention, computed by oneDNN in blocks of QUERIES queries.

    A step on packed chats takes 16 % less time with this function than with SDPA.
    """
    heads, length, _ = query.shape[1:]
    # Split the batch into powers of two, because oneDNN compiles code for each shape.
    max_rows = max(1, SCORES // (heads * min(QUERIES, length) * length))
    sizes: list[int] = []
    while remaining := len(query) - sum(sizes):
        sizes.append(1 << (min(remaining, max_rows).bit_length() - 1))
    splits = (states.split(sizes) for states in (query, key, value))
    return torch.cat([_attend_in_blocks(scale, *part) for part in zip(*splits, strict=True)])


def _attend_in_blocks(scale: float | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention, computed for one block of queries and its visible keys at a time."""
    rows, heads, length, dim = query.shape
    pairs = rows * key.shape[1]  # (row, key head) pairs, each with several query heads
    query = (query * (dim**-0.5 if scale is None else scale)).reshape(pairs, -1, length, dim)
    key, value = (states.reshape(pairs, length, -1) for states in (key, value))
    mask = torch.full((QUERIES, QUERIES), -torch.inf, device=query.device).triu_(1)
    outputs = []
    for begin, queries in zip(range(0, length, QUERIES), query.split(QUERIES, 2), strict=True):
        stop = begin + queries.shape[2]
        scores = torch.bmm(queries.flatten(1, 2), key[:, :stop].mT).unflatten(1, (-1, stop - begin))
        with torch.no_grad():  # adding a constant does not change the gradient
            scores[..., begin:] += mask[: stop - begin, : stop - begin]
        weights = scores.softmax(-1).flatten(1, 2)
        attended = torch.bmm(weights, value[:, :stop])
        outputs.append(attended.unflatten(1, (-1, stop - begin)))
    return torch.cat(outputs, 2).reshape(rows, heads, length, -1)


def _explicit_attention(query: Tensor, key: Tensor, value: Tensor, terms: ScoreTerms) -> Tensor:
    """Return causal attention with soft caps (Gemma 2) or sinks, which SDPA does not support.

    A sink (gpt-oss) is an extra logit in the softmax that has no value vector.
    """
    length, heads = query.shape[2], query.shape[1]
    key, value = (s.repeat_interleave(heads // s.shape[1], dim=1) for s in (key, value))
    scale = query.shape[-1] ** -0.5 if terms.scale is None else terms.scale
    scores = query @ key.transpose(2, 3) * scale
    if terms.softcap is not None:
        scores = terms.softcap * torch.tanh(scores / terms.softcap)
    visible = _causal_mask(length, terms.window, query.device)
    scores = scores.float().masked_fill(~visible, -torch.inf)
    if terms.sinks is not None:
        sinks = terms.sinks.float().view(1, -1, 1, 1).expand(len(scores), -1, length, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., :length]
    return functional.dropout(weights, terms.dropout).to(value.dtype) @ value


def _causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """Return a bool (query, key) mask, True where a query sees a key."""
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return causal if window is None else causal.triu(1 - window)
