"""AdamW with states in fewer bits: torch's own numbers in float32, close to them in less."""

import copy
import io

import pytest
import torch
from torch import nn

from utils.training import low_precision_adam
from utils.training.inherited_optimizer import _misfits
from utils.training.low_precision_adam import LowPrecisionAdamW

SHAPES = ((300, 384), (384,), (70, 129), (40000,))  # several chunks; 8 bits for the first alone
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # elements are few, and other tests run beside
    yield
    torch.set_num_threads(threads)


def weights(dtype=torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def low(parameters, kept_as="bfloat16", rounding=False, seed=1, **settings):
    return LowPrecisionAdamW(
        parameters, kept_as=kept_as, stochastic_rounding=rounding, seed=seed,
        **SETTINGS | settings,
    )  # fmt: skip


def take(optimizer, steps: range) -> list[torch.Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


def test_in_float32_it_is_torchs_own_to_the_bit():
    ours = take(low(weights(), "float32"), range(4))
    theirs = take(torch.optim.AdamW(weights(), fused=True, **SETTINGS), range(4))
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize(("kept_as", "tolerance"), [("bfloat16", 5e-3), ("int8", 6e-2)])
def test_in_fewer_bits_it_is_near_torchs_own(kept_as, tolerance):
    ours = take(low(weights(), kept_as), range(20))
    theirs = take(torch.optim.AdamW(weights(), fused=True, **SETTINGS), range(20))
    difference = torch.cat([one.flatten() for one in ours]) - torch.cat(
        [other.flatten() for other in theirs]
    )
    moved = torch.cat(
        [(one - other).flatten() for one, other in zip(theirs, weights(), strict=True)]
    )
    assert 0 < difference.norm() / moved.norm() < tolerance


@pytest.mark.parametrize(
    ("kept_as", "dtype", "bytes_"),
    [("bfloat16", torch.float32, 4), ("int8", torch.float32, 2), ("int8", torch.bfloat16, 2)],
)
def test_states_take_as_many_bytes_as_said(kept_as, dtype, bytes_):
    parameter = nn.Parameter(torch.zeros(512, 1024, dtype=dtype))
    optimizer = low([parameter], kept_as)
    take(optimizer, range(1))
    size = sum(value.nbytes for value in optimizer.state[parameter].values())
    assert size / parameter.numel() == pytest.approx(bytes_, rel=0.02)


def test_small_updates_of_bfloat16_weights_add_up_only_if_they_are_rounded_at_random():
    """A hundred updates of 0.001: to the nearest, each is lost, for 1 has neighbours 0.004 away."""
    moved = {}
    for rounding in (False, True):
        parameter = nn.Parameter(torch.ones(100, 100, dtype=torch.bfloat16))
        optimizer = low([parameter], rounding=rounding, lr=1e-3, weight_decay=0)
        for _ in range(100):
            parameter.grad = torch.ones_like(parameter)  # Adam's update is then the learning rate
            optimizer.step()
        moved[rounding] = 1 - parameter.detach().double().mean().item()
    assert moved[False] == 0
    assert moved[True] == pytest.approx(0.1, rel=0.02)


@pytest.mark.parametrize("kept_as", ["bfloat16", "int8"])
def test_a_second_moment_decays_by_a_thousandth_a_step(kept_as):
    parameter = nn.Parameter(torch.ones(64, 256))
    optimizer = low([parameter], kept_as, betas=(0.9, 0.999))
    parameter.grad = torch.rand_like(parameter) + 0.5
    optimizer.step()
    first = 0.001 * parameter.grad.square()
    parameter.grad = torch.zeros_like(parameter)
    for _ in range(300):
        optimizer.step()
    state = low([nn.Parameter(torch.ones(64, 256))], "float32")
    state.load_state_dict(optimizer.state_dict())
    (values,) = state.state.values()
    assert (values["exp_avg_sq"] / first).mean() == pytest.approx(0.999**300, rel=0.02)


def through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept_as", ["float32", "bfloat16", "int8"])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(kept_as, dtype):
    rounding = dtype == torch.bfloat16
    whole = take(low(weights(dtype), kept_as, rounding), range(6))
    first = low(weights(dtype), kept_as, rounding)
    kept = take(first, range(3))
    second = low([nn.Parameter(value) for value in kept], kept_as, rounding)
    second.load_state_dict(through_a_file(first.state_dict()))
    assert all(map(torch.equal, take(second, range(3, 6)), whole))


@pytest.mark.parametrize("kept_as", ["bfloat16", "int8"])
def test_shards_of_rows_are_rounded_as_the_whole(kept_as, monkeypatch):
    """What FSDP2 does to a tensor, on any number of ranks."""
    rows, cut = 300, 140
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(rows, 384, generator=generator).bfloat16()
    gradient = torch.randn(rows, 384, generator=generator).bfloat16()

    def stepped(part: slice) -> torch.Tensor:
        weight = nn.Parameter(whole[part].clone())
        monkeypatch.setattr(low_precision_adam, "_first_element", lambda _: part.start * 384)
        optimizer = low([weight], kept_as, rounding=True)
        for _ in range(3):
            weight.grad = gradient[part].clone()
            optimizer.step()
        return weight.detach()

    shards = [stepped(slice(0, cut)), stepped(slice(cut, rows))]
    assert torch.equal(torch.cat(shards), stepped(slice(0, rows)))


def test_another_seed_rounds_otherwise():
    runs = [take(low(weights(torch.bfloat16), rounding=True, seed=s), range(2)) for s in (1, 2)]
    assert not torch.equal(runs[0][0], runs[1][0])


@pytest.mark.parametrize("kept_as", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("before", ["torch", "bfloat16", "int8"])
def test_the_moments_of_an_earlier_stage_are_taken_over_in_any_type(before, kept_as):
    """What --init_optimizer does."""
    parameters = weights()
    earlier = (
        torch.optim.AdamW(parameters, fused=True, **SETTINGS)
        if before == "torch"
        else low(parameters, before)
    )
    take(earlier, range(5))
    saved = through_a_file(earlier.state_dict())
    optimizer = low(weights(), kept_as)
    fresh = optimizer.state_dict()
    assert _misfits(saved, fresh, optimizer) == []
    optimizer.load_state_dict({**fresh, "state": saved["state"]})
    assert optimizer.steps == 5
    plain = low(weights(), "float32")
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    reference = torch.optim.AdamW(weights(), fused=True, **SETTINGS)
    take(reference, range(5))
    for one, other in zip(plain.state.values(), reference.state.values(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            difference = (one[name] - other[name]).norm() / other[name].norm()
            assert difference < (0.1 if "int8" in (before, kept_as) else 0.01)


def test_torchs_own_does_not_take_codes_for_moments():
    optimizer = low(weights(), "int8")
    take(optimizer, range(1))
    theirs = torch.optim.AdamW(weights(), fused=True, **SETTINGS)
    (problem,) = _misfits(optimizer.state_dict(), theirs.state_dict(), theirs)
    assert "in 8 bits: set optim_states" in problem


def test_a_parameter_without_gradient_is_left_alone():
    parameters = weights()
    optimizer = low(parameters)
    parameters[0].grad = torch.ones_like(parameters[0])
    optimizer.step()
    assert len(optimizer.state) == 1
    assert torch.equal(parameters[1], weights()[1])
