"""Causal attention on a CPU out of batched float32 products, some queries at a time.

torch's kernel for CPUs multiplies small tiles by MKL. Where oneDNN is the faster library, products
of 128 queries with all the keys that they may see, and torch's softmax between them, take less time
for documents of up to 1,024 tokens, in float32 of 512 (docs/experiments.md). In half precision
scores and sums are float32 all the same.

oneDNN makes code for each shape, half a millisecond and a megabyte of it, so shapes are few:
documents are filled up to some lengths, and a power of two of them goes together. What fills one up
comes behind it, where none of its queries looks.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from utils.kernels.cpu_products import by_onednn

LONGEST = 1024  # documents: one bound for all types, above which torch's kernel is as fast
QUERIES = 128  # at a time
SCORES = 2**21  # of them at a time, in float32: what the caches hold
SHORTEST, LENGTH_STEP = 16, 64
COMPUTED = (torch.bfloat16, torch.float16, torch.float32)


def attends_in_blocks(query: torch.Tensor, length: int) -> bool:
    """Whether it is the faster way for documents of this length."""
    suits = query.device.type == "cpu" and query.dtype in COMPUTED and length <= LONGEST
    return suits and by_onednn()


def filled_length(length: int) -> int:
    """Return up to how many tokens a document is filled: 16, 32, or a multiple of 64."""
    if length <= LENGTH_STEP // 2:
        return SHORTEST if length <= SHORTEST else LENGTH_STEP // 2
    return -(-length // LENGTH_STEP) * LENGTH_STEP


@torch.library.custom_op("stoker::blocked_attention", mutates_args=())
def blocked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """Attend causally in documents that lie end to end: (tokens, heads, dim), fewer key heads.

    Keeps its inputs alone for the backward pass, and computes the weights again there.
    """
    output = query.new_empty((*query.shape[:2], value.shape[-1]))
    with torch.autocast("cpu", enabled=False):
        for group in _groups(lengths, query.shape[1]):
            group.put(output, _Group(group, (query, key, value), scale).attended())
    return output


@torch.library.custom_op("stoker::blocked_attention_backward", mutates_args=())
def blocked_attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values."""
    found = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    with torch.autocast("cpu", enabled=False):
        for group in _groups(lengths, query.shape[1]):
            own = _Group(group, (query, key, value), scale).gradients(group.take(gradient))
            for whole, part in zip(found, own, strict=True):
                group.put(whole, part)
    return found


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output
    *states, ctx.lengths, ctx.scale = inputs
    ctx.save_for_backward(*states)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    gradients = blocked_attention_backward(
        gradient.contiguous(), *ctx.saved_tensors, ctx.lengths, ctx.scale
    )
    return *gradients, None, None


@blocked_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    del key
    return query.new_empty((*query.shape[:2], value.shape[-1]))


