"""AdamW with states in fewer bits: equal to torch's AdamW in float32, close to it otherwise.

Stochastic rounding is unbiased, depends only on its keys, and keeps representable values.
"""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from tiny import compiled_graphs
from torch import nn

from utils.training import low_precision_adam
from utils.training.low_precision_adam import (
    PERIODS,
    SCALE,
    LowPrecisionAdamW,
    block_size,
    moment,
    multipliers,
    noise,
    random_words,
    round_into,
)
from utils.training.optimizer import _state_mismatch

# Weights with blocks of 256, 192 and 1 elements. Some are longer than a noise period of 2**11
# elements, and some are longer than the eight periods of a compiled call.
SHAPES = ((180, 256), (380, 192), (384,), (80, 50))
SETTINGS = {"betas": (0.9, 0.95), "weight_decay": 0.1, "lr": 1e-2}
LOW = ["bfloat16", "int8"]
COMPILED = pytest.param(True, marks=pytest.mark.slow)  # a compiler runs


@pytest.fixture(autouse=True)
def small_periods(monkeypatch):
    """Make noise periods small, so that weights have several spans, and compile nothing."""
    monkeypatch.setitem(PERIODS, "cpu", 2**11)
    torch._dynamo.reset()
    random_words.cache_clear()
    low_precision_adam.compiled_update.cache_clear()
    yield
    random_words.cache_clear()


