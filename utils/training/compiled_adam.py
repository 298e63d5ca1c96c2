"""AdamW's step on a part of a weight as one compiled function: what it reads, it reads once.

Eagerly each operation goes through memory, some forty times for 8-bit states. Sizes are dynamic,
and all that changes from step to step is in tensors on the device: a graph for each kind of weight.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from utils.config.errors import ConfigurationError
from utils.kernels.stochastic_rounding import high_bits, multipliers, places, random_words
from utils.training.adam_parts import MOMENTS, SCALE, Part, keep_moment, keep_weight, moment

# Noise repeats this often in a part: a call takes the host some 0.1 ms, 2**25 elements the device.
PERIODS = 8
# Of compiled and plain code, relative: products are contracted, and a few elements round otherwise.
TOLERANCE = 1e-3


class Rows(NamedTuple):
    """The rows of one call, and the two numbers by which it finds their noise."""

    part: slice
    place: torch.Tensor


class NoiseTable:
    """The places of all weights, and each step's multipliers for them.

    A weight is looked at as (rows, unit): a unit is a block of 8-bit codes, or one element. Its
    noise is that of the eager step: the place within a period names the word, the period the
    multiplier. `weights` are unit, first element in the whole tensor and number of elements here.
    """

    def __init__(self, seed: int, weights: Sequence[tuple[int, int, int]], device: torch.device):
        self.seed, self.device = seed, device
        self.units = [unit for unit, *_ in weights]
        self.parts: list[list[Rows]] = []
        keys: list[tuple[int, int]] = []  # of each period: index of the weight, where it begins
        for index, (unit, start, count) in enumerate(weights):
            period = places(device) // unit  # rows, as all below
            first, end = start // unit, (start + count) // unit
            row = len(keys) - first // period
            self.parts.append(
                [
                    Rows(
                        slice(begin - first, min(end, _next(begin, PERIODS * period)) - first),
                        torch.tensor([row + begin // period, begin % period]).to(device),
                    )
                    for begin in _beginnings(first, end, PERIODS * period)
                ]
            )
            keys += [
                (index, begin // period * period * unit)
                for begin in _beginnings(first, end, period)
            ]
        self.keys = np.array(keys, dtype=np.uint64).reshape(-1, 2)

    def multipliers(self, step: int) -> torch.Tensor:
        """Return (numbers, periods of all weights) int32; the device is not waited for."""
        numbers = np.arange(len(MOMENTS) + 1, dtype=np.uint64)[:, None]
        index, begin = self.keys.T
        table = torch.from_numpy(multipliers(self.seed, step, index, begin, numbers))
        if self.device.type == "cuda":
            table = table.pin_memory()
        return table.to(self.device, non_blocking=True)


def _next(begin: int, stride: int) -> int:
    return begin - begin % stride + stride


def _beginnings(first: int, end: int, stride: int) -> list[int]:
    """Return where the multiples of `stride` cut a range, its own beginning included."""
    return [first, *range(_next(first, stride), end, stride)] if first < end else []


@functools.cache
def words(device: torch.device, unit: int) -> torch.Tensor:
    """Return the words of a period as (rows, unit), a shape that is compiled as it is."""
    rows = places(device) // unit
    table = random_words(device)[: rows * unit].view(rows, unit)
    torch._dynamo.mark_static(table)
    return table


def step_numbers(
    group: Mapping[str, Any], steps: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return (8,) float32 for each weight of a group, which takes so many steps with this one.

    Nothing is read from the device: the corrections are computed there, in float64 as by torch.
    Eight, for views must begin at multiples of 16 bytes: torch would copy others at each call.
    """
    if not steps:
        return ()
    taken = torch.stack(list(steps)).double()
    ones = torch.ones_like(taken)
    (beta1, beta2), lr = group["betas"], group["lr"]
    numbers = (
        ones * (1 - lr * group["weight_decay"]),
        ones * beta1,
        ones * (1 - beta1),
        ones * beta2,
        ones * (1 - beta2),
        lr / (1 - beta1**taken),
        (1 - beta2**taken).sqrt(),
        ones * group["eps"],
    )
    return torch.stack(numbers, dim=1).float().unbind()


