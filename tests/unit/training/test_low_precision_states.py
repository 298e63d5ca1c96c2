"""Stochastic rounding is unbiased, depends only on its keys, and keeps representable values."""

from functools import partial

import numpy as np
import pytest
import torch

from utils.training.low_precision_states import (
    SCALE,
    block_size,
    moment,
    multipliers,
    noise,
    random_words,
    round_into,
)

CPU = torch.device("cpu")
COUNT = 2**15
REPEATS = 1000


def noise_of(shape: torch.Size, *keys: int):
    (factor,) = multipliers(*keys[:-1], np.array(keys[-1:], dtype=np.uint64)).tolist()
    return partial(noise, random_words(CPU, 1)[: shape.numel(), 0].view(shape), factor)


def rounded(values: torch.Tensor, *keys: int, kind: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return the rounded values: at random by the keys, or to the nearest without keys."""
    if kind != torch.bfloat16:
        values = values.view(-1, 256)
    part = {"m": torch.empty(values.shape, dtype=kind)}
    if kind != torch.bfloat16:
        part["m" + SCALE] = torch.empty(len(values))
    round_into(values.clone(), part, "m", noise_of(values.shape, *keys) if keys else None)
    return moment(part, "m").view(-1)


def test_the_mean_of_many_roundings_is_the_number_itself():
    values = torch.rand(4096, generator=torch.Generator().manual_seed(1)) * 2 - 1
    mean = sum(rounded(values, 7, step).double() for step in range(REPEATS)) / REPEATS
    gap = torch.exp2(values.abs().log2().floor() - 7)  # the gap between the two bfloat16 neighbours
    share = values.abs() / gap % 1
    spread = gap * (share * (1 - share)).sqrt()
    errors = ((mean - values) / spread * REPEATS**0.5)[share * (1 - share) > 1e-3]
    # If each rounding is independent and unbiased, these errors are standard normal.
    assert errors.mean().abs() < 0.1
    assert errors.std() == pytest.approx(1, abs=0.05)
    assert errors.abs().max() < 5


def test_noise_is_independent_and_that_of_the_first_start():
    values = torch.full((COUNT,), 1 + 2**-9)  # a quarter of the way to the next bfloat16
    up = (rounded(values, 1, 2, 3) > 1).double()
    assert up.mean() == pytest.approx(0.25, abs=0.01)
    for distance in (1, 2, 64, 256, 384):
        together = (up[distance:] * up[:-distance]).mean()
        assert together == pytest.approx(0.25**2, abs=0.01), distance
    first = noise_of(values.shape, 1, 2, 3)(16)
    # Compare with constants: the numbers must be the same for checkpoints of older versions.
    assert first[:4].tolist() == [12434, 28981, 23699, 1304]
    for keys in ((2, 2, 3), (1, 3, 3), (1, 2, 4), (3, 2, 1)):
        assert (first == noise_of(values.shape, *keys)(16)).double().mean() < 0.001
    blocks, elements = random_words(CPU, 192).view(-1), random_words(CPU, 1).view(-1)
    assert torch.equal(blocks, elements[: len(blocks)])


def test_what_bfloat16_has_stays_and_the_rest_goes_to_a_neighbour():
    exact = torch.randn(COUNT).bfloat16().float()
    assert torch.equal(rounded(exact, 5), exact)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    assert torch.equal(rounded(special, 5).nan_to_num(9), special.nan_to_num(9))
    values = torch.randn(COUNT)
    assert ((rounded(values, 5) - values).abs() <= values.abs() * 2**-7).all()


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8])
def test_eight_bits_keep_a_sixteenth_at_worst_and_nothing_is_lost_on_average(kind):
    values = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    values = values if kind == torch.int8 else values.square()
    large = values.abs() > values.abs().max() * 1e-4
    nearest = rounded(values, kind=kind)
    assert ((nearest - values) / values)[large].abs().max() <= 1 / 16 + 1e-6
    mean = sum(rounded(values, step, kind=kind).double() for step in range(REPEATS)) / REPEATS
    errors = ((mean - values) / values)[large]
    assert errors.abs().max() < 0.01
    assert errors.mean().abs() < 5e-4


def test_the_largest_of_a_block_is_exact_and_a_second_moment_never_becomes_zero():
    values = torch.full((512,), 1e-12)
    values[3], values[300] = 3.7, 1e-3
    for kind in (torch.int8, torch.uint8):
        result = rounded(values, kind=kind)
        assert result[3] == 3.7
        assert result[300] == torch.tensor(1e-3)
        assert bool((result > 0).all()) is (kind == torch.uint8)
    assert torch.equal(rounded(torch.zeros(512), 1, kind=torch.int8), torch.zeros(512))


def test_blocks_divide_rows_so_that_shards_of_rows_keep_them_whole():
    shapes = {(1000, 384): 192, (4096, 4096): 256, (8, 100, 64): 64}
    shapes |= dict.fromkeys([(4096,), (10, 256), (400, 33)])
    assert {shape: block_size(shape) for shape in shapes} == shapes
