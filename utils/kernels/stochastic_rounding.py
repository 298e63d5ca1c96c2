"""Rounds float32 to fewer bits up or down at random, so that what is lost is zero on average.

The noise is a pure function of its keys and of an element's index. No generator is drawn from: all
ranks round alike, whatever their devices, and a resumed run rounds as the uninterrupted one.
"""

import functools
from typing import Any

import numpy as np
import torch

MANTISSA_BITS_LOST = 16  # of float32 in bfloat16
PERIODS = {"cpu": 2**15}  # elements; a chunk with its temporaries stays in the cache
PERIOD_ELSEWHERE = 2**22  # few launches; some copies of 16 MiB
_WORD = 2**64 - 1


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
    """Return odd int32 numbers that seem drawn at random by the keys; uint64 arrays broadcast.

    Each key goes through SplitMix64's mixer (Steele et al. 2014, "Fast Splittable Pseudorandom
    Number Generators", figure 16).
    """
    state: Any = 0
    for key in keys:
        state = (state + key + 0x9E3779B97F4A7C15) & _WORD
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _WORD
        state ^= state >> 31
    return ((state >> 32).astype(np.int64) - 2**31 | 1).astype(np.int32)


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