@functools.cache
def compiled_update(
    device: torch.device, unit: int, dtypes: tuple[tuple[str, torch.dtype], ...], rounding: bool
) -> Callable[..., None]:
    """Return `update` compiled for a kind of weight: parts of these types, by name.

    It is compiled on a part made up. From the first weight torch would take over what is chance:
    sizes that are equal, and whether a gradient begins a bucket; another graph would follow for
    each. Raises ConfigurationError where compiled code does not compute what the same code computes
    as it is.
    """
    # In one graph, unless compilation is turned off for the whole process (TORCHDYNAMO_DISABLE).
    compiled = torch.compile(update, dynamic=True, fullgraph=not torch._dynamo.config.disable)
    part, others = _made_up(device, unit, dtypes)
    expected = {name: tensor.clone() for name, tensor in part.items()}
    numbers, where, table, words_ = others
    update(expected, numbers, where, table, words_, rounding)
    compiled(part, numbers, where, table, words_, rounding)
    for name, values in _widened(part).items():
        wanted = _widened(expected)[name]
        if (values - wanted).norm() > TOLERANCE * wanted.norm():
            raise ConfigurationError(
                f"--compile true: torch {torch.__version__} compiles AdamW's step wrongly for "
                f"{device.type} ({name} is another than not compiled): set --compile false"
            )
    return compiled


def _made_up(
    device: torch.device, unit: int, dtypes: tuple[tuple[str, torch.dtype], ...]
) -> tuple[Part, tuple[torch.Tensor, ...]]:
    """Return what `update` takes but for the last, as in the middle of some training."""
    period = places(device) // unit
    generator = torch.Generator(device).manual_seed(0)
    part: Part = {}
    for name, dtype in dtypes:
        shape = (period + 7, unit)[: 1 if name.endswith(SCALE) else 2]
        values = torch.randn(shape, generator=generator, device=device)
        if name.endswith(SCALE) or name == MOMENTS[1]:
            values = values.abs() * 1e-3 + 1e-6
        if not dtype.is_floating_point:  # codes, all but the few smallest
            values = torch.randint(30, 128, shape, generator=generator, device=device)
        part[name] = values.to(dtype)
    numbers = (0.999, 0.9, 0.1, 0.95, 0.05, 1e-2, 0.5, 1e-8)
    multipliers_of = np.arange(len(MOMENTS) + 1, dtype=np.uint64)[:, None]
    table = torch.from_numpy(multipliers(0, 1, np.arange(5, dtype=np.uint64), 0, multipliers_of))
    where = torch.tensor([1, 3])
    tensors = (torch.tensor(numbers), where, table)
    return part, (*(tensor.to(device) for tensor in tensors), words(device, unit))


def _widened(part: Part) -> Part:
    """Return the weight and the moments in float32."""
    return {"weight": part["weight"].float()} | {name: moment(part, name) for name in MOMENTS}


class _Place:
    """Finds the noise of (rows, unit) elements that begin within a period and may span several."""

    def __init__(self, rows: int, place: torch.Tensor, table: torch.Tensor, words_: torch.Tensor):
        at = place[1] + torch.arange(rows, device=place.device)
        self.words = words_[at % len(words_)]
        self.factors = table[:, place[0] + at // len(words_)]

    def noise(self, number: int, bits: int) -> torch.Tensor:
        """Return (rows, unit) int32 below 2**bits, other noise for each number."""
        return high_bits(self.words * self.factors[number].unsqueeze(-1), bits)


def update(
    part: Part,
    numbers: torch.Tensor,
    where: torch.Tensor,
    table: torch.Tensor,
    words_: torch.Tensor,
    stochastic_rounding: bool,
) -> None:
    """Take AdamW's step on (rows, unit) elements; scales are (rows,).

    In the order of Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm
    2, and of torch's documentation. `numbers` as of `step_numbers`, `where` and `table` as of
    NoiseTable, `words_` as of `words`.
    """
    place = _Place(len(part["weight"]), where, table, words_)
    kept_weight, beta1, new1, beta2, new2, step_size, correction, eps = numbers.unbind()
    weight, gradient = part["weight"].float() * kept_weight, part["gradient"].float()
    first, second = (moment(part, name) for name in MOMENTS)
    first = first * beta1 + gradient * new1
    second = second * beta2 + gradient * gradient * new2
    weight = weight - step_size * (first / (second.sqrt() / correction + eps))
    for values, name in zip((first, second), MOMENTS, strict=True):
        keep_moment(values, part, name, place)
    keep_weight(weight, part, place if stochastic_rounding else None)
