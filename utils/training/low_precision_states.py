"""Adam's moments in 8 bits an element: short floats, in blocks that share a scale.

The largest of a block is 1 (block-wise quantization: Dettmers et al. 2022, "8-bit Optimizers via
Block-wise Quantization", arXiv 2110.02861). Below it a first moment has a sign, 4 bits of exponent
and 3 of mantissa, a second moment 5 and 3; it is never rounded to 0, which Adam would divide by (Li
et al. 2023, "Memory Efficient Optimizers with 4-bit States", arXiv 2309.01507, section 4.1).
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch

from utils.data.order import mix

BLOCKS = range(256, 63, -1)  # elements; in smaller ones the scales would take more than 6 % on top
FEWEST_ELEMENTS = 4096  # norms and biases are not worth it, as in bitsandbytes
BITS_LOST = 20  # of float32: 3 bits of mantissa are left
_ONE = 0x3F800000 >> BITS_LOST  # the code of 1.0 with all its bits of exponent
_LARGEST = {torch.int8: 127, torch.uint8: 255}
_TINY = 1e-30  # a block of zeros is divided by it


def block_size(shape: Sequence[int]) -> int | None:
    """Return the elements of a block: it divides rows, so that shards of rows keep blocks whole.

    None for a tensor that is not kept in 8 bits: it is small, or its rows do not divide well.
    """
    if len(shape) < 2 or math.prod(shape) < FEWEST_ELEMENTS:
        return None
    return next((size for size in BLOCKS if shape[-1] % size == 0), None)


def encode(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, noise: torch.Tensor | int
) -> None:
    """Write (blocks, block) float32 values into as many codes and (blocks,) scales.

    int8 codes have a sign; those of uint8 are for values that are not negative. `noise` is int32
    below 2**20, half of which rounds to the nearest. Overwrites `values`.
    """
    torch.amax(values.abs(), dim=-1, out=scales)  # vector_norm takes ten times as long
    scales.clamp_(min=_TINY)
    values.div_(scales.unsqueeze(-1))
    largest = _LARGEST[codes.dtype]
    signed = codes.dtype == torch.int8
    signs = values.sign() if signed else None
    short = values.abs_().view(torch.int32).add_(noise).bitwise_right_shift_(BITS_LOST)
    short.sub_(_ONE - largest).clamp_(0 if signed else 1, largest)
    codes.copy_(short if signs is None else short.mul_(signs.int()))


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the (blocks, block) float32 values of codes and (blocks,) scales."""
    short = codes.int()
    signs = short.sign()
    short = short.abs_().add_(_ONE - _LARGEST[codes.dtype]).bitwise_left_shift_(BITS_LOST)
    return short.view(torch.float32).mul_(signs).mul_(scales.unsqueeze(-1))


# Rounds float32 to fewer bits up or down at random, so that what is lost is zero on average.

MANTISSA_BITS_LOST = 16  # of float32 in bfloat16
PERIODS = {"cpu": 2**15}  # elements; a chunk with its temporaries stays in the cache
PERIOD_ELSEWHERE = 2**22  # few launches; some copies of 16 MiB


def period(device: torch.device, unit: int) -> int:
    """Return after how many rows of `unit` elements the random words repeat."""
    return PERIODS.get(device.type, PERIOD_ELSEWHERE) // unit


@functools.cache
def random_words(device: torch.device, unit: int) -> torch.Tensor:
    """Return one odd random int32 for each element of a period, (rows, unit), on every device."""
    generator = torch.Generator().manual_seed(0)
    words = torch.empty(PERIODS.get(device.type, PERIOD_ELSEWHERE), dtype=torch.int32)
    words.random_(-(2**31), 2**31 - 1, generator=generator)
    rows = period(device, unit)
    table = words[: rows * unit].view(rows, unit).bitwise_or(1).to(device)
    torch._dynamo.mark_static(table)  # compiled code has this shape built in
    return table


def multipliers(*keys: int | np.ndarray) -> np.ndarray:
    """Return odd int32 numbers that seem drawn at random by the keys; uint64 arrays broadcast."""
    state = np.zeros(1, dtype=np.uint64)
    for key in keys:
        state = mix(state + np.asarray(key, dtype=np.uint64))
    return ((state >> np.uint64(32)).astype(np.int64) - 2**31 | 1).astype(np.int32)


def noise(words: torch.Tensor, factors: torch.Tensor, bits: int) -> torch.Tensor:
    """Return int32 below 2**bits: the high bits of each word times its factor.

    Multiplicative hashing: words and factors are odd, so every word is as likely as any other.
    """
    return (words * factors).bitwise_right_shift_(32 - bits).bitwise_and_(2**bits - 1)


def round_to_bfloat16_(values: torch.Tensor, noise_: torch.Tensor) -> torch.Tensor:
    """Round float32 values in place to numbers that bfloat16 has; exact ones stay as they are.

    `noise_` is below 2**16 and of the same shape. Infinities stay, and so do torch's own NaNs.
    """
    values.view(torch.int32).add_(noise_).bitwise_and_(-(2**MANTISSA_BITS_LOST))
    return values