@blocked_attention_backward.register_fake
def _(gradient: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    del gradient
    return tuple(torch.empty_like(one) for one in given[:3])


blocked_attention.register_autograd(_backward, setup_context=_keep)


class _Place(NamedTuple):
    """Documents of about one length: where each begins, how long it is, all filled to `length`."""

    begins: list[int]
    lengths: list[int]
    length: int

    def take(self, states: torch.Tensor) -> torch.Tensor:
        """Return (tokens, heads, dim) as float32 (documents, heads, length, dim): zeros behind."""
        if self._end_to_end():
            own = states[self.begins[0] :][: len(self.begins) * self.length]
            return own.unflatten(0, (-1, self.length)).transpose(1, 2).float()
        filled = [
            functional.pad(states[begin : begin + own].float(), (0, 0, 0, 0, 0, self.length - own))
            for begin, own in zip(self.begins, self.lengths, strict=True)
        ]
        return torch.stack(filled).transpose(1, 2)

    def put(self, states: torch.Tensor, own: torch.Tensor) -> None:
        """Write (documents, heads, length, dim) where the documents lie."""
        own = own.transpose(1, 2)
        if self._end_to_end():
            whole = states[self.begins[0] :][: len(self.begins) * self.length]
            whole.view_as(own).copy_(own)
            return
        for begin, length, part in zip(self.begins, self.lengths, own, strict=True):
            states[begin : begin + length] = part[:length]

    def _end_to_end(self) -> bool:
        full = all(length == self.length for length in self.lengths)
        return full and self.begins == list(
            range(self.begins[0], self.begins[0] + len(self.begins) * self.length, self.length)
        )


def _groups(lengths: Sequence[int], heads: int) -> Iterator[_Place]:
    """Yield documents that go together: as many as their scores allow, a power of two."""
    alike: dict[int, list[tuple[int, int]]] = {}
    begin = 0
    for own in lengths:
        if own:
            alike.setdefault(filled_length(own), []).append((begin, own))
        begin += own
    for length, members in alike.items():
        most = max(1, SCORES // (heads * min(QUERIES, length) * length))
        done = 0
        while done < len(members):
            count = 1 << (min(len(members) - done, most).bit_length() - 1)
            some = members[done : done + count]
            yield _Place([begin for begin, _ in some], [own for _, own in some], length)
            done += count


class _Group:
    """A group in float32: N pairs of a document and a key head, each with G query heads.

    queries (N, G, L, D), scaled; keys (N, L, D) and values (N, L, E).
    """

    def __init__(self, place: _Place, states: tuple[torch.Tensor, ...], scale: float):
        query, key, value = (place.take(one) for one in states)
        documents, heads, length, dim = query.shape
        pairs = documents * key.shape[1]
        self.scale = scale
        self.queries = (query * scale).reshape(pairs, -1, length, dim)
        self.keys = key.reshape(pairs, length, dim)
        self.values = value.reshape(pairs, length, -1)
        self.buffer = self.queries.new_empty(documents * heads * min(QUERIES, length) * length)
        self.later = torch.full((QUERIES, QUERIES), -torch.inf, device=query.device).triu_(1)
        self.documents = documents

    def attended(self) -> torch.Tensor:
        """Return the values that queries attend to, (documents, heads, L, E)."""
        found = self.queries.new_empty((*self.queries.shape[:-1], self.values.shape[-1]))
        for block in self.blocks():
            own = torch.bmm(self.weights(block), self.values[:, : block.stop])
            found[:, :, block] = self.by_heads(own)
        return self.by_documents(found)

    def blocks(self) -> Iterator[slice]:
        """Yield queries that go together; they see all keys up to their own."""
        length = self.keys.shape[1]
        for begin in range(0, length, QUERIES):
            yield slice(begin, min(begin + QUERIES, length))

    def weights(self, block: slice) -> torch.Tensor:
        """Return softmax(queries @ keys.T), (N, G * block, seen); the next takes its place."""
        queries, keys = self.of_block(self.queries, block), self.keys[:, : block.stop]
        shape = (*queries.shape[:2], block.stop)
        scores = self.buffer[: shape[0] * shape[1] * shape[2]].view(shape)
        torch.bmm(queries, keys.mT, out=scores)
        count = block.stop - block.start
        self.by_heads(scores)[..., block].add_(self.later[:count, :count])
        return torch.softmax(scores, -1, out=scores)

    def gradients(self, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return those of queries, keys and values; `output` is that of the attended values."""
        attended = output.reshape(*self.queries.shape[:-1], -1)
        queries = torch.empty_like(self.queries)
        keys, values = torch.zeros_like(self.keys), torch.zeros_like(self.values)
        buffer = torch.empty_like(self.buffer)
        for block in self.blocks():
            seen = slice(0, block.stop)
            weights, own = self.weights(block), self.of_block(attended, block)
            values[:, seen].baddbmm_(weights.mT, own)
            scores = buffer[: weights.numel()].view_as(weights)
            torch.bmm(own, self.values[:, seen].mT, out=scores)
            torch._softmax_backward_data(scores, weights, -1, weights.dtype, grad_input=scores)
            queries[:, :, block] = self.by_heads(torch.bmm(scores, self.keys[:, seen]))
            keys[:, seen].baddbmm_(scores.mT, self.of_block(self.queries, block))
        queries.mul_(self.scale)
        return self.by_documents(queries), self.by_documents(keys), self.by_documents(values)

    def of_block(self, states: torch.Tensor, block: slice) -> torch.Tensor:
        """Return (N, G, L, D) of a block's queries as (N, G * block, D)."""
        return states[:, :, block].flatten(1, 2)

    def by_heads(self, states: torch.Tensor) -> torch.Tensor:
        """Return (N, G * block, D) as (N, G, block, D)."""
        return states.unflatten(1, (self.queries.shape[1], -1))

    def by_documents(self, states: torch.Tensor) -> torch.Tensor:
        """Return (N, [G,] L, D) as (documents, heads, L, D)."""
        return states.reshape(self.documents, -1, *states.shape[-2:])
