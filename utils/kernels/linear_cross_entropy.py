"""Cross-entropy of a linear head, a few tokens at a time: the logits of all are never in memory.

The gradients are computed in the forward pass, while a chunk's logits are at hand, so that the
head costs three matrix products and not four. On two CPU cores most of what a plain head spends
beyond those products is memory traffic; so buffers are made once, and the softmax goes over blocks
that stay in the cache.
"""

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
BLOCK_ELEMENTS = 2**20  # of a CPU's softmax in float32: 4 MiB


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
    block = _block_rows(rows, vocabulary, device)
    widened = 0 if compute_bytes == 4 else 2 * compute_bytes  # the weight and a product, narrow
    return vocabulary * (rows * compute_bytes + block * 4 + width * (4 + widened))


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
        targets = targets.clamp(min=0)[:, None]
        for rows in _slices(len(hidden), work.chunk_rows):
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
        tokens, vocabulary = len(hidden), len(weight)
        self.chunk_rows = _chunk_rows(tokens, vocabulary, hidden.device.type)
        self.block_rows = _block_rows(self.chunk_rows, vocabulary, hidden.device.type)
        self.logits = hidden.new_empty(self.chunk_rows, vocabulary)
        zeros = partial(torch.zeros, dtype=torch.float32, device=hidden.device)
        self.block = zeros(self.block_rows, vocabulary)
        self.cap = terms.softcap or 0.0
        self.capped = torch.empty_like(self.block) if terms.softcap else None
        self.hidden_gradient = torch.zeros_like(hidden) if needed[0] else None
        self.weight_gradient = zeros(weight.shape) if needed[1] else None
        self.bias_gradient = zeros(vocabulary) if needed[2] else None
        # A product in half precision has to be widened to be added up.
        widen = self.weight_gradient is not None and hidden.dtype != torch.float32
        self.product = torch.empty_like(weight) if widen else None

    def chunk(self, rows: slice, targets: torch.Tensor, bears_loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token (C,) and add up the gradients; targets (C, 1)."""
        hidden = self.hidden[rows]
        if self.scale != 1:
            hidden = hidden * self.scale
        logits = self.logits[: len(hidden)]
        torch.mm(hidden, self.weight.T, out=logits)
        if self.bias is not None:
            logits += self.bias
        losses = [
            self._block(logits[block], targets[block])
            for block in _slices(len(logits), self.block_rows)
        ]
        own = bears_loss[:, None].to(hidden.dtype)
        if self.hidden_gradient is not None:
            gradient = self.hidden_gradient[rows]
            torch.mm(logits, self.weight, out=gradient)
            gradient.mul_(own * self.scale)
        if self.weight_gradient is not None:
            self._add_weight_gradient(logits, hidden * own)
        if self.bias_gradient is not None:
            self.bias_gradient += torch.mv(logits.T, own[:, 0] * self.scale)
        return torch.cat(losses) * bears_loss

    def _block(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the losses (R,) of logits (R, V), and put their derivatives into `logits`."""
        derivative = self.block[: len(logits)]
        if self.capped is not None:
            capped = self.capped[: len(logits)]
            torch.div(logits, self.cap, out=capped).tanh_().mul_(self.cap)
            torch.log_softmax(capped, -1, out=derivative)
        else:
            torch.log_softmax(logits, -1, dtype=torch.float32, out=derivative)
        losses = -derivative.gather(-1, targets).squeeze(-1)
        if self.hidden_gradient is None and self.weight_gradient is None:
            return losses
        derivative.exp_()
        derivative.scatter_(-1, targets, derivative.gather(-1, targets) - 1)
        if self.capped is not None:
            derivative *= capped.div_(self.cap).square_().neg_().add_(1)
        logits.copy_(derivative)
        return losses

    def _add_weight_gradient(self, derivative: torch.Tensor, hidden: torch.Tensor) -> None:
        assert self.weight_gradient is not None
        if self.product is None:
            self.weight_gradient.addmm_(derivative.T, hidden)
        else:
            self.weight_gradient += torch.mm(derivative.T, hidden, out=self.product)


def _chunk_rows(tokens: int, vocabulary: int, device: str) -> int:
    """Return how many tokens go through the head at a time: as many in each chunk, about."""
    most = CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cuda"]) // vocabulary
    most = max(1, min(CHUNK_ROWS.get(device, CHUNK_ROWS["cuda"]), most))
    chunks = -(-tokens // most)
    return -(-tokens // chunks) if chunks else 1


def _block_rows(chunk_rows: int, vocabulary: int, device: str) -> int:
    """Return how many tokens' softmax is made at a time: a GPU has no use for small blocks."""
    return min(chunk_rows, max(1, BLOCK_ELEMENTS // vocabulary)) if device == "cpu" else chunk_rows


def _slices(length: int, step: int) -> list[slice]:
    return [slice(begin, min(begin + step, length)) for begin in range(0, length, step)]
