"""LM head and cross-entropy of one chunk of tokens at a time, never with all logits in memory.

The forward pass also computes the gradients while a chunk's logits are in memory. The LM head then
needs three matrix products. It would need four if the backward pass computed the logits again. On a
GPU the softmax can be compiled. Without compilation it reads and writes memory several times.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from typing_extensions import override

IGNORED = -100


class Sizes(NamedTuple):
    """Sizes of chunks of tokens and of buffers, for one type of device."""

    rows: int  # maximum number of tokens in a chunk
    tile: int  # the number of tokens of a chunk is a multiple of this
    logits: int  # maximum number of logits in a chunk
    block: int  # number of logits that are converted to float32 at a time
    words: int  # the vocabulary is padded with zeros to a multiple of this


# On a CPU a block fits into the cache. Fast products on a GPU need rows whose size is a multiple of
# 16 bytes. With GPT-2's vocabulary of 50,257 a step took twice as long as with a padded vocabulary.
TILE_SIZES = {
    "cpu": Sizes(rows=1024, tile=64, logits=2**26, block=2**20, words=1),
    "cuda": Sizes(rows=4096, tile=128, logits=2**29, block=2**25, words=8),
}
COMPILED_ROWS = 2048


class LogitTerms(NamedTuple):
    """Scale and soft cap of a model's logits: softcap * tanh(scale * logits / softcap)."""

    scale: float = 1.0
    softcap: float | None = None


PLAIN = LogitTerms()


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *,
    bias: Tensor | None = None, terms: LogitTerms = PLAIN, compiled: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return the cross-entropy of softmax(hidden @ weight.T + bias) as (sum, losses, hits).

    hidden    (N, H), N tokens of size H; weight (V, H), a row per vocabulary entry; bias (V,)
    targets   (N,) int64, IGNORED for tokens without loss
    compiled  compile the softmax if the device is a GPU
    sum       (), float32, `torch.nn.functional.cross_entropy(..., reduction="sum")` up to rounding
    losses    (N,) float32, the loss of each token, without gradient
    hits      (N,) bool, whether the target has the largest logit; None if gradients are computed,
              because gradients overwrite the logits

    Matrix products use autocast's type, or the weight's type without autocast. Everything else is
    float32, including the summed gradient of the weight. The host does not wait for the device.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    gradients = torch.is_grad_enabled()  # always off inside autograd functions
    options = (dtype, terms, gradients, compiled and device != "cpu")
    with torch.autocast(device, enabled=False):
        return _LinearCrossEntropy.apply(hidden, weight, bias, targets, *options)


