"""Weights and Adam's moments in fewer bits, rounded at random so that the mean error is zero.

In 8 bits, an element of a moment is a short float, scaled so that the largest of its block is 1
(block-wise quantization: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization",
arXiv 2110.02861). A first moment has a sign, 4 bits of exponent and 3 of mantissa. A second moment
has 5 bits of exponent and 3 of mantissa. It is never rounded to 0, because Adam divides by it
(Li et al. 2023, "Memory Efficient Optimizers with 4-bit States", arXiv 2309.01507, section 4.1).
"""

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from utils.data.order import mix

BLOCKS = range(256, 63, -1)  # sizes in elements; scales of smaller blocks would add more than 6 %
FEWEST_ELEMENTS = 4096  # smaller tensors (norms, biases) save too little, as in bitsandbytes
SCALE = "_scale"  # suffix of the name of a moment's scales, one scale for each block of codes
BITS_LOST = 20  # of float32 in 8 bits: 3 bits of mantissa are left
MANTISSA_BITS_LOST = 16  # of float32 in bfloat16
# Elements after which the random words repeat.
PERIODS = {"cpu": 2**15}  # a period with its temporary tensors stays in the cache
PERIOD_ELSEWHERE = 2**22  # few kernel launches; temporary tensors of 16 MiB
_ONE = 0x3F800000 >> BITS_LOST  # the bits of 1.0 in float32 that are not lost
_LARGEST = {torch.int8: 127, torch.uint8: 255}
_TINY = 1e-30  # least scale, so that a block of zeros can be divided by its scale
# Tensors by name: weight, gradient, moments, and the scales of moments in 8 bits.
State = dict[str, Tensor]


def block_size(shape: Sequence[int]) -> int | None:
    """Return the number of elements in a block. Blocks lie inside rows, so sharding cuts no block.

    Return None for a tensor that is too small for 8 bits, or if no block size divides its rows.
    """
    if len(shape) < 2 or math.prod(shape) < FEWEST_ELEMENTS:
        return None
    return next((size for size in BLOCKS if shape[-1] % size == 0), None)


def moment(part: State, name: str) -> Tensor:
    """Return a moment or the weight in float32. A float32 tensor is returned without a copy."""
    kept, scales = part[name], part.get(name + SCALE)
    if scales is None:
        return kept.float()
    short = kept.int()
    signs = short.sign()
    short = short.abs_().add_(_ONE - _LARGEST[kept.dtype]).bitwise_left_shift_(BITS_LOST)
    return short.view(torch.float32).mul_(signs).mul_(scales.unsqueeze(-1))


def round_into(
    values: Tensor, part: State, name: str, random: Callable[[int], Tensor] | None
) -> None:
    """Round float32 values (rows, unit) into `part[name]`; overwrites `values`.

    `random(bits)` returns int32 noise below 2**bits. If it is None, values are rounded to the
    nearest. Values that bfloat16 can hold do not change, including infinities and torch's NaNs.
    """
    kept, scales = part[name], part.get(name + SCALE)
    if scales is not None:
        _encode(values, kept, scales, 2 ** (BITS_LOST - 1) if random is None else random(BITS_LOST))
    elif kept is not values:
        if kept.dtype != torch.float32 and random is not None:
            lost = MANTISSA_BITS_LOST
            values.view(torch.int32).add_(random(lost)).bitwise_and_(-(2**lost))
        kept.copy_(values)


def _encode(values: Tensor, codes: Tensor, scales: Tensor, added: Tensor | int) -> None:
    """Write (blocks, block) values as int8 codes with a sign, or as uint8 codes without a sign."""
    torch.amax(values.abs(), dim=-1, out=scales)  # vector_norm takes ten times as long
    scales.clamp_(min=_TINY)
    values.div_(scales.unsqueeze(-1))
    largest, signed = _LARGEST[codes.dtype], codes.dtype == torch.int8
    signs = values.sign() if signed else None
    short = values.abs_().view(torch.int32).add_(added).bitwise_right_shift_(BITS_LOST)
    short.sub_(_ONE - largest).clamp_(0 if signed else 1, largest)
    codes.copy_(short if signs is None else short.mul_(signs.int()))


@functools.cache
def random_words(device: torch.device, unit: int) -> Tensor:
    """Return an odd random int32 for each element of a period, (rows, unit).

    The numbers are the same on every device.
    """
    generator = torch.Generator().manual_seed(0)
    words = torch.empty(PERIODS.get(device.type, PERIOD_ELSEWHERE), dtype=torch.int32)
    words.random_(-(2**31), 2**31 - 1, generator=generator)
    rows = len(words) // unit
    table = words[: rows * unit].view(rows, unit).bitwise_or(1).to(device)
    torch._dynamo.mark_static(table)  # let compiled code depend on this shape
    return table


def multipliers(*keys: int | np.ndarray) -> np.ndarray:
    """Return pseudo-random odd int32 numbers that depend on the keys; uint64 arrays broadcast."""
    state = np.zeros(1, dtype=np.uint64)
    for key in keys:
        state = mix(state + np.asarray(key, dtype=np.uint64))
    return ((state >> np.uint64(32)).astype(np.int64) - 2**31 | 1).astype(np.int32)


def noise(words: Tensor, factors: Tensor, bits: int) -> Tensor:
    """Return int32 noise below 2**bits: the high bits of each word times its factor.

    This is multiplicative hashing. Words and factors are odd, so all products are equally likely.
    """
    return (words * factors).bitwise_right_shift_(32 - bits).bitwise_and_(2**bits - 1)
