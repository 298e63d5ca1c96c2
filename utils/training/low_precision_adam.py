"""AdamW that computes in float32 and keeps its states, and the weights, in fewer bits.

A weight is looked at as (rows, unit): a unit is a block of 8-bit codes, or one element. `update`
takes AdamW's step on some of its rows, with torch's fused kernel or compiled with its own formula.
"""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor, zeros
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import AdamW
from torch.optim.adamw import adamw
from typing_extensions import override

from utils.config.errors import ConfigurationError
from utils.training.low_precision_states import (
    BITS_LOST,
    MANTISSA_BITS_LOST,
    block_size,
    decode,
    encode,
    multipliers,
    noise,
    period,
    random_words,
    round_to_bfloat16_,
)

MOMENTS = ("exp_avg", "exp_avg_sq")
CODES = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
SCALE = "_scale"  # ends the name of a moment's scales, one for each block of 8-bit codes
FIRST_SCALES = MOMENTS[0] + SCALE  # in no state of torch's AdamW
# Of a compiled call: it takes the host some 0.1 ms, and these 2**25 elements the device as long.
COMPILED_PERIODS = 8
KINDS_COMPILED = 64  # at most; torch allows eight graphs of a function by default
# Of compiled and plain code, relative: products are contracted, and a few elements round otherwise.
TOLERANCE = 1e-3
# Tensors by name: weight, gradient, the moments and, of 8-bit codes, their scales.
State = dict[str, torch.Tensor]
Group = dict[str, Any]
Values = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # both moments and the weight, float32


