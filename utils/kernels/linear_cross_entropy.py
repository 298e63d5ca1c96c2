"""Cross-entropy of a linear head, a few tokens at a time: the logits of all are never in memory.

The gradients are computed in the forward pass, while a chunk's logits are at hand, so that the
head costs three matrix products and not four. On CPUs what a plain head spends beyond those
products is memory traffic: buffers are made once, logits lie as (V, tokens), which makes the bf16
products 1.6 times as fast as (tokens, V) does (docs/experiments.md), and the softmax goes over
blocks that stay in the cache. On GPUs the softmax is compiled where layers are: eagerly it goes
through memory several times.
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

from utils.kernels.softmax_derivative import by_tokens, by_words, compiled_by_tokens

IGNORED = -100

# Logits in memory at a time: enough rows for full speed of the matrix products, no more. A GPU's
# are slower for a number of rows that no tile divides.
CHUNK_ROWS = {"cpu": 1024, "cuda": 4096}
COMPILED_CHUNK_ROWS = 2048
CHUNK_ELEMENTS = {"cpu": 2**26, "cuda": 2**29}
TILE_ROWS = {"cpu": 1, "cuda": 128}

# Where logits lie as (V, tokens), and how much of them is in float32 at a time: 1 MiB for a CPU's
# cache, two times 128 MiB on a GPU, which has no use for small blocks.
BY_WORDS = {"cpu"}
BLOCK_ELEMENTS = {"cpu": 2**18, "cuda": 2**25}

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
    way = _Way(terms, wanted, compiled and device not in BY_WORDS)
    with torch.autocast(device, enabled=False):
        return _LinearCrossEntropy.apply(hidden, weight, bias, targets, dtype, way)


def working_bytes(tokens: int, vocabulary: int, width: int, device: str, compute_bytes: int) -> int:
    """Return what a training call takes beside its inputs: logits, softmax, weight's gradient.

    width is that of the hidden states, `compute_bytes` the size of the products' type. Not
    compiled, which takes less.
    """
    rows = _chunk_rows(tokens, vocabulary, device, compiled=False)
    buffers = (1 if device in BY_WORDS else 2) * _block_elements(rows, vocabulary, device)
    taken = vocabulary * (rows * compute_bytes + width * 4) + buffers * 4
    if compute_bytes == 4:
        return taken
    widened = 0 if device == "cuda" else min(vocabulary, PRODUCT_WORDS)
    return taken + (vocabulary + widened) * width * compute_bytes


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
        work = _Work(hidden.to(dtype), weight.to(dtype), bias, way, needed)
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
        return *scaled, None, None, None


class _Work:
    """The buffers and gradients of one call; gradients are those of the loss's sum."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        way: _Way,
        needed: tuple[bool, ...],
    ):
        self.hidden, self.weight, self.scale = hidden, weight, way.terms.scale
        self.bias = None if bias is None else bias.to(hidden.dtype) * self.scale
        device, vocabulary = hidden.device.type, len(weight)
        self.words_first, self.compiled = device in BY_WORDS, way.compiled
        self.chunk_rows = _chunk_rows(len(hidden), vocabulary, device, self.compiled)
        self.logits = hidden.new_empty(self.chunk_rows * vocabulary)
        zeros = partial(torch.zeros, dtype=torch.float32, device=hidden.device)
        elements = _block_elements(self.chunk_rows, vocabulary, device)
        buffers = 0 if self.compiled else 1 if self.words_first else 2
        self.buffers = [zeros(elements) for _ in range(buffers)]
        self.cap = way.terms.softcap
        self.hidden_gradient = torch.zeros_like(hidden) if needed[0] else None
        self.weight_gradient = zeros(weight.shape) if needed[1] else None
        self.bias_gradient = zeros(vocabulary) if needed[2] else None
        self.needed = any(needed)
        # But for CUDA's a product in half precision has to be widened to be added up.
        widen = needed[1] and hidden.dtype != torch.float32 and not hidden.is_cuda
        self.product = torch.empty_like(weight[:PRODUCT_WORDS]) if widen else None

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
        """Return the losses (C,) and their derivatives by the logits (C, V), perhaps a view."""
        tokens, vocabulary = len(hidden), len(self.weight)
        flat = self.logits[: tokens * vocabulary]
        if self.words_first:
            logits = torch.mm(self.weight, hidden.T, out=flat.view(-1, tokens))
            if self.bias is not None:
                logits += self.bias[:, None]
            (buffer,) = self.buffers
            words = len(buffer) // self.chunk_rows
            losses = by_words(logits, targets, buffer, words, self.cap, self.needed)
            return losses, logits.T
        logits = torch.mm(hidden, self.weight.T, out=flat.view(tokens, -1))
        if self.bias is not None:
            logits += self.bias
        if not self.compiled:
            wide, logarithms = self.buffers
            return by_tokens(logits, targets, (wide, logarithms), self.cap, self.needed), logits
        # The whole buffer, zeros behind the last token: one shape is compiled.
        targets = functional.pad(targets, (0, self.chunk_rows - tokens))
        all_rows = self.logits.view(-1, vocabulary)
        all_rows[tokens:] = 0
        losses = compiled_by_tokens(all_rows, targets, self.cap, self.needed)
        return losses[:tokens], logits

    def _add_weight_gradient(self, derivative: torch.Tensor, hidden: torch.Tensor) -> None:
        assert self.weight_gradient is not None
        if hidden.is_cuda and hidden.dtype != torch.float32:
            torch.addmm(
                self.weight_gradient, derivative.T, hidden,
                out_dtype=torch.float32, out=self.weight_gradient,
            )  # fmt: skip
            return
        if self.product is None:
            self.weight_gradient.addmm_(derivative.T, hidden)
            return
        for words in _slices(len(self.weight), len(self.product)):
            gradient = self.weight_gradient[words]
            product = self.product[: len(gradient)]
            gradient += torch.mm(derivative.T[words], hidden, out=product)


def _chunk_rows(tokens: int, vocabulary: int, device: str, compiled: bool) -> int:
    """Return how many tokens go through the head at a time: as many in each chunk, about."""
    most = CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cuda"]) // vocabulary
    most = min(
        COMPILED_CHUNK_ROWS if compiled else CHUNK_ROWS.get(device, CHUNK_ROWS["cuda"]), most
    )
    tile = TILE_ROWS.get(device, TILE_ROWS["cuda"])
    most = max(1, most // tile * tile)
    if compiled:
        return most  # whatever the tokens, so that one shape is compiled
    chunks = -(-tokens // most)
    rows = -(-tokens // chunks) if chunks else 1
    return min(-(-rows // tile) * tile, most)


def _block_elements(chunk_rows: int, vocabulary: int, device: str) -> int:
    """Return how many logits are in float32 at a time: whole rows of words, or of tokens."""
    most = BLOCK_ELEMENTS.get(device, BLOCK_ELEMENTS["cuda"])
    if device in BY_WORDS:
        return chunk_rows * min(vocabulary, max(1, most // chunk_rows))
    return vocabulary * min(chunk_rows, max(1, most // vocabulary))


def _slices(length: int, step: int) -> list[slice]:
    return [slice(begin, min(begin + step, length)) for begin in range(0, length, step)]
