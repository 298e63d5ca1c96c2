"""AdamW's compiled step: the eager one's noise, and its numbers but for float32 rounding."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import nn

from utils.config.errors import ConfigurationError
from utils.kernels import stochastic_rounding
from utils.kernels.compilation import compiled_graphs
from utils.kernels.stochastic_rounding import multiplier, multipliers
from utils.training import compiled_adam, low_precision_adam
from utils.training.low_precision_adam import LowPrecisionAdamW

pytestmark = pytest.mark.slow  # a compiler runs

# Units of 256, 192 and 1; periods of 2**13 end within weights, parts of eight within some.
SHAPES = ((700, 256), (1500, 192), (384,), (300, 50), (1300, 256))
SETTINGS = {"betas": (0.9, 0.95)}
KINDS = {
    "float32, bfloat16": (torch.float32, "bfloat16"),
    "float32, int8": (torch.float32, "int8"),
    "bfloat16, float32": (torch.bfloat16, "float32"),
    "bfloat16, int8": (torch.bfloat16, "int8"),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # elements are few, and other tests run beside
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def nothing_compiled_yet(monkeypatch):
    """Periods are small, so that a weight has several parts, and each of them several periods."""
    torch._dynamo.reset()
    monkeypatch.setitem(stochastic_rounding.PLACES, "cpu", 2**13)
    clear = (stochastic_rounding.random_words, compiled_adam.words, compiled_adam.compiled_update)
    for cached in clear:
        cached.cache_clear()
    yield
    for cached in clear:
        cached.cache_clear()
    torch._dynamo.reset()


def weights(dtype=torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def made(parameters, kept_as, compiled=True, **changes) -> LowPrecisionAdamW:
    groups = [
        {"params": parameters[:2], "weight_decay": 0.1, "lr": 1e-2},
        {"params": parameters[2:], "weight_decay": 0.0, "lr": 2e-2},
    ]
    settings = {"stochastic_rounding": True, "seed": 3, **SETTINGS, **changes}
    return LowPrecisionAdamW(groups, kept_as=kept_as, compiled=compiled, **settings)


def take(optimizer, steps: range) -> list[torch.Tensor]:
    """Take steps, each at another learning rate."""
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


def states(optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_eager_step_but_for_float32_rounding(kind):
    """With other noise half of all roundings would differ: here one in a thousand may."""
    dtype, kept_as = KINDS[kind]
    eager, compiled = (made(weights(dtype), kept_as, compiled=c) for c in (False, True))
    before = compiled_graphs()
    theirs, ours = (take(each, range(4)) for each in (eager, compiled))
    assert compiled_graphs() - before == 3, "a graph for each unit"
    for one, other in zip(ours + states(compiled), theirs + states(eager), strict=True):
        assert one.dtype == other.dtype
        same = torch.isclose(one.float(), other.float(), rtol=1e-5, atol=1e-7)
        assert same.double().mean() > 0.999
        if one.dtype == torch.float32 and kept_as != "int8":
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-4)


def test_of_float32_states_it_is_torchs_own():
    reference = weights()
    groups = [
        {"params": reference[:2], "weight_decay": 0.1},
        {"params": reference[2:], "weight_decay": 0.0},
    ]
    theirs = take(torch.optim.AdamW(groups, **SETTINGS), range(5))
    for one, other in zip(take(made(weights(), "float32"), range(5)), theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kept_as", ["bfloat16", "int8"])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(kept_as):
    parameters = weights(torch.bfloat16)[:3:2]
    first = made(copy.deepcopy(parameters), kept_as)
    whole = take(made(parameters, kept_as), range(5))
    middle = take(first, range(3))
    saved = copy.deepcopy(first.state_dict())
    torch._dynamo.reset()  # as in another process
    second = made([nn.Parameter(value) for value in middle], kept_as)
    second.load_state_dict(saved)
    assert all(map(torch.equal, take(second, range(3, 5)), whole))


@pytest.mark.parametrize("kept_as", ["bfloat16", "int8"])
def test_shards_of_rows_are_rounded_as_the_whole(kept_as, monkeypatch):
    """What FSDP2 does to a tensor, on any number of ranks, one of them without any row."""
    rows, width = 1501, 192
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(rows, width, generator=generator).bfloat16()
    gradient = torch.randn(rows, width, generator=generator).bfloat16()

    def stepped(part: slice) -> torch.Tensor:
        weight = nn.Parameter(whole[part].clone())
        # A shard may be too small for 8 bits, but the weight it is of is not.
        monkeypatch.setattr(low_precision_adam, "_first_element", lambda _: part.start * width)
        monkeypatch.setattr(low_precision_adam.eight_bit, "block_size", lambda _: width)
        optimizer = LowPrecisionAdamW(
            [weight], kept_as=kept_as, stochastic_rounding=True, seed=1, compiled=True
        )
        for _ in range(3):
            weight.grad = gradient[part].clone()
            optimizer.step()
        return weight.detach()

    cuts = (0, 640, 641, 641, rows)
    shards = [stepped(slice(*ends)) for ends in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(shards), stepped(slice(0, rows)))


@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)], ids=["float", "tensor"])
def test_another_step_compiles_nothing_and_a_missing_gradient_is_left_alone(lr):
    parameters = weights(torch.bfloat16)
    optimizer = made(parameters, "bfloat16")
    take(optimizer, range(1))
    graphs = compiled_graphs()
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = lr / (step + 1)
        parameters[0].grad = None
        before = parameters[0].detach().clone()
        optimizer.step()
        assert torch.equal(parameters[0], before)
    assert [int(optimizer.state[one]["step"]) for one in parameters] == [1, 4, 4, 4, 4]
    assert compiled_graphs() == graphs


def test_what_is_compiled_wrongly_is_refused(monkeypatch):
    def wrong(function, **_):
        def update(part, numbers, *others, **options):
            function(part, numbers * 1.01, *others, **options)

        return update

    monkeypatch.setattr(torch, "compile", wrong)
    with pytest.raises(ConfigurationError, match="compiles AdamW's step wrongly"):
        take(made(weights(), "bfloat16"), range(1))


def test_many_multipliers_are_those_of_each():
    begins = np.array([0, 2**22, 2**40], dtype=np.uint64)
    numbers = np.arange(3, dtype=np.uint64)[:, None]
    table = multipliers(2**31 + 5, 7, begins, numbers)
    assert table.dtype == np.int32
    assert table.tolist() == [
        [multiplier(2**31 + 5, 7, int(begin), number) for begin in begins] for number in range(3)
    ]
