"""Cross-entropy of a linear head, a few tokens at a time: the logits of all are never in memory.

The gradients are computed in the forward pass, while a chunk's logits are at hand, so that the
head costs three matrix products and not four. On CPUs what a plain head spends beyond those
products is memory traffic: buffers are made once, logits lie as (V, tokens), which makes the bf16
products 1.6 times as fast as (tokens, V) does (docs/experiments.md), and the softmax goes over
blocks that stay in the cache.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from typing_extensions import override

IGNORED = -100

# Logits in memory at a time: enough rows for full speed of the matrix products, no more.
CHUNK_ROWS = {"cpu": 1024, "cuda": 4096}
CHUNK_ELEMENTS = {"cpu": 2**26, "cuda": 2**29}

# Where logits lie as (V, tokens), and how much of them is in float32 at a time: 1 MiB.
BY_WORDS = {"cpu"}
BLOCK_ELEMENTS = 2**18

# Rows of the weight whose gradient's product is in half precision at a time, before it is added up.
PRODUCT_WORDS = 8192

_computes = True


@dataclass(frozen=True)
class LogitTerms:
    """What a model does to the logits: multiply by `scale`, then cap * tanh(logits / cap)."""

    scale: float = 1.0
    softcap: float | None = None


PLAIN = LogitTerms()


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    terms: LogitTerms = PLAIN,
) -> torch.Tensor:
    """Return the summed cross-entropy of softmax(hidden @ weight.T + bias), float32, shape ().

    hidden (N, H), weight (V, H), bias (V,), targets (N,) int64 with IGNORED where a token bears no
    loss. Products are computed in autocast's type, or else in that of the weight; everything
    between them, and the sum over tokens of the weight's gradient, in float32. Waits for no device.
    Same result as `torch.nn.functional.cross_entropy(..., reduction="sum")`, to rounding.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    wanted = torch.is_grad_enabled()  # inside the function it never is
    with torch.autocast(device, enabled=False):
        return _LinearCrossEntropy.apply(hidden, weight, bias, targets, dtype, terms, wanted)


def working_bytes(tokens: int, vocabulary: int, width: int, device: str, compute_bytes: int) -> int:
    """Return what a training call takes beside its inputs: logits, softmax, weight's gradient.

    width is that of the hidden states, `compute_bytes` the size of the products' type.
    """
    rows = _chunk_rows(tokens, vocabulary, device)
    block = rows * _block_words(rows, vocabulary, device)
    taken = vocabulary * (rows * compute_bytes + width * 4) + block * 4
    if compute_bytes == 4:
        return taken
    return taken + (vocabulary + min(vocabulary, PRODUCT_WORDS)) * width * compute_bytes


