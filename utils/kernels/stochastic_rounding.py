"""Rounds float32 to fewer bits up or down at random, so that what is lost is zero on average.

The noise is a pure function of its keys and of an element's place. No generator is drawn from: all
ranks round alike, whatever their devices, and a resumed run rounds as the uninterrupted one.
"""

import functools
from typing import Any

import numpy as np
import torch

MANTISSA_BITS_LOST = 16  # of float32 in bfloat16
PLACES = {"cpu": 2**15}  # a chunk with its temporaries stays in the cache
PLACES_ELSEWHERE = 2**22  # few launches; some copies of 16 MiB
_WORD = 2**64 - 1


def places(device: torch.device) -> int:
    """Return how many elements are worked on at a time, which all noise repeats after."""
    return PLACES.get(device.type, PLACES_ELSEWHERE)


def multiplier(*keys: int) -> int:
    """Return an odd number of 32 bits, with its sign, that seems drawn at random by the keys."""
    return (_mixed(keys) >> 32) - 2**31 | 1


def multipliers(*keys: int | np.ndarray) -> np.ndarray:
    """Return the int32 multipliers of many keys at once: arrays are uint64 and broadcast."""
    high = (_mixed(keys) >> 32).astype(np.int64)
    return (high - 2**31 | 1).astype(np.int32)


def _mixed(keys: tuple[Any, ...]) -> Any:
    """Return 64 bits that follow from the keys.

    The mixer is SplitMix64's (Steele et al. 2014, "Fast Splittable Pseudorandom Number
    Generators", figure 16).
    """
    state: Any = 0
    for key in keys:
        state = (state + key + 0x9E3779B97F4A7C15) & _WORD
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _WORD
        state ^= state >> 31
    return state


@functools.cache
def random_words(device: torch.device) -> torch.Tensor:
    """Return one odd random int32 for each place, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    words = torch.empty(places(device), dtype=torch.int32)
    words.random_(-(2**31), 2**31 - 1, generator=generator)
    return words.bitwise_or_(1).to(device)


def noise(device: torch.device, first: int, count: int, factor: int, bits: int) -> torch.Tensor:
    """Return (count,) int32 below 2**bits: the high bits of each place's word times the factor.

    Multiplicative hashing: words and factors are odd, so every word is as likely as any other.
    """
    return high_bits(random_words(device)[first : first + count] * factor, bits)


def high_bits(products: torch.Tensor, bits: int) -> torch.Tensor:
    """Turn int32 products into their high bits, in place."""
    return products.bitwise_right_shift_(32 - bits).bitwise_and_(2**bits - 1)


def round_to_bfloat16_(values: torch.Tensor, noise_: torch.Tensor) -> torch.Tensor:
    """Round float32 values in place to numbers that bfloat16 has; exact ones stay as they are.

    `noise_` is below 2**16 and as long. Infinities stay, and so do torch's own NaNs.
    """
    values.view(torch.int32).add_(noise_).bitwise_and_(-(2**MANTISSA_BITS_LOST))
    return values
