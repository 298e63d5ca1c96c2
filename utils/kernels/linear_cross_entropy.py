"""Cross-entropy of a linear head, a few tokens at a time: the logits of all are never in memory.

The gradients are computed in the forward pass, while a chunk's logits are at hand, so that the
head costs three matrix products and not four. On CPUs what a plain head spends beyond those
products is memory traffic: buffers are made once, the softmax goes over blocks that stay in the
cache, and with AMX logits lie as (V, tokens), which makes the bf16 products 1.6 times as fast as
(tokens, V) does (docs/experiments.md). On GPUs the softmax is compiled where layers are: eagerly it
goes through memory several times.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from typing_extensions import override

from utils.kernels.head_sizes import (
    block_elements,
    can_be_compiled,
    chunk_rows,
    product_words,
    softmax_buffers,
    whole_rows,
    whole_tiles,
    words_first,
)
from utils.kernels.softmax_derivative import by_tokens, by_words, compiled_by_tokens

IGNORED = -100

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
    compiled: bool = False,
) -> torch.Tensor:
    """Return the summed cross-entropy of softmax(hidden @ weight.T + bias), float32, shape ().

    hidden (N, H), weight (V, H), bias (V,), targets (N,) int64 with IGNORED where a token bears no
    loss. Products are computed in autocast's type, or else in that of the weight; everything
    between them, and the sum over tokens of the weight's gradient, in float32. Waits for no device.
    Same result as `torch.nn.functional.cross_entropy(..., reduction="sum")`, to rounding.
    `compiled`: the softmax in one function that torch compiles, on GPUs.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    wanted = torch.is_grad_enabled()  # inside the function it never is
    way = _Way(terms, wanted, compiled and can_be_compiled(device))
    with torch.autocast(device, enabled=False):
        return _LinearCrossEntropy.apply(hidden, weight, bias, targets, dtype, way)


@contextmanager
def buffers_alone() -> Iterator[None]:
    """Within, calls make their buffers and compute nothing: for who counts bytes."""
    global _computes  # noqa: PLW0603 - autograd calls forward, which has no other way to know
    _computes = False
    try:
        yield
    finally:
        _computes = True


