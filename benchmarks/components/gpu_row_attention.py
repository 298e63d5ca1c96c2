"""Causal attention in rows of one document each, as in pretraining on long documents."""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.attention import SDPBackend

from benchmarks.components.attention_inputs import (
    Attend,
    chosen_kernel,
    needed_kernel,
    through,
    through_sdpa,
    timed,
)
from utils.kernels.varlen import VarlenKernel, load_flash_attention, load_torch_varlen

TITLE = "Attention in 32,768 tokens, rows of one document, 16 heads of 128, 8 for keys, bf16"
UNIT = "tokens"
SIZES = (2048, 8192, 32768)
TOKENS = 32768


def _rows(length: int) -> int:
    return max(TOKENS // length, 1) if length >= min(SIZES) else 2  # toys are small


def boundaries(length: int) -> torch.Tensor:
    """Return where rows begin, and the end: int32."""
    return torch.arange(0, _rows(length) * length + 1, length, dtype=torch.int32)


def stoker(length: int) -> Attend:
    """Attend as our models do."""
    return through(chosen_kernel(whole_rows=True), boundaries(length), length)


def kernel(load: Callable[[], VarlenKernel | str], length: int) -> Attend:
    """Attend through one of the kernels that Stoker can choose."""
    return through(needed_kernel(load), boundaries(length), length)


def sdpa(backend: SDPBackend | None, _length: int) -> Attend:
    """Attend through torch's SDPA, by its own choice or by one of its kernels."""
    return through_sdpa(backend)


ATTENDING: dict[str, Callable[[int], Attend]] = {
    "Stoker": stoker,
    "FlashAttention 3": partial(kernel, partial(load_flash_attention, 3)),
    "FlashAttention 2": partial(kernel, partial(load_flash_attention, 2)),
    "torch's varlen_attn": partial(kernel, load_torch_varlen),
    "SDPA, torch's choice": partial(sdpa, None),
    "SDPA, cuDNN": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "SDPA, flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),
}


def _prepare(name: str, length: int) -> tuple[Callable[[], object], int]:
    return timed(_rows(length), length, ATTENDING[name](length))


CONTESTANTS = {name: partial(_prepare, name) for name in ATTENDING}
