"""Cross-entropy of a chunk's logits, which become their own derivatives, in place.

Ways to the same numbers, to rounding: by words or by tokens in blocks that stay in a CPU's cache,
by tokens in torch's own kernels, and by tokens in one compiled function that reads the logits
twice and writes them once.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from typing_extensions import override

from utils.config.errors import ConfigurationError
from utils.config.precision import has_amx

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


# How much of a loss head is in memory at a time, by device, and what that takes.

# Logits in memory at a time: enough rows for full speed of the matrix products, no more. Products
# are slower for a number of rows that no tile divides; for each number oneDNN makes code on CPUs.
CHUNK_ROWS = {"cpu": 1024, "cuda": 4096}
COMPILED_CHUNK_ROWS = 2048
CHUNK_ELEMENTS = {"cpu": 2**26, "cuda": 2**29}
TILE_ROWS = {"cpu": 64, "cuda": 128}

# How many logits are in float32 at a time: for a CPU's caches 1 MiB where they lie as (V, tokens),
# else 4; two times 128 MiB on a GPU, which has no use for small blocks.
BY_WORDS_ELEMENTS = 2**18
BLOCK_ELEMENTS = {"cpu": 2**20, "cuda": 2**25}

# A GPU's fast products read rows of whole 16 bytes. With GPT-2's 50,257 words a step took twice as
# long as it had to (docs/experiments.md): the head is computed with some words of zeros more.
WORDS_TILE = {"cpu": 1, "cuda": 8}

# Rows of the weight whose gradient's product is in half precision at a time, before it is added up.
PRODUCT_WORDS = 8192


def working_bytes(tokens: int, vocabulary: int, width: int, device: str, compute_bytes: int) -> int:
    """Return what a training call takes beside its inputs: logits, softmax, weight's gradient.

    width is that of the hidden states, `compute_bytes` the size of the products' type. Not
    compiled, which takes less.
    """
    words = whole_tiles(vocabulary, device)
    tokens = whole_rows(tokens, device)
    rows = chunk_rows(tokens, words, device, compiled=False)
    buffers = softmax_buffers(device) * block_elements(rows, vocabulary, device)
    taken = words * (rows * compute_bytes + width * 4) + buffers * 4
    copied = 0 if compute_bytes == 4 and words == vocabulary else words
    widened = 0 if compute_bytes == 4 else product_words(words, device)
    return taken + (copied + widened) * width * compute_bytes


def words_first(device: str) -> bool:
    """Say whether logits lie as (V, tokens): AMX's products in bf16 are faster so."""
    return device == "cpu" and has_amx()


def whole_rows(tokens: int, device: str) -> int:
    """Return how many tokens go through the head: on a CPU whole tiles of them."""
    return -(-tokens // TILE_ROWS["cpu"]) * TILE_ROWS["cpu"] if device == "cpu" else tokens


def can_be_compiled(device: str) -> bool:
    """Say whether the softmax is better compiled: on a CPU it goes over blocks in the caches."""
    return device != "cpu"


def softmax_buffers(device: str, capped: bool = False) -> int:
    """Return how many blocks of logits in float32 the softmax takes, unless it is compiled."""
    return 1 if device == "cpu" and (words_first(device) or not capped) else 2


def whole_tiles(vocabulary: int, device: str) -> int:
    """Return how many words the head is computed with: the vocabulary's, or a few more."""
    tile = WORDS_TILE.get(device, WORDS_TILE["cuda"])
    return -(-vocabulary // tile) * tile


def product_words(words: int, device: str) -> int:
    """Return how many words' gradients are in half precision at a time; CUDA's never are."""
    return 0 if device == "cuda" else min(words, PRODUCT_WORDS)


def chunk_rows(tokens: int, words: int, device: str, compiled: bool) -> int:
    """Return how many tokens go through the head at a time: as many in each chunk, about."""
    most = CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cuda"]) // words
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


def block_elements(rows: int, vocabulary: int, device: str) -> int:
    """Return how many logits are in float32 at a time: whole rows of words, or of tokens."""
    if words_first(device):
        return rows * min(vocabulary, max(1, BY_WORDS_ELEMENTS // rows))
    most = BLOCK_ELEMENTS.get(device, BLOCK_ELEMENTS["cuda"])
    least = torch.get_num_threads() if device == "cpu" else 1  # a row is one thread's
    return vocabulary * min(rows, max(least, most // vocabulary))


# Cross-entropy of a linear head, a few tokens at a time: the logits of all are never in memory.

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
