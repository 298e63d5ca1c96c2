"""What AdamW keeps of a part of a weight: read as float32, and rounded to how it is kept."""

from typing import Protocol

import torch

from utils.kernels import eight_bit
from utils.kernels.stochastic_rounding import MANTISSA_BITS_LOST, round_to_bfloat16_

MOMENTS = ("exp_avg", "exp_avg_sq")
SCALE = "_scale"  # ends the name of a moment's scales, one for each block of 8-bit codes
Part = dict[str, torch.Tensor]  # weight, gradient, the moments and, of 8-bit codes, their scales


class Place(Protocol):
    """Where a part lies, which is what its noise follows from."""

    def noise(self, number: int, bits: int) -> torch.Tensor:
        """Return int32 below 2**bits, as many as the part has; other noise for each number."""


def moment(part: Part, name: str) -> torch.Tensor:
    """Return a moment in float32: the kept one itself if it is so."""
    if name + SCALE in part:
        return eight_bit.decode(part[name], part[name + SCALE])
    return part[name].float()


def keep_moment(values: torch.Tensor, part: Part, name: str, place: Place | None) -> None:
    """Round a float32 moment to how it is kept; without a place to the nearest.

    Overwrites `values`.
    """
    kept, number = part[name], MOMENTS.index(name)
    if name + SCALE in part:
        bits = eight_bit.BITS_LOST
        half = 2 ** (bits - 1)
        rounding = (
            torch.full_like(values, half, dtype=torch.int32)
            if place is None
            else place.noise(number, bits)
        )
        eight_bit.encode(values, kept, part[name + SCALE], rounding)
    elif kept.dtype != torch.float32 and place is not None:
        kept.copy_(round_to_bfloat16_(values, place.noise(number, MANTISSA_BITS_LOST)))
    elif kept is not values:
        kept.copy_(values)


def keep_weight(values: torch.Tensor, part: Part, place: Place | None) -> None:
    """Round float32 values to the weight's type; without a place to the nearest.

    Overwrites `values`.
    """
    kept = part["weight"]
    if kept.dtype != torch.float32 and place is not None:
        round_to_bfloat16_(values, place.noise(len(MOMENTS), MANTISSA_BITS_LOST))
    if kept is not values:
        kept.copy_(values)