class LowPrecisionAdamW(AdamW):
    """AdamW on float32 copies, some ten thousand elements at a time, compiled some million.

    `kept_as` is what the moments are kept as: float32, bfloat16 or int8. They are rounded up or
    down at random: a second moment decays by a thousandth a step, which bfloat16 and 8 bits would
    round away. bfloat16 weights are rounded so if `stochastic_rounding` says so, else to the
    nearest. Rounding follows from `seed`, step and index alone, on any number of ranks. `compiled`
    has the same noise, but sums and products round as the compiler orders them.

    Loads the state of any AdamW, torch's too. Weights may be shards of rows (FSDP2).
    """

    def __init__(
        self,
        params: Any,
        *,
        kept_as: str,
        stochastic_rounding: bool,
        seed: int,
        compiled: bool = False,
        **kwargs: Any,
    ):
        super().__init__(params, fused=True, **kwargs)
        self.kept_as, self.stochastic_rounding, self.seed = kept_as, stochastic_rounding, seed
        self.compiled = compiled
        self.noise_table: NoiseTable | None = None  # made when weights are where they stay
        self.steps = 0  # on the host: the state's are on the device

    @torch.no_grad()
    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # Trainer gives none
        """Take a step."""
        assert closure is None
        self.steps += 1
        weights = self._weights()
        trained = [weight for weight in weights if weight.grad is not None]
        if self.noise_table is None:
            periods = COMPILED_PERIODS if self.compiled else 1
            self.noise_table = NoiseTable(self.seed, weights, periods)
        for weight in trained:
            if not self.state[weight]:
                self.state[weight].update(self._new_state(weight))
        if trained:
            torch._foreach_add_([self.state[weight]["step"] for weight in trained], 1)
        table = self.noise_table.multipliers(self.steps)
        for group in self.param_groups:
            own = [weight for weight in group["params"] if weight.grad is not None]
            steps = [self.state[weight]["step"] for weight in own]
            numbers = step_numbers(group, steps) if self.compiled else steps
            for weight, its_numbers in zip(own, numbers, strict=True):
                self._update(weight, group, its_numbers, table)

    def _weights(self) -> list[torch.Tensor]:
        return [weight for group in self.param_groups for weight in group["params"]]

    def _new_state(self, weight: torch.Tensor) -> State:
        state = {"step": torch.zeros((), dtype=torch.float32, device=weight.device)}
        block = block_size(weight.shape) if self.kept_as == "int8" else None
        for name in MOMENTS:
            if block is not None:
                state[name] = torch.zeros_like(weight, dtype=CODES[name])
                # One dimension more than the weight has: no other state has such a shape.
                shape = (*weight.shape[:-1], weight.shape[-1] // block, 1)
                state[name + SCALE] = _zeros(shape, weight)
            else:
                kept = torch.bfloat16 if self.kept_as == "bfloat16" else torch.float32
                state[name] = torch.zeros_like(weight, dtype=kept)
        return state

    def _update(
        self, weight: torch.Tensor, group: Group, numbers: torch.Tensor, table: torch.Tensor
    ) -> None:
        assert weight.grad is not None
        assert self.noise_table is not None
        state = {name: value for name, value in self.state[weight].items() if name != "step"}
        unit, rounding = _unit(weight), self.stochastic_rounding
        rows = _in_rows({"weight": weight, "gradient": weight.grad, **state}, unit)
        words = random_words(weight.device, unit)
        for span in self.noise_table.spans[weight]:
            part = {name: value[span.rows] for name, value in rows.items()}
            if self.compiled:
                types = tuple((name, value.dtype) for name, value in part.items())
                compiled = compiled_update(words, types, rounding)
                compiled(part, numbers, span.start, table, words, rounding)
            else:
                its_words = words[span.offset : span.offset + len(part["weight"])]
                formula = partial(_fused_formula, group, numbers)
                update(part, formula, its_words, table[:, span.period], rounding)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of any AdamW; torch's own loading makes states of the weights' type."""
        super().load_state_dict({**state_dict, "state": {}})
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        for weight, name in zip(self._weights(), names, strict=True):
            if name in state_dict["state"]:
                self.state[weight] = self._converted(weight, state_dict["state"][name])
        self.steps = max((int(state["step"]) for state in self.state.values()), default=0)

    def _converted(self, weight: torch.Tensor, saved: State) -> State:
        """Return a saved state as this optimizer keeps it, rounded to the nearest."""
        state = self._new_state(weight)
        same = state.keys() == saved.keys() and all(
            state[name].dtype == saved[name].dtype for name in state
        )
        if same:
            return {name: value.to(weight.device) for name, value in saved.items()}
        assert not isinstance(weight, DTensor), "sharded states are loaded as they were saved"
        state["step"].copy_(saved["step"])
        unit = _unit(weight)
        new, old = (
            _in_rows({k: v.to(weight.device) for k, v in each.items() if k != "step"}, unit)
            for each in (state, saved)
        )
        for name in MOMENTS:
            keep(moment(old, name).clone(), new, name, None)
        return state


def update(
    part: State,
    formula: Callable[..., Values],
    words: torch.Tensor,
    factors: torch.Tensor,
    stochastic_rounding: bool,
) -> None:
    """Take the step of `formula` on (rows, unit) elements; scales are (rows,), words (rows, unit).

    `factors` are for both moments and for the weight.
    """
    moments = (moment(part, name) for name in MOMENTS)
    values = formula(part["weight"].float(), part["gradient"].float(), *moments)
    for name, value, factor in zip((*MOMENTS, "weight"), values, factors.unbind(), strict=True):
        at_random = name in MOMENTS or stochastic_rounding
        keep(value, part, name, partial(noise, words, factor) if at_random else None)


def _update_periods(
    part: State,
    numbers: torch.Tensor,
    start: torch.Tensor,
    table: torch.Tensor,
    words: torch.Tensor,
    stochastic_rounding: bool,
) -> None:
    """Take the step on rows that may span several periods; this is what is compiled."""
    at = start[1] + torch.arange(len(part["weight"]), device=start.device)
    factors = table[:, start[0] + at // len(words)].unsqueeze(-1)
    formula = partial(_plain_formula, numbers)
    update(part, formula, words[at % len(words)], factors, stochastic_rounding)


def moment(part: State, name: str) -> torch.Tensor:
    """Return a moment, or the weight, in float32: the kept tensor itself if it is so."""
    if name + SCALE in part:
        return decode(part[name], part[name + SCALE])
    return part[name].float()


def keep(
    values: torch.Tensor, part: State, name: str, random: Callable[[int], torch.Tensor] | None
) -> None:
    """Round float32 values to how they are kept, without noise to the nearest; overwrites them."""
    kept = part[name]
    if name + SCALE in part:
        added = 2 ** (BITS_LOST - 1) if random is None else random(BITS_LOST)
        encode(values, kept, part[name + SCALE], added)
        return
    if kept.dtype != torch.float32 and random is not None:
        round_to_bfloat16_(values, random(MANTISSA_BITS_LOST))
    if kept is not values:
        kept.copy_(values)


def _fused_formula(group: Group, taken: torch.Tensor, *values: torch.Tensor) -> Values:
    """Take torch's step in place; it is the `taken`-th."""
    weight, gradient, first, second = values
    beta1, beta2 = group["betas"]
    adamw(
        [weight], [gradient], [first], [second], [], [taken - 1],
        fused=True, amsgrad=False, maximize=False, beta1=beta1, beta2=beta2, lr=group["lr"],
        weight_decay=group["weight_decay"], eps=group["eps"],
    )  # fmt: skip
    return first, second, weight


def _plain_formula(numbers: torch.Tensor, *values: torch.Tensor) -> Values:
    """Return what the step makes, in the order of Loshchilov and Hutter 2019, algorithm 2.

    "Decoupled Weight Decay Regularization"; torch's documentation has the same.
    """
    weight, gradient, first, second = values
    decay, beta1, new1, beta2, new2, eps, step_size, correction = numbers.unbind()
    weight = weight * decay
    first = first * beta1 + gradient * new1
    second = second * beta2 + gradient * gradient * new2
    weight = weight - step_size * (first / (second.sqrt() / correction + eps))
    return first, second, weight


def step_numbers(group: Group, steps: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return (8,) float32 for each weight of a group, which takes so many steps with this one.

    The corrections are computed on the device, in float64 as by torch. Eight, for views must begin
    at multiples of 16 bytes: torch would copy others at each call.
    """
    if not steps:
        return ()
    taken = torch.stack(list(steps)).double()
    (beta1, beta2), lr = group["betas"], group["lr"]
    same = (1 - lr * group["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2, group["eps"])
    numbers = [torch.ones_like(taken) * number for number in same]
    numbers += [lr / (1 - beta1**taken), (1 - beta2**taken).sqrt()]
    return torch.stack(numbers, dim=1).float().unbind()


class Span(NamedTuple):
    """Some rows of a weight, in which period of all weights' they begin, and how far into it."""

    rows: slice
    period: int
    offset: int
    start: torch.Tensor  # period and offset, on the device


class NoiseTable:
    """Cuts weights into spans of some periods, and finds each period's multipliers.

    A span begins where it would in the whole tensor, whichever rows are here. An element's noise
    is its word, by its index in a period, times the multiplier of that period.
    """

    def __init__(self, seed: int, weights: Sequence[torch.Tensor], periods: int):
        self.seed, self.device = seed, weights[0].device
        self.spans: dict[torch.Tensor, list[Span]] = {}
        keys: list[tuple[int, int]] = []  # of each period: index of the weight, first element
        for index, weight in enumerate(weights):
            unit = _unit(weight)
            rows = period(self.device, unit)
            first = _first_element(weight) // unit
            end = first + _local(weight).numel() // unit
            before = len(keys) - first // rows  # periods of other weights, less those not here
            spans = self.spans[weight] = []
            for start, stop in pairwise([*_multiples(first, end, periods * rows), end]):
                place = before + start // rows, start % rows
                on_device = torch.tensor(place).to(self.device)
                spans.append(Span(slice(start - first, stop - first), *place, on_device))
            keys += [(index, start // rows * rows * unit) for start in _multiples(first, end, rows)]
        self.keys = np.array(keys, dtype=np.uint64).reshape(-1, 2).T

    def multipliers(self, step: int) -> torch.Tensor:
        """Return (3, periods of all weights) int32; the device is not waited for."""
        numbers = np.arange(len(MOMENTS) + 1, dtype=np.uint64)[:, None]
        table = torch.from_numpy(multipliers(self.seed, step, *self.keys, numbers))
        if self.device.type == "cuda":
            table = table.pin_memory()
        return table.to(self.device, non_blocking=True)


def _multiples(first: int, end: int, stride: int) -> list[int]:
    """Return the start of a range and the multiples of `stride` in it."""
    return sorted({first, *range(-(-first // stride) * stride, end, stride)}) if first < end else []


@functools.cache
def compiled_update(
    words: torch.Tensor, types: tuple[tuple[str, torch.dtype], ...], rounding: bool
) -> Callable[..., None]:
    """Return the step compiled for a kind of weight: parts of these types, by name.

    On a made-up part: of the first weight torch would take over what is chance (sizes that are
    equal, whether a gradient begins a bucket), and compile again for each. Raises
    ConfigurationError where compiled and plain code differ: torch has compiled wrongly before.
    """
    # In one graph, unless compilation is turned off for the whole process (TORCHDYNAMO_DISABLE).
    whole = not torch._dynamo.config.disable
    compiled = torch.compile(_update_periods, dynamic=True, fullgraph=whole)
    part = _made_up_part(words, types)
    expected = {name: tensor.clone() for name, tensor in part.items()}
    numbers = torch.tensor((0.999, 0.9, 0.1, 0.95, 0.05, 1e-8, 1e-2, 0.5), device=words.device)
    start = torch.tensor([1, 3], device=words.device)
    table = torch.arange(1, 31, 2, dtype=torch.int32, device=words.device).view(3, 5) * 0x10001001
    others = (numbers, start, table, words, rounding)
    _update_periods(expected, *others)
    with torch._dynamo.config.patch(recompile_limit=KINDS_COMPILED):
        compiled(part, *others)
    for name in ("weight", *MOMENTS):
        wanted = moment(expected, name)
        if (moment(part, name) - wanted).norm() > TOLERANCE * wanted.norm():
            raise ConfigurationError(
                f"--compile true: torch {torch.__version__} compiles AdamW's step wrongly for "
                f"{words.device.type} ({name} differs from the plain step): set --compile false"
            )
    return compiled


def _made_up_part(words: torch.Tensor, types: tuple[tuple[str, torch.dtype], ...]) -> State:
    random = torch.Generator(words.device).manual_seed(0)
    part: State = {}
    for name, dtype in types:
        shape = (len(words) + 7, words.shape[1])[: 1 if name.endswith(SCALE) else 2]
        values = torch.rand(shape, generator=random, device=words.device)
        # Codes of 30 to 127, for the smallest are rounded up or down by half.
        part[name] = (values + 1e-3 if dtype.is_floating_point else values * 97 + 30).to(dtype)
    return part


def _in_rows(tensors: State, unit: int) -> State:
    return {
        name: _local(tensor).view(-1, *(() if name.endswith(SCALE) else (unit,)))
        for name, tensor in tensors.items()
    }


def _unit(weight: torch.Tensor) -> int:
    return block_size(weight.shape) or 1


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _first_element(weight: torch.Tensor) -> int:
    """Return which element of the whole tensor this rank's first one is."""
    if not isinstance(weight, DTensor):
        return 0
    mesh, placements = weight.device_mesh, weight.placements
    _, offset = compute_local_shape_and_global_offset(weight.shape, mesh, placements)
    return offset[0] * (weight.numel() // weight.shape[0]) if offset else 0


def _zeros(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return float32 zeros, sharded as another tensor is."""
    if isinstance(like, DTensor):
        return zeros(*shape, device_mesh=like.device_mesh, placements=like.placements)
    return torch.zeros(shape, device=like.device)