def weights(dtype=torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def low(parameters, moment_type="bfloat16", compiled=False, seed=3, **changes) -> LowPrecisionAdamW:
    settings = SETTINGS | {"stochastic_rounding": True} | changes
    return LowPrecisionAdamW(
        parameters, moment_type=moment_type, seed=seed, compiled=compiled, **settings
    )


def torchs_own() -> torch.optim.AdamW:
    return torch.optim.AdamW(weights(), fused=True, **SETTINGS)


def take(optimizer, steps: range) -> list[torch.Tensor]:
    """Take steps with different learning rates."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(parameter.dtype)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize(
    ("moment_type", "bytes_", "tolerance"),
    [("float32", 8, 0), ("bfloat16", 4, 1e-2), ("int8", 2, 0.1)],
)
def test_it_is_torchs_own_in_float32_and_near_it_in_fewer_bytes(moment_type, bytes_, tolerance):
    optimizer = low(weights(), moment_type)
    ours, theirs, before = (
        torch.cat([one.detach().flatten() for one in each])
        for each in (take(optimizer, range(20)), take(torchs_own(), range(20)), weights())
    )
    difference = ((ours - theirs).norm() / (theirs - before).norm()).item()
    assert difference <= tolerance
    assert bool(difference) is (moment_type != "float32")
    (weight, state), *_ = optimizer.state.items()
    assert sum(v.nbytes for v in state.values()) / weight.numel() == pytest.approx(bytes_, rel=0.02)


def test_small_updates_of_bfloat16_weights_add_up_only_if_they_are_rounded_at_random():
    """Rounded to the nearest, each update of 0.001 is lost, because 1 has neighbours 0.004 away."""
    moved = {}
    for rounding in (False, True):
        parameter = nn.Parameter(torch.ones(100, 100, dtype=torch.bfloat16))
        optimizer = low([parameter], stochastic_rounding=rounding, lr=1e-3, weight_decay=0)
        for _ in range(100):
            parameter.grad = torch.ones_like(parameter)  # so Adam's update equals the learning rate
            optimizer.step()
        moved[rounding] = 1 - parameter.detach().double().mean().item()
    assert moved[False] == 0
    assert moved[True] == pytest.approx(0.1, rel=0.02)


@pytest.mark.parametrize("moment_type", LOW)
def test_a_second_moment_decays_by_a_thousandth_a_step(moment_type):
    parameter = nn.Parameter(torch.ones(16, 256))
    optimizer = low([parameter], moment_type, betas=(0.9, 0.999))
    gradient = torch.rand_like(parameter) + 0.5
    for step in range(301):
        parameter.grad = gradient * (step == 0)
        optimizer.step()
    (state,) = optimizer.state.values()
    second = moment(low_precision_adam._row_views(state, 256), "exp_avg_sq")
    expected = 0.001 * gradient.square() * 0.999**300
    assert (second / expected).mean() == pytest.approx(1, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "moment_type"), [(torch.float32, "float32"), (torch.bfloat16, "int8")]
)
def test_compiled_it_is_the_same_step_but_for_float32_rounding(dtype, moment_type):
    """At most one rounding in a thousand may differ. With other noise half of them would."""
    eager, compiled = (low(weights(dtype), moment_type, each) for each in (False, True))
    before = compiled_graphs()
    theirs, ours = (take(each, range(4)) for each in (eager, compiled))
    assert compiled_graphs() - before == 3, "a graph for each unit"
    theirs, ours = (
        made + [value for state in each.state.values() for value in state.values()]
        for made, each in ((theirs, eager), (ours, compiled))
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        same = torch.isclose(one.float(), other.float(), rtol=1e-5, atol=1e-7)
        assert same.double().mean() > 0.999


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("moment_type", "compiled"),
    [
        *[(name, False) for name in ("float32", *LOW)],
        pytest.param("int8", True, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(moment_type, dtype, compiled, tmp_path):
    whole = take(low(weights(dtype), moment_type, compiled), range(5))
    first = low(weights(dtype), moment_type, compiled)
    kept = take(first, range(3))
    torch._dynamo.reset()  # as in another process
    second = low([nn.Parameter(value) for value in kept], moment_type, compiled)
    torch.save(first.state_dict(), tmp_path / "state")
    second.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert all(map(torch.equal, take(second, range(3, 5)), whole))
    other_seed = low(weights(dtype), moment_type, compiled, seed=4)
    same = map(torch.equal, take(other_seed, range(5)), whole)
    assert all(same) is (moment_type == "float32" and dtype == torch.float32)


@pytest.mark.parametrize("compiled", [False, COMPILED])
@pytest.mark.parametrize("moment_type", LOW)
def test_shards_of_rows_are_rounded_as_the_whole(moment_type, compiled, monkeypatch):
    """Cut a tensor as FSDP2 does, for several numbers of ranks; one rank gets no row."""
    rows, width = 1501, 192
    generator = torch.Generator().manual_seed(0)
    whole, gradient = (torch.randn(rows, width, generator=generator).bfloat16() for _ in range(2))

    def stepped(part: slice) -> torch.Tensor:
        weight = nn.Parameter(whole[part].clone())
        # A shard may be too small for 8 bits although its weight is not.
        monkeypatch.setattr(low_precision_adam, "_first_element", lambda _: part.start * width)
        monkeypatch.setattr(low_precision_adam, "block_size", lambda _: width)
        optimizer = low([weight], moment_type, compiled)
        for _ in range(3):
            weight.grad = gradient[part].clone()
            optimizer.step()
        return weight.detach()

    cuts = (0, 640, 641, 641, rows)
    shards = [stepped(slice(*ends)) for ends in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(shards), stepped(slice(0, rows)))


@pytest.mark.parametrize("compiled", [False, COMPILED])
def test_a_missing_gradient_is_left_alone_and_another_step_compiles_nothing(compiled):
    parameters = weights(torch.bfloat16)
    optimizer = low(parameters, compiled=compiled)
    take(optimizer, range(1))
    graphs, before = compiled_graphs(), parameters[0].detach().clone()
    for lr in (1e-3, torch.tensor(1e-4)):
        optimizer.param_groups[0]["lr"] = lr
        parameters[0].grad = None
        optimizer.step()
    assert torch.equal(parameters[0], before)
    assert [int(optimizer.state[one]["step"]) for one in parameters] == [1, 3, 3, 3]
    assert compiled_graphs() == graphs


@pytest.mark.parametrize("moment_type", ["float32", *LOW])
@pytest.mark.parametrize("before", ["torch", *LOW])
def test_the_moments_of_an_earlier_stage_are_taken_over_in_any_type(before, moment_type):
    """--init_optimizer does this. torch's own optimizer cannot load moments stored in 8 bits."""
    earlier = torchs_own() if before == "torch" else low(weights(), before)
    take(earlier, range(5))
    saved = earlier.state_dict()
    optimizer, plain = low(weights(), moment_type), low(weights(), "float32")
    fresh = optimizer.state_dict()
    assert _state_mismatch(saved, fresh, optimizer) is None
    optimizer.load_state_dict({**fresh, "state": saved["state"]})
    assert optimizer.steps == 5
    plain.load_state_dict(optimizer.state_dict())
    reference = torchs_own()
    take(reference, range(5))
    for one, other in zip(plain.state.values(), reference.state.values(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            difference = (one[name] - other[name]).norm() / other[name].norm()
            assert difference < (0.1 if "int8" in (before, moment_type) else 0.01)
    if before == "int8":
        mismatch = _state_mismatch(saved, reference.state_dict(), reference)
        assert "in 8 bits: set optim_states" in mismatch


CPU = torch.device("cpu")
WORDS = random_words(CPU, 1)[:, 0]  # in periods of the usual size
COUNT = len(WORDS)
REPEATS = 1000


def noise_of(shape: torch.Size, *keys: int):
    (factor,) = multipliers(*keys[:-1], np.array(keys[-1:], dtype=np.uint64)).tolist()
    return partial(noise, WORDS[: shape.numel()].view(shape), factor)


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
