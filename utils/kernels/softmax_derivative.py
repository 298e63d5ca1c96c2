"""Cross-entropy of a chunk's logits, which become their own derivatives, in place.

Ways to the same numbers, to rounding: by words or by tokens in blocks that stay in a CPU's cache,
by tokens in torch's own kernels, and by tokens in one compiled function that reads the logits
twice and writes them once.
"""

import functools
from collections.abc import Callable, Sequence

import torch

from utils.config.errors import ConfigurationError

PROVED_TOKENS = 128
# Relative: in half precision a few derivatives are rounded otherwise.
TOLERANCE = 1e-3

_proved: set[tuple[object, ...]] = set()


def by_words(
    logits: torch.Tensor,
    targets: torch.Tensor,
    buffer: torch.Tensor,
    words: int,
    cap: float | None,
    differentiate: bool,
) -> torch.Tensor:
    """Return the losses (C,) of logits (V, C); `buffer` is float32 for so many words of them."""
    if logits.dtype == torch.float32 and cap is None:
        return _by_words_in_place(logits, targets, words, differentiate)
    tokens = logits.shape[1]
    highest = torch.full((tokens,), torch.finfo(torch.float32).min)
    total = torch.zeros(tokens)
    blocks = logits.split(words)
    for block in blocks:
        wide = _capped(_widened(block, buffer), cap)
        before, highest = highest, torch.maximum(highest, wide.amax(0))
        total.mul_((before - highest).exp_()).add_(wide.sub_(highest).exp_().sum(0))
    normalizer = highest + total.log()
    places = targets, torch.arange(tokens)
    chosen = _capped(logits[places].float(), cap)
    losses = normalizer - chosen
    if not differentiate:
        return losses
    for block in blocks:
        wide = _capped(_widened(block, buffer), cap)
        slope = _slope(wide, cap)
        wide.sub_(normalizer).exp_()
        block.copy_(wide if slope is None else wide.mul_(slope))
    slope = _slope(chosen, cap)
    at_target = losses.neg().exp_().sub_(1)
    logits[places] = (at_target if slope is None else at_target.mul_(slope)).to(logits.dtype)
    return losses


def _by_words_in_place(
    logits: torch.Tensor, targets: torch.Tensor, words: int, differentiate: bool
) -> torch.Tensor:
    """Do the same to float32 logits without a cap: one exponential each, and no copies.

    A block is left as exp(logits - the maximum up to there), and scaled when the sum is known.
    """
    tokens = logits.shape[1]
    places = targets, torch.arange(tokens)
    chosen = logits[places]
    highest = torch.full((tokens,), torch.finfo(torch.float32).min)
    total = torch.zeros(tokens)
    blocks, maxima = logits.split(words), []
    for block in blocks:
        before, highest = highest, torch.maximum(highest, block.amax(0))
        total.mul_((before - highest).exp_()).add_(block.sub_(highest).exp_().sum(0))
        maxima.append(highest)
    normalizer = highest + total.log()
    losses = normalizer - chosen
    if differentiate:
        for block, maximum in zip(blocks, maxima, strict=True):
            block.mul_((maximum - normalizer).exp_())
        logits[places] = losses.neg().exp_().sub_(1)
    return losses


