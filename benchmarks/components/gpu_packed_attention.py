"""Causal attention inside each document of one packed row, by every kernel that can."""

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch
from torch.nn.attention import SDPBackend

from benchmarks.components.attention_inputs import (
    Attend,
    chosen_kernel,
    device,
    needed_kernel,
    through,
    through_sdpa,
    timed,
)
from benchmarks.recording.job import CannotRunError
from utils.kernels.varlen import (
    PER_DOCUMENT,
    VarlenKernel,
    load_flash_attention,
    load_torch_varlen,
)

TITLE = "Attention in a packed row (documents of 600 tokens), 16 heads of 128, 8 for keys, bf16"
UNIT = "tokens"
SIZES = (4096, 16384, 65536)
LONGEST_MASK = 16384  # beyond it the mask of all pairs is slow and large; growth is seen before
MEAN, SIGMA = 600, 0.8


@cache
def boundaries(length: int) -> torch.Tensor:
    """Return where documents begin, and the end: int32."""
    random = np.random.default_rng(0)
    drawn = random.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, size=length).astype(np.int64)
    ends = np.cumsum(np.maximum(drawn, 8))
    return torch.tensor([0, *ends[ends < length].tolist(), length], dtype=torch.int32)


def block_mask(length: int) -> torch.Tensor:
    """Return which token sees which, bool (1, 1, T, T)."""
    document = _documents(length)
    return (document[:, None] == document[None, :]).tril()[None, None]


def _documents(length: int) -> torch.Tensor:
    ends = boundaries(length).long()
    return torch.bucketize(torch.arange(length), ends[1:], right=True).to(device())


def stoker(length: int) -> Attend:
    """Attend as our models do."""
    return through(chosen_kernel(), boundaries(length), length)


def kernel(load: Callable[[], VarlenKernel | str], length: int) -> Attend:
    """Attend through one of the kernels that Stoker can choose."""
    return through(needed_kernel(load), boundaries(length), length)


def masked(backend: SDPBackend | None, length: int) -> Attend | None:
    """Attend with a block mask of all pairs of tokens, as transformers does under sdpa."""
    if length > LONGEST_MASK:
        return None
    return through_sdpa(backend, block_mask(length))


def flex(length: int) -> Attend:
    """Attend by a compiled kernel for this mask, made before: transformers makes it each time."""
    if device() == "cpu":
        raise CannotRunError("flex_attention has no backward pass on a CPU")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    document = _documents(length)

    def visible(
        _batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (query >= key) & (document[query] == document[key])

    blocks = create_block_mask(visible, None, None, length, length, device=device())
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        attended = compiled(query, key, value, block_mask=blocks, enable_gqa=True)
        return attended.transpose(1, 2).contiguous()

    return attend


ATTENDING: dict[str, Callable[[int], Attend | None]] = {
    "Stoker": stoker,
    "FlashAttention 3": partial(kernel, partial(load_flash_attention, 3)),
    "FlashAttention 2": partial(kernel, partial(load_flash_attention, 2)),
    "torch's varlen_attn": partial(kernel, load_torch_varlen),
    "SDPA, document by document": partial(kernel, lambda: PER_DOCUMENT),
    "flex_attention": flex,
    "cuDNN with a block mask": partial(masked, SDPBackend.CUDNN_ATTENTION),
    "SDPA with a block mask": partial(masked, None),
}


def _prepare(name: str, length: int) -> tuple[Callable[[], object], int] | None:
    attend = ATTENDING[name](length)
    return attend and timed(1, length, attend)


CONTESTANTS = {name: partial(_prepare, name) for name in ATTENDING}
