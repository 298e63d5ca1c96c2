"""Rounding at random loses nothing on average, follows from its keys alone, and keeps what fits."""

import pytest
import torch

from utils.kernels import eight_bit
from utils.kernels.stochastic_rounding import multiplier, noise, places, round_to_bfloat16_

CPU = torch.device("cpu")
COUNT = places(CPU)
REPEATS = 1000


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # elements are few, and other tests run beside
    yield
    torch.set_num_threads(threads)


def rounded(values: torch.Tensor, *keys: int) -> torch.Tensor:
    return round_to_bfloat16_(values.clone(), noise(CPU, 0, len(values), multiplier(*keys), 16))


def test_the_mean_of_many_roundings_is_the_number_itself():
    values = torch.rand(4096, generator=torch.Generator().manual_seed(1)) * 2 - 1
    mean = sum(rounded(values, 7, step).double() for step in range(REPEATS)) / REPEATS
    gap = torch.exp2(values.abs().log2().floor() - 7)  # between the two bfloat16 neighbours
    share = values.abs() / gap % 1
    spread = gap * (share * (1 - share)).sqrt()
    errors = ((mean - values) / spread * REPEATS**0.5)[share * (1 - share) > 1e-3]
    # Standard normal if each rounding is independent and unbiased.
    assert errors.mean().abs() < 0.1
    assert errors.std() == pytest.approx(1, abs=0.05)
    assert errors.abs().max() < 5


def test_neighbours_of_one_step_are_rounded_independently():
    values = torch.full((COUNT,), 1 + 2**-9)  # a quarter of the way to the next bfloat16
    up = (rounded(values, 1, 2, 3) > 1).double()
    assert up.mean() == pytest.approx(0.25, abs=0.01)
    for distance in (1, 2, 64, 256, 384):
        together = (up[distance:] * up[:-distance]).mean()
        assert together == pytest.approx(0.25**2, abs=0.01), distance


def test_what_bfloat16_has_stays_and_the_rest_goes_to_a_neighbour():
    exact = torch.randn(COUNT).bfloat16().float()
    assert torch.equal(rounded(exact, 5), exact)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    assert torch.equal(rounded(special, 5).nan_to_num(9), special.nan_to_num(9))
    values = torch.randn(COUNT)
    result = rounded(values, 5)
    assert torch.equal(result, result.bfloat16().float())
    assert ((result - values).abs() <= values.abs() * 2**-7).all()


def test_other_keys_are_other_noise_and_the_same_ones_are_not():
    first = noise(CPU, 0, COUNT, multiplier(1, 2, 3), 16)
    assert torch.equal(first, noise(CPU, 0, COUNT, multiplier(1, 2, 3), 16))
    for keys in ((2, 2, 3), (1, 3, 3), (1, 2, 4), (3, 2, 1)):
        assert (first == noise(CPU, 0, COUNT, multiplier(*keys), 16)).double().mean() < 0.001
    part = noise(CPU, 100, 50, multiplier(1, 2, 3), 16)
    assert torch.equal(part, first[100:150]), "an element's noise follows from its place"


def kept(values: torch.Tensor, kind: torch.dtype, added: torch.Tensor) -> torch.Tensor:
    codes = torch.empty(len(values), dtype=kind)
    scales = torch.empty(len(values) // 256)
    eight_bit.encode(values.clone(), codes, scales, added)
    return eight_bit.decode(codes, scales)


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8])
def test_eight_bits_keep_a_sixteenth_at_worst_and_nothing_is_lost_on_average(kind):
    values = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    values = values if kind == torch.int8 else values.square()
    large = values.abs() > values.abs().max() * 1e-4
    nearest = kept(values, kind, torch.full((4096,), 2**19, dtype=torch.int32))
    assert ((nearest - values) / values)[large].abs().max() <= 1 / 16 + 1e-6
    mean = 0
    for step in range(REPEATS):
        mean = mean + kept(values, kind, noise(CPU, 0, 4096, multiplier(step), 20)).double()
    errors = ((mean / REPEATS - values) / values)[large]
    assert errors.abs().max() < 0.01
    assert errors.mean().abs() < 5e-4


def test_the_largest_of_a_block_is_exact_and_a_second_moment_never_becomes_zero():
    values = torch.full((512,), 1e-12)
    values[3], values[300] = 3.7, 1e-3
    for kind in (torch.int8, torch.uint8):
        result = kept(values, kind, torch.zeros(512, dtype=torch.int32))
        assert result[3] == 3.7
        assert result[300] == torch.tensor(1e-3)
        assert bool((result > 0).all()) is (kind == torch.uint8)
    zeros = kept(torch.zeros(512), torch.int8, torch.full((512,), 2**20 - 1, dtype=torch.int32))
    assert torch.equal(zeros, torch.zeros(512))


def test_blocks_divide_rows_so_that_shards_of_rows_keep_them_whole():
    assert eight_bit.block_size((1000, 384)) == 192
    assert eight_bit.block_size((4096, 4096)) == 256
    assert eight_bit.block_size((8, 100, 64)) == 64
    for small in ((4096,), (10, 256), (400, 33)):
        assert eight_bit.block_size(small) is None