def by_tokens(
    logits: torch.Tensor,
    targets: torch.Tensor,
    buffers: Sequence[torch.Tensor],
    cap: float | None,
    differentiate: bool,
) -> torch.Tensor:
    """Return the losses (C,) of logits (C, V); `buffers` are float32 for some rows of them.

    One buffer where a CPU's logits are not capped, else two.
    """
    in_place = len(buffers) == 1
    losses = [
        _some_tokens_in_place(some, those, buffers[0])
        if in_place
        else _some_tokens(some, those, buffers, cap, differentiate)
        for some, those in zip(
            *(one.split(len(buffers[0]) // logits.shape[1]) for one in (logits, targets[:, None])),
            strict=True,
        )
    ]
    return torch.cat(losses)


def _some_tokens_in_place(
    logits: torch.Tensor, targets: torch.Tensor, buffer: torch.Tensor
) -> torch.Tensor:
    """Make derivatives of uncapped logits by torch's softmax, twice as fast as its exponential.

    The largest of a token's probabilities is exp(its logit) / sum(exp): the sum without a pass.
    """
    narrow = logits.dtype != torch.float32
    wide = _widened(logits, buffer) if narrow else logits
    chosen, highest = wide.gather(-1, targets), wide.amax(-1, keepdim=True)
    torch.softmax(wide, -1, out=wide)
    losses = highest - wide.amax(-1, keepdim=True).log() - chosen
    wide.scatter_(-1, targets, losses.neg().exp_().sub_(1))
    if narrow:
        logits.copy_(wide)
    return losses.squeeze(-1)


def _some_tokens(
    logits: torch.Tensor,
    targets: torch.Tensor,
    buffers: Sequence[torch.Tensor],
    cap: float | None,
    differentiate: bool,
) -> torch.Tensor:
    wide = _capped(_widened(logits, buffers[0]), cap)
    # torch would make a float32 copy of its own, if it were given the logits.
    logarithms = torch.log_softmax(wide, -1, out=buffers[1][: logits.numel()].view_as(logits))
    losses = -logarithms.gather(-1, targets).squeeze(-1)
    if differentiate:
        derivative = logarithms.exp_()
        derivative.scatter_(-1, targets, derivative.gather(-1, targets) - 1)
        slope = None if cap is None else wide.div_(cap).square_().neg_().add_(1)
        logits.copy_(derivative if slope is None else derivative.mul_(slope))
    return losses


def compiled_by_tokens(
    logits: torch.Tensor, targets: torch.Tensor, cap: float | None, differentiate: bool
) -> torch.Tensor:
    """Return the losses (C,) of logits (C, V); each shape of logits is compiled once.

    The first time it is proved on these logits: raises ConfigurationError where compiled code does
    not compute what `by_tokens` does.
    """
    kind = (logits.shape, logits.dtype, cap, differentiate)
    before = None if kind in _proved else logits.clone()
    # Read here: compiled by torch 2.11 for a CPU it is read after it has become a derivative.
    chosen = _capped(logits.gather(-1, targets[:, None]).squeeze(-1).float(), cap)
    losses = _compiled()(logits, targets, cap, differentiate) - chosen
    if before is not None:
        _prove(before, targets, cap, (losses, logits if differentiate else None))
        _proved.add(kind)
    return losses


def _prove(
    logits: torch.Tensor,
    targets: torch.Tensor,
    cap: float | None,
    found: tuple[torch.Tensor, torch.Tensor | None],
) -> None:
    """Compare losses and derivatives, some tokens at a time; `logits` are overwritten."""
    losses, derivatives = found
    size = PROVED_TOKENS * logits.shape[1]
    empty = functools.partial(torch.empty, size, dtype=torch.float32, device=logits.device)
    buffers = (empty(), empty())
    for begin in range(0, len(logits), PROVED_TOKENS):
        some = slice(begin, begin + PROVED_TOKENS)
        expected = _some_tokens(
            logits[some], targets[some, None], buffers, cap, derivatives is not None
        )
        pairs = [(losses[some], expected)]
        if derivatives is not None:
            pairs.append((derivatives[some].float(), logits[some].float()))
        if any(_differ(one, other) for one, other in pairs):
            raise ConfigurationError(
                f"--compile true: torch {torch.__version__} compiles the softmax of the loss "
                f"wrongly for {logits.device.type}: set --compile false"
            )


def _differ(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compare float32 values; what is not finite, as after a divergence, counts as 0 in both."""
    one, other = (values.nan_to_num(0, 0, 0) for values in (found, expected))
    return bool((one - other).norm() > TOLERANCE * other.norm())


@functools.cache
def _compiled() -> Callable[..., torch.Tensor]:
    return torch.compile(_normalize, dynamic=False)


def _normalize(
    logits: torch.Tensor, targets: torch.Tensor, cap: float | None, differentiate: bool
) -> torch.Tensor:
    """Return log(sum(exp(logits))) of each token (C,): a kernel that reads, one that writes."""
    wide = logits.float()
    if cap is not None:
        wide = cap * torch.tanh(wide / cap)
    normalizer = torch.logsumexp(wide, -1, keepdim=True)
    if differentiate:
        words = torch.arange(logits.shape[1], device=logits.device)
        derivative = (wide - normalizer).exp() - (words == targets[:, None]).float()
        if cap is not None:
            derivative = derivative * (1 - (wide / cap).square())
        logits.copy_(derivative)
    return normalizer.squeeze(-1)


def _widened(logits: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Return a copy in float32; the next one takes its place."""
    return buffer[: logits.numel()].view_as(logits).copy_(logits)


def _capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Cap float32 logits in place."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _slope(capped: torch.Tensor, cap: float | None) -> torch.Tensor | None:
    """Return the derivative of capped logits by the logits; None for 1."""
    return None if cap is None else capped.div(cap).square_().neg_().add_(1)