@dataclass(frozen=True)
class _Way:
    """How a call computes: what happens to the logits, whether gradients are made, by what."""

    terms: LogitTerms
    gradients: bool
    compiled: bool


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
        way: _Way,
    ) -> torch.Tensor:
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        needed = tuple(way.gradients and needs for needs in ctx.needs_input_grad)
        tokens = len(hidden)
        if more := whole_rows(tokens, hidden.device.type) - tokens:
            hidden = functional.pad(hidden, (0, 0, 0, more))
            targets = functional.pad(targets, (0, more), value=IGNORED)
        work = _Work(hidden.to(dtype), weight, bias, way, needed)
        losses = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        bears_loss = targets != IGNORED
        targets = targets.clamp(min=0)
        chunks = _slices(len(hidden), work.chunk_rows) if _computes else []
        for rows in chunks:
            losses[rows] = work.chunk(rows, targets[rows], bears_loss[rows])
        of_hidden, *of_head = work.gradients()
        ctx.gradients = (None if of_hidden is None else of_hidden[:tokens], *of_head)
        return losses.sum()

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (scale,) = gradients
        if ctx.gradients is None:
            raise RuntimeError("this loss was differentiated before, and its gradients are gone")
        # In place, as the weight's is large. Nobody else holds it then: autograd adds that of a
        # tied embedding to it, in place too.
        made, ctx.gradients = ctx.gradients, None
        scaled = [
            None if own is None else own.mul_(scale).to(dtype)
            for own, dtype in zip(made, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None


class _Work:
    """The buffers and gradients of one call; gradients are those of the loss's sum.

    The weight has W >= V rows: those beyond the vocabulary are zeros, as what comes of them is.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        way: _Way,
        needed: tuple[bool, ...],
    ):
        device, self.vocabulary = hidden.device.type, len(weight)
        words = whole_tiles(self.vocabulary, device)
        self.hidden, self.scale = hidden, way.terms.scale
        self.weight = _with_zeros(weight, words, hidden.dtype)
        self.bias = None if bias is None else _with_zeros(bias, words, hidden.dtype) * self.scale
        self.words_first, self.compiled = words_first(device), way.compiled
        self.chunk_rows = chunk_rows(len(hidden), words, device, self.compiled)
        self.logits = hidden.new_empty(self.chunk_rows * words)
        zeros = partial(torch.zeros, dtype=torch.float32, device=hidden.device)
        elements = block_elements(self.chunk_rows, self.vocabulary, device)
        self.cap = way.terms.softcap
        buffers = 0 if self.compiled else softmax_buffers(device, self.cap is not None)
        self.buffers = [zeros(elements) for _ in range(buffers)]
        self.hidden_gradient = torch.empty_like(hidden) if needed[0] else None
        # A CPU's first chunk writes, the others add; without any it is zeros.
        self.written = device != "cpu" or len(hidden) == 0
        made = zeros if self.written else partial(torch.empty, **zeros.keywords)
        self.weight_gradient = made(self.weight.shape) if needed[1] else None
        self.bias_gradient = zeros(words) if needed[2] else None
        self.needed = any(needed)
        # But for CUDA's a product in half precision has to be widened to be added up.
        widened = 0 if hidden.dtype == torch.float32 else product_words(words, device)
        self.product = torch.empty_like(self.weight[:widened]) if needed[1] and widened else None

    def gradients(self) -> tuple[torch.Tensor | None, ...]:
        """Return those of hidden states, weight and bias, of the vocabulary alone."""
        of_words = (self.weight_gradient, self.bias_gradient)
        return (
            self.hidden_gradient,
            # No view of a whole, which would keep autograd from adding to it in place.
            *(
                one if one is None or len(one) == self.vocabulary else one[: self.vocabulary]
                for one in of_words
            ),
        )

    def chunk(self, rows: slice, targets: torch.Tensor, bears_loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token (C,) and add up the gradients; targets (C,)."""
        hidden = self.hidden[rows]
        if self.scale != 1:
            hidden = hidden * self.scale
        losses, derivative = self._losses(hidden, targets)
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

    def _losses(
        self, hidden: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses (C,) and their derivatives by the logits (C, W), perhaps a view."""
        tokens, words = len(hidden), len(self.weight)
        flat = self.logits[: tokens * words]
        if self.words_first:
            logits = torch.mm(self.weight, hidden.T, out=flat.view(-1, tokens))
            if self.bias is not None:
                logits += self.bias[:, None]
            (buffer,) = self.buffers
            block = len(buffer) // self.chunk_rows
            losses = by_words(logits, targets, buffer, block, self.cap, self.needed)
            return losses, logits.T
        logits = torch.mm(hidden, self.weight.T, out=flat.view(tokens, -1))
        if self.bias is not None:
            logits += self.bias
        if not self.compiled:
            own = logits[:, : self.vocabulary]
            return by_tokens(own, targets, self.buffers, self.cap, self.needed), logits
        # The whole buffer, zeros behind the last token: one shape is compiled.
        targets = functional.pad(targets, (0, self.chunk_rows - tokens))
        all_rows = self.logits.view(-1, words)
        all_rows[tokens:] = 0
        own = all_rows[:, : self.vocabulary]
        losses = compiled_by_tokens(own, targets, self.cap, self.needed)
        return losses[:tokens], logits

    def _add_weight_gradient(self, derivative: torch.Tensor, hidden: torch.Tensor) -> None:
        assert self.weight_gradient is not None
        if hidden.is_cuda and hidden.dtype != torch.float32:
            torch.addmm(
                self.weight_gradient, derivative.T, hidden,
                out_dtype=torch.float32, out=self.weight_gradient,
            )  # fmt: skip
            return
        before, self.written = self.written, True
        if self.product is None:
            self.weight_gradient.addmm_(derivative.T, hidden, beta=int(before))
            return
        for words in _slices(len(self.weight), len(self.product)):
            gradient = self.weight_gradient[words]
            product = self.product[: len(gradient)]
            torch.mm(derivative.T[words], hidden, out=product)
            gradient.add_(product) if before else gradient.copy_(product)


def _with_zeros(values: torch.Tensor, words: int, dtype: torch.dtype) -> torch.Tensor:
    """Return (V, ...) as (words, ...) in a type; copied only where either differs."""
    if len(values) == words:
        return values.to(dtype)
    padded = values.new_zeros((words, *values.shape[1:]), dtype=dtype)
    padded[: len(values)] = values
    return padded


def _slices(length: int, step: int) -> list[slice]:
    return [slice(begin, min(begin + step, length)) for begin in range(0, length, step)]