def _round_up(count: int, tile: int) -> int:
    return -(-count // tile) * tile


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor,
        dtype: torch.dtype, terms: LogitTerms, gradients: bool, compiled: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        needed = tuple(gradients and needs for needs in ctx.needs_input_grad)
        tokens = len(hidden)
        if hidden.device.type == "cpu":  # pad: oneDNN compiles code for each number of tokens
            padding = _round_up(tokens, TILE_SIZES["cpu"].tile) - tokens
            hidden = functional.pad(hidden, (0, 0, 0, padding))
            targets = functional.pad(targets, (0, padding), value=IGNORED)
        head = ChunkedHead(hidden.to(dtype), weight, bias, terms, needed, compiled)
        losses = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        has_loss = targets != IGNORED
        targets = targets.clamp(min=0)
        for begin in range(0, len(hidden), head.chunk_rows):
            rows = slice(begin, min(begin + head.chunk_rows, len(hidden)))
            losses[rows] = head.chunk(rows, targets[rows], has_loss[rows])
        hidden_gradient, *head_gradients = head.gradients()
        if hidden_gradient is not None:
            hidden_gradient = hidden_gradient[:tokens]
        ctx.gradients = (hidden_gradient, *head_gradients)
        token_losses, hits = losses[:tokens], head.hits
        ctx.mark_non_differentiable(token_losses)
        return losses.sum(), token_losses, None if hits is None else hits[:tokens]

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scale, *_ = gradients
        assert ctx.gradients is not None, "this loss was differentiated before"
        # Scale in place, because the weight's gradient is large. Drop the references, so that
        # autograd can add the gradient of a tied embedding in place.
        unscaled, ctx.gradients = ctx.gradients, None
        scaled = [
            None if gradient is None else gradient.mul_(scale).to(dtype)
            for gradient, dtype in zip(unscaled, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None, None, None


class ChunkedHead:
    """Buffers of one call of `linear_cross_entropy`, and gradients of the summed loss.

    The weight (V, H) is padded to W >= V rows. The added rows and their gradients are zeros.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, terms: LogitTerms,
        needed: tuple[bool, ...], compiled: bool,
    ):  # fmt: skip
        device, self.vocabulary = hidden.device.type, len(weight)
        sizes = TILE_SIZES.get(device, TILE_SIZES["cuda"])
        words = _round_up(self.vocabulary, sizes.words)
        self.hidden, self.scale, self.cap = hidden, terms.scale, terms.softcap
        self.weight = _pad_rows(weight, words, hidden.dtype)
        self.bias = None if bias is None else _pad_rows(bias, words, hidden.dtype) * self.scale
        self.compiled, self.differentiate = compiled, any(needed)
        max_rows = min(COMPILED_ROWS if compiled else sizes.rows, sizes.logits // words)
        self.chunk_rows = max(1, max_rows // sizes.tile * sizes.tile)
        if not compiled:  # compiled chunks keep one size, because each shape compiles again
            chunks = max(1, -(-len(hidden) // self.chunk_rows))  # chunks get about the same size
            even_rows = _round_up(max(1, -(-len(hidden) // chunks)), sizes.tile)
            self.chunk_rows = min(even_rows, self.chunk_rows)
        self.logits = hidden.new_empty(self.chunk_rows, words)
        zeros = partial(torch.zeros, dtype=torch.float32, device=hidden.device)
        # The number of tokens whose logits are converted at a time: at least one per thread.
        block = max(torch.get_num_threads(), sizes.block // self.vocabulary)
        shape = min(self.chunk_rows, block), self.vocabulary
        self.buffers = [] if compiled else [zeros(shape) for _ in range(2)]
        # Whether the target of a token has the largest logit.
        self.hits = None if any(needed) else hidden.new_zeros(len(hidden), dtype=torch.bool)
        self.hidden_gradient = torch.empty_like(hidden) if needed[0] else None
        self.weight_gradient = zeros(self.weight.shape) if needed[1] else None
        self.bias_gradient = zeros(words) if needed[2] else None
        # CUDA can add a half-precision product to a float32 sum. Other devices need a buffer.
        product = needed[1] and hidden.dtype != torch.float32 and device != "cuda"
        self.product = torch.empty_like(self.weight) if product else None

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states, weight and bias.

        None replaces a gradient that is not needed.
        """
        weight, bias = self.weight_gradient, self.bias_gradient
        if len(self.weight) != self.vocabulary:  # a view would stop autograd from adding in place
            weight = None if weight is None else weight[: self.vocabulary]
            bias = None if bias is None else bias[: self.vocabulary]
        return self.hidden_gradient, weight, bias

    def chunk(self, rows: slice, targets: Tensor, has_loss: Tensor) -> Tensor:
        """Return the losses (C,) of C tokens, and add their gradients to the buffers.

        rows: indices of the tokens. targets (C,): the ids to predict. has_loss (C,): False for
        tokens without a loss, which get the loss 0.
        """
        hidden = self.hidden[rows]
        if self.scale != 1:
            hidden = hidden * self.scale
        tokens = len(hidden)
        derivative = torch.mm(hidden, self.weight.T, out=self.logits[:tokens])
        if self.bias is not None:
            derivative += self.bias
        if self.compiled:
            # Use the whole buffer, with zeros after the last token, to compile only one shape.
            targets = functional.pad(targets, (0, self.chunk_rows - tokens))
            self.logits[tokens:] = 0
            logits = self.logits[:, : self.vocabulary]
            losses = compiled_softmax_derivative(logits, targets, self.cap, self.differentiate)
            losses = losses[:tokens]
        else:
            logits = derivative[:, : self.vocabulary]
            losses = softmax_derivative(logits, targets, self.buffers, self.cap, self.differentiate)
        if self.hits is not None:
            predicted = logits.max(-1).indices  # on a CPU three times as fast as argmax
            self.hits[rows] = (predicted == targets)[:tokens] & has_loss
        loss_mask = has_loss[:, None].to(hidden.dtype)
        if self.hidden_gradient is not None:
            gradient = self.hidden_gradient[rows]
            torch.mm(derivative, self.weight, out=gradient)
            gradient.mul_(loss_mask * self.scale)
        if self.weight_gradient is not None:
            self._add_weight_gradient(derivative, hidden * loss_mask)
        if self.bias_gradient is not None:
            self.bias_gradient += torch.mv(derivative.T, loss_mask[:, 0] * self.scale)
        return losses * has_loss

    def _add_weight_gradient(self, derivative: Tensor, hidden: Tensor) -> None:
        total = self.weight_gradient
        assert total is not None
        if self.product is not None:
            total += torch.mm(derivative.T, hidden, out=self.product)
        elif hidden.dtype == torch.float32:
            total.addmm_(derivative.T, hidden)
        else:
            torch.addmm(total, derivative.T, hidden, out_dtype=torch.float32, out=total)


def softmax_derivative(
    logits: Tensor, targets: Tensor, buffers: list[Tensor], cap: float | None, differentiate: bool
) -> Tensor:
    """Return the losses (C,) of C tokens with logits (C, V) and target ids (C,).

    buffers: two float32 tensors (B, V), to compute B tokens at a time. cap: the logits' soft cap,
    or None. differentiate: whether to overwrite the logits with the derivatives of the losses.
    """
    size, losses = len(buffers[0]), []
    for block, ids in zip(logits.split(size), targets[:, None].split(size), strict=True):
        scores, derivative = (buffer[: len(block)] for buffer in buffers)
        scores.copy_(block)
        if cap is not None:
            scores.div_(cap).tanh_().mul_(cap)
        # On a CPU the largest probability, exp(largest) / sum(exp), gives the sum in 0.6 of the
        # time of a log-softmax.
        if scores.is_cpu:
            torch.softmax(scores, -1, out=derivative)
            normalizer = scores.amax(-1) - derivative.amax(-1).log()
            losses.append(normalizer - scores.gather(-1, ids).squeeze(-1))
        else:
            torch.log_softmax(scores, -1, out=derivative)
            losses.append(-derivative.gather(-1, ids).squeeze(-1))
        if differentiate:
            derivative = derivative if scores.is_cpu else derivative.exp_()
            derivative.scatter_(-1, ids, derivative.gather(-1, ids) - 1)
            if cap is not None:
                derivative.mul_(scores.div_(cap).square_().neg_().add_(1))
            block.copy_(derivative)
    return torch.cat(losses)


def compiled_softmax_derivative(
    logits: Tensor, targets: Tensor, cap: float | None, differentiate: bool
) -> Tensor:
    """Compute `softmax_derivative` with a function that torch compiles for each shape.

    The compiled function reads the logits twice and writes them once.
    """
    # Read the targets' logits outside the compiled function. Inside, torch 2.11 on a CPU would read
    # them only after overwriting the logits.
    target_logits = logits.gather(-1, targets[:, None]).squeeze(-1).float()
    if cap is not None:
        target_logits = target_logits.div_(cap).tanh_().mul_(cap)
    return _compiled_log_sum_exp()(logits, targets, cap, differentiate) - target_logits


@cache
def _compiled_log_sum_exp() -> Callable[..., Tensor]:
    return torch.compile(_log_sum_exp, dynamic=False)


def _log_sum_exp(logits: Tensor, targets: Tensor, cap: float | None, differentiate: bool) -> Tensor:
    """Return log(sum(exp(logits))) (C,) of logits (C, V). See `softmax_derivative` for arguments.

    torch compiles this function to two kernels. Both read the logits, and the second writes them.
    """
    scores = logits.float()
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    normalizer = torch.logsumexp(scores, -1, keepdim=True)
    if differentiate:
        words = torch.arange(logits.shape[1], device=logits.device)
        derivative = (scores - normalizer).exp() - (words == targets[:, None]).float()
        if cap is not None:
            derivative = derivative * (1 - (scores / cap).square())
        logits.copy_(derivative)
    return normalizer.squeeze(-1)


def _pad_rows(values: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    if len(values) == rows:
        return values.to(dtype)
    padded = values.new_zeros((rows, *values.shape[1:]), dtype=dtype)
    padded[: len(values)] = values
    return padded