@contextmanager
def buffers_alone() -> Iterator[None]:
    """Within, calls make their buffers and compute nothing: for who counts bytes."""
    global _computes  # noqa: PLW0603 - autograd calls forward, which has no other way to know
    _computes = False
    try:
        yield
    finally:
        _computes = True


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        dtype: torch.dtype,
        terms: LogitTerms,
        gradients: bool,
    ) -> torch.Tensor:
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        needed = tuple(gradients and needs for needs in ctx.needs_input_grad)
        work = _Work(hidden.to(dtype), weight.to(dtype), bias, terms, needed)
        losses = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        bears_loss = targets != IGNORED
        targets = targets.clamp(min=0)
        chunks = _slices(len(hidden), work.chunk_rows) if _computes else []
        for rows in chunks:
            losses[rows] = work.chunk(rows, targets[rows], bears_loss[rows])
        ctx.save_for_backward(work.hidden_gradient, work.weight_gradient, work.bias_gradient)
        return losses.sum()

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (scale,) = gradients
        # In place, as the weight's is large; torch refuses a second backward pass over them.
        scaled = [
            None if own is None else own.mul_(scale).to(dtype)
            for own, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None, None


class _Work:
    """The buffers and gradients of one call; gradients are those of the loss's sum."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        terms: LogitTerms,
        needed: tuple[bool, ...],
    ):
        self.hidden, self.weight, self.scale = hidden, weight, terms.scale
        self.bias = None if bias is None else bias.to(hidden.dtype) * self.scale
        device, vocabulary = hidden.device.type, len(weight)
        self.chunk_rows = _chunk_rows(len(hidden), vocabulary, device)
        self.block_words = _block_words(self.chunk_rows, vocabulary, device)
        self.words_first = device in BY_WORDS
        self.logits = hidden.new_empty(self.chunk_rows * vocabulary)
        zeros = partial(torch.zeros, dtype=torch.float32, device=hidden.device)
        self.block = zeros(self.chunk_rows * self.block_words)
        self.cap = terms.softcap
        self.hidden_gradient = torch.zeros_like(hidden) if needed[0] else None
        self.weight_gradient = zeros(weight.shape) if needed[1] else None
        self.bias_gradient = zeros(vocabulary) if needed[2] else None
        self.needed = any(needed)
        # A product in half precision has to be widened to be added up.
        widen = self.weight_gradient is not None and hidden.dtype != torch.float32
        self.product = torch.empty_like(weight[:PRODUCT_WORDS]) if widen else None

    def chunk(self, rows: slice, targets: torch.Tensor, bears_loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token (C,) and add up the gradients; targets (C,)."""
        hidden = self.hidden[rows]
        if self.scale != 1:
            hidden = hidden * self.scale
        differentiate = self._by_words if self.words_first else self._by_tokens
        losses, derivative = differentiate(hidden, targets)
        own = bears_loss[:, None].to(hidden.dtype)
        if self.hidden_gradient is not None:
            gradient = self.hidden_gradient[rows]
            torch.mm(derivative, self.weight, out=gradient)
            gradient.mul_(own * self.scale)
        if self.weight_gradient is not None:
            self._add_weight_gradient(derivative, hidden * own)
        if self.bias_gradient is not None:
            self.bias_gradient += torch.mv(derivative.T, own[:, 0] * self.scale)
        return losses * bears_loss

    def _by_words(
        self, hidden: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses (C,) and their derivatives by the logits (C, V), a view of (V, C)."""
        tokens = len(hidden)
        logits = self.logits[: len(self.weight) * tokens].view(-1, tokens)
        torch.mm(self.weight, hidden.T, out=logits)
        if self.bias is not None:
            logits += self.bias[:, None]
        blocks = logits.split(self.block_words)
        highest = torch.full((tokens,), torch.finfo(torch.float32).min)
        total = torch.zeros(tokens)
        for block in blocks:
            wide = self._capped(self._widened(block))
            before, highest = highest, torch.maximum(highest, wide.amax(0))
            total.mul_((before - highest).exp_()).add_(wide.sub_(highest).exp_().sum(0))
        normalizer = highest + total.log()
        places = targets, torch.arange(tokens)
        chosen = self._capped(logits[places].float())
        losses = normalizer - chosen
        if not self.needed:
            return losses, logits.T
        for block in blocks:
            wide = self._capped(self._widened(block))
            slope = self._slope(wide)
            wide.sub_(normalizer).exp_()
            block.copy_(wide if slope is None else wide.mul_(slope))
        slope = self._slope(chosen)
        at_target = losses.neg().exp_().sub_(1)
        logits[places] = (at_target if slope is None else at_target.mul_(slope)).to(logits.dtype)
        return losses, logits.T

    def _by_tokens(
        self, hidden: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses (C,) and their derivatives by the logits (C, V)."""
        logits = self.logits[: len(hidden) * len(self.weight)].view(len(hidden), -1)
        torch.mm(hidden, self.weight.T, out=logits)
        if self.bias is not None:
            logits += self.bias
        targets = targets[:, None]
        capped = None if self.cap is None else self._capped(logits.float())
        slope = None if capped is None else self._slope(capped)
        wide = self.block[: logits.numel()].view_as(logits)
        torch.log_softmax(logits if capped is None else capped, -1, dtype=torch.float32, out=wide)
        losses = -wide.gather(-1, targets).squeeze(-1)
        if self.needed:
            wide.exp_()
            wide.scatter_(-1, targets, wide.gather(-1, targets) - 1)
            logits.copy_(wide if slope is None else wide.mul_(slope))
        return losses, logits

    def _widened(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a copy in float32; the next one takes its place."""
        return self.block[: logits.numel()].view_as(logits).copy_(logits)

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Cap float32 logits in place."""
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def _slope(self, capped: torch.Tensor) -> torch.Tensor | None:
        """Return the derivative of capped logits by the logits; None for 1."""
        return None if self.cap is None else capped.div(self.cap).square_().neg_().add_(1)

    def _add_weight_gradient(self, derivative: torch.Tensor, hidden: torch.Tensor) -> None:
        assert self.weight_gradient is not None
        if self.product is None:
            self.weight_gradient.addmm_(derivative.T, hidden)
            return
        for words in _slices(len(self.weight), len(self.product)):
            gradient = self.weight_gradient[words]
            product = self.product[: len(gradient)]
            gradient += torch.mm(derivative.T[words], hidden, out=product)


def _chunk_rows(tokens: int, vocabulary: int, device: str) -> int:
    """Return how many tokens go through the head at a time: as many in each chunk, about."""
    most = CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cuda"]) // vocabulary
    most = max(1, min(CHUNK_ROWS.get(device, CHUNK_ROWS["cuda"]), most))
    chunks = -(-tokens // most)
    return -(-tokens // chunks) if chunks else 1


def _block_words(chunk_rows: int, vocabulary: int, device: str) -> int:
    """Return how many words' softmax is made at a time: a GPU has no use for small blocks."""
    if device not in BY_WORDS:
        return vocabulary
    return min(vocabulary, max(1, BLOCK_ELEMENTS // chunk_rows))


def _slices(length: int, step: int) -> list[slice]:
    return [slice(begin, min(begin + step, length)) for begin in range(0, length, step)]
