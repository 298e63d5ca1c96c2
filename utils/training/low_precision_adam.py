"""AdamW that computes each step in float32 and stores moments and weights in fewer bits.

Moments in 8 bits are stored in blocks of elements. An element is an 8-bit float times the scale of
its block, and the scale is the block's largest absolute value (Dettmers et al. 2022, "8-bit
Optimizers via Block-wise Quantization", arXiv 2110.02861). A first moment has a sign, 4 bits of
exponent and 3 of mantissa. A second moment has 5 bits of exponent and 3 of mantissa. A second
moment is never rounded to 0, because Adam divides by its root (Li et al. 2023, "Memory Efficient
Optimizers with 4-bit States", arXiv 2309.01507, section 4.1).

Each tensor is viewed as (rows, unit). A row has `unit` elements: a block of 8-bit codes, or a
single element. `update` does AdamW's step for some rows, by torch's fused kernel or a compiled
formula. Random rounding uses one table of random integers (words) for all weights. Each weight is
divided into periods, which have as many elements as the table. Each period has a random number
(multiplier) in each step. The noise of a period is the table times the multiplier.
"""

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import AdamW
from torch.optim.adamw import adamw
from typing_extensions import override

from utils.data.order import mix

BLOCKS = range(256, 63, -1)  # sizes in elements; scales of smaller blocks would add more than 6 %
FEWEST_ELEMENTS = 4096  # smaller tensors (norms, biases) do not get 8 bits, as in bitsandbytes
SCALE = "_scale"  # suffix of the state with a moment's scales, one for each block of codes
BITS_LOST = 20  # low bits of float32 that 8-bit codes drop; 3 bits of mantissa are left
MANTISSA_BITS_LOST = 16  # low bits of float32 that bfloat16 drops
# Length of a period in elements: after so many elements, the table of random words repeats.
PERIODS = {"cpu": 2**15}  # a period with its temporary tensors stays in the cache
PERIOD_ELSEWHERE = 2**22  # few kernel launches, temporary tensors of 16 MiB
_ONE = 0x3F800000 >> BITS_LOST  # the bits of 1.0 in float32 that 8-bit codes keep
_LARGEST = {torch.int8: 127, torch.uint8: 255}
_TINY = 1e-30  # least scale, so that a block of zeros can be divided by its scale
MOMENTS = ("exp_avg", "exp_avg_sq")
FIRST_SCALES = MOMENTS[0] + SCALE  # torch's AdamW has no state of this name
# Periods per compiled call. A GPU updates 2**25 elements while the host makes a call (0.1 ms).
COMPILED_PERIODS = 8
KINDS_COMPILED = 64  # limit on compiled variants of the step; torch's default is eight
# Tensors by name: weight, gradient, moments, and the scales of moments in 8 bits.
State = dict[str, Tensor]
Group = dict[str, Any]
Updated = tuple[Tensor, Tensor, Tensor]  # both moments and the weight, float32


class LowPrecisionAdamW(AdamW):
    """AdamW that stores its moments as float32, bfloat16 or int8 (`moment_type`).

    Moments are rounded up or down at random, because rounding to the nearest value would undo small
    changes: a second moment decays by only a thousandth per step. bfloat16 weights are rounded at
    random if `stochastic_rounding` is true, otherwise to the nearest value. The rounding depends
    only on `seed`, the step and the element's index, not on the number of ranks. If `compiled` is
    true, torch compiles the step. The compiled step uses the same random numbers, but may reorder
    sums and products. A CPU updates about 2**15 elements at a time, a GPU millions.

    The optimizer loads the state of any AdamW, including torch's. Weights may be sharded by rows
    (FSDP2).
    """

    def __init__(
        self, params: Any, *, moment_type: str, stochastic_rounding: bool, seed: int,
        compiled: bool = False, **kwargs: Any,
    ):  # fmt: skip
        super().__init__(params, fused=True, **kwargs)
        self.moment_type, self.seed = moment_type, seed
        self.stochastic_rounding, self.compiled = stochastic_rounding, compiled
        self.spans: dict[Tensor, list[WeightRange]] = {}  # by weight; filled at the first step
        self.steps = 0  # on the host; the step counts in the state are on the device

    @torch.no_grad()
    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # Trainer gives none
        self.steps += 1
        if not self.spans:
            self._cut_into_spans()
        # This step's multipliers of random words, (3, periods) int32, copied without a GPU sync.
        numbers = np.arange(len(MOMENTS) + 1, dtype=np.uint64)[:, None]
        table = torch.from_numpy(multipliers(self.seed, self.steps, *self.keys, numbers))
        device = self._weights()[0].device
        if device.type == "cuda":
            table = table.pin_memory()
        table = table.to(device, non_blocking=True)
        for group in self.param_groups:
            trained = [weight for weight in group["params"] if weight.grad is not None]
            if not trained:
                continue
            for weight in trained:
                if not self.state[weight]:
                    self.state[weight].update(self._new_state(weight))
            steps = [self.state[weight]["step"] for weight in trained]
            torch._foreach_add_(steps, 1)
            step_values = step_numbers(group, steps) if self.compiled else steps
            for weight, values in zip(trained, step_values, strict=True):
                self._update(weight, group, values, table)

    def _weights(self) -> list[Tensor]:
        return [weight for group in self.param_groups for weight in group["params"]]

    def _new_state(self, weight: Tensor) -> State:
        state = {"step": torch.zeros((), dtype=torch.float32, device=weight.device)}
        block = block_size(weight.shape) if self.moment_type == "int8" else None
        if block is None:
            dtype = torch.bfloat16 if self.moment_type == "bfloat16" else torch.float32
            return state | {name: torch.zeros_like(weight, dtype=dtype) for name in MOMENTS}
        for name, codes in zip(MOMENTS, (torch.int8, torch.uint8), strict=True):
            state[name] = torch.zeros_like(weight, dtype=codes)
            # Scales have one dimension more than the weight, unlike every other state.
            scales = weight[..., ::block].unsqueeze(-1)
            state[name + SCALE] = torch.zeros_like(scales, dtype=torch.float32)
        return state

    def _update(self, weight: Tensor, group: Group, numbers: Tensor, table: Tensor) -> None:
        assert weight.grad is not None
        unit, rounding = block_size(weight.shape) or 1, self.stochastic_rounding
        rows = _row_views({"weight": weight, "gradient": weight.grad, **self.state[weight]}, unit)
        words = random_words(weight.device, unit)
        for span in self.spans[weight]:
            part = {name: value[span.rows] for name, value in rows.items()}
            if self.compiled:
                types = tuple((name, value.dtype) for name, value in part.items())
                compiled = compiled_update(words, types, rounding)
                compiled(part, numbers, span.start, table, words, rounding)
            else:
                span_words = words[span.offset : span.offset + len(part["weight"])]
                formula = partial(_fused_formula, group, numbers)
                update(part, formula, span_words, table[:, span.period], rounding)

    def _cut_into_spans(self) -> None:
        """Set `spans` and `keys`.

        A span has the rows of a weight that one `update` call processes. `keys` has two numbers for
        each period (see the module): the index of the weight, and the index of the period's first
        element in the unsharded weight. Rounding depends on these numbers, not on the sharding.
        """
        keys: list[tuple[int, int]] = []  # by period: index of the weight, first element
        for index, weight in enumerate(self._weights()):
            unit, spans = block_size(weight.shape) or 1, self.spans.setdefault(weight, [])
            rows = len(random_words(weight.device, unit))
            first = _first_element(weight) // unit
            end = first + local_part(weight).numel() // unit
            if first == end:  # this rank has no rows of the weight
                continue
            before = len(keys) - first // rows  # where this weight's period 0 would be in `keys`
            stride = rows * (COMPILED_PERIODS if self.compiled else 1)
            for begin in range(first // stride * stride, end, stride):
                start, stop = max(begin, first), min(begin + stride, end)
                place = before + start // rows, start % rows
                on_device = torch.tensor(place).to(weight.device)
                spans.append(WeightRange(slice(start - first, stop - first), *place, on_device))
            keys += [(index, at * unit) for at in range(first // rows * rows, end, rows)]
        self.keys = np.array(keys, dtype=np.uint64).reshape(-1, 2).T

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of any AdamW. torch's method would cast the state to the weights' type."""
        super().load_state_dict({**state_dict, "state": {}})
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        for weight, name in zip(self._weights(), names, strict=True):
            if name in state_dict["state"]:
                self.state[weight] = self._converted_state(weight, state_dict["state"][name])
        self.steps = max((int(state["step"]) for state in self.state.values()), default=0)

    def _converted_state(self, weight: Tensor, saved: State) -> State:
        """Return a weight's saved state in this optimizer's types, rounded to nearest values."""
        state = self._new_state(weight)
        saved = {name: value.to(weight.device) for name, value in saved.items()}
        types, saved_types = ({k: v.dtype for k, v in each.items()} for each in (state, saved))
        if types == saved_types:
            return saved
        assert not isinstance(weight, DTensor), "sharded states are loaded as they were saved"
        state["step"].copy_(saved["step"])
        unit = block_size(weight.shape) or 1
        new, old = (_row_views(each, unit) for each in (state, saved))
        for name in MOMENTS:
            round_into(moment(old, name).clone(), new, name, None)
        return state


def update(
    part: State, formula: Callable[..., Updated], words: Tensor, factors: Tensor, rounding: bool
) -> None:
    """Do AdamW's step for some rows of a weight (`part`): call `formula`, round and store results.

    `part` has tensors of shape (rows, unit), and scales of shape (rows,). words: random integers
    (rows, unit). factors: multipliers of `words`, one for each moment and one for the weight.
    Moments are rounded at random. The weight is rounded at random only if `rounding` is true.
    """
    moments = (moment(part, name) for name in MOMENTS)
    values = formula(part["weight"].float(), part["gradient"].float(), *moments)
    for name, value, factor in zip((*MOMENTS, "weight"), values, factors.unbind(), strict=True):
        at_random = name in MOMENTS or rounding
        round_into(value, part, name, partial(noise, words, factor) if at_random else None)


def _update_periods(
    part: State, numbers: Tensor, start: Tensor, table: Tensor, words: Tensor, rounding: bool
) -> None:
    """Call `update` for rows from one or more periods; torch compiles this function.

    start: the first row's period, and the row's index in this period. table: all multipliers
    """
    at = start[1] + torch.arange(len(part["weight"]), device=start.device)
    factors = table[:, start[0] + at // len(words)].unsqueeze(-1)
    formula = partial(_plain_formula, numbers)
    update(part, formula, words[at % len(words)], factors, rounding)


def _fused_formula(group: Group, step: Tensor, *values: Tensor) -> Updated:
    """Do torch's AdamW step in place; return both moments and the weight.

    step: the number of this step, counted from 1. values: weight, gradient and both moments
    """
    weight, gradient, first, second = values
    beta1, beta2 = group["betas"]
    adamw(
        [weight], [gradient], [first], [second], [], [step - 1],
        fused=True, amsgrad=False, maximize=False, beta1=beta1, beta2=beta2, lr=group["lr"],
        weight_decay=group["weight_decay"], eps=group["eps"],
    )  # fmt: skip
    return first, second, weight


def _plain_formula(numbers: Tensor, *values: Tensor) -> Updated:
    """Return moments and weight after AdamW's step (Loshchilov and Hutter 2019, algorithm 2)."""
    weight, gradient, first, second = values
    decay, beta1, new1, beta2, new2, eps, step_size, correction = numbers.unbind()
    weight = weight * decay
    first = first * beta1 + gradient * new1
    second = second * beta2 + gradient * gradient * new2
    weight = weight - step_size * (first / (second.sqrt() / correction + eps))
    return first, second, weight


def step_numbers(group: Group, steps: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the argument `numbers` of `_plain_formula` for each weight of a group, (8,) float32.

    `steps` has each weight's number of steps, including this step. The bias corrections are
    computed on the device, in float64 as in torch. The results are views of one tensor, each
    aligned to 16 bytes. torch would copy unaligned views at each call.
    """
    step = torch.stack(list(steps)).double()
    (beta1, beta2), lr = group["betas"], group["lr"]
    same = (1 - lr * group["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2, group["eps"])
    numbers = [torch.ones_like(step) * number for number in same]
    numbers += [lr / (1 - beta1**step), (1 - beta2**step).sqrt()]
    return torch.stack(numbers, dim=1).float().unbind()


class WeightRange(NamedTuple):
    """The rows of a weight that one `update` call processes, and the location of the first row."""

    rows: slice
    period: int  # index of the first row's period, among the periods of all weights
    offset: int  # index of the first row in its period
    start: Tensor  # period and offset, on the device


@functools.cache
def compiled_update(
    words: Tensor, types: tuple[tuple[str, torch.dtype], ...], rounding: bool
) -> Callable[..., None]:
    """Return `_update_periods`, compiled for tensors of these names and types.

    The function is compiled with dummy tensors. From a real weight, torch would assume accidental
    properties for all weights, such as two equal sizes, and later compile again.
    """
    compiled = torch.compile(_update_periods, dynamic=True)
    device, shape = words.device, (len(words) + 7, words.shape[1])
    part = {
        name: torch.ones(shape[: 1 if name.endswith(SCALE) else 2], dtype=dtype, device=device)
        for name, dtype in types
    }
    numbers = torch.full((8,), 0.5, device=device)
    start = torch.tensor([1, 3], device=device)
    table = torch.ones((3, 5), dtype=torch.int32, device=device)
    with torch._dynamo.config.patch(recompile_limit=KINDS_COMPILED):
        compiled(part, numbers, start, table, words, rounding)
    return compiled


def _row_views(tensors: State, unit: int) -> State:
    """Return a weight's tensors without its step count, as views (rows, unit); scales (rows,)."""
    return {
        name: local_part(tensor).view(-1, *(() if name.endswith(SCALE) else (unit,)))
        for name, tensor in tensors.items()
        if name != "step"
    }


def local_part(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor, as a detached view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _first_element(weight: Tensor) -> int:
    """Return the index of this rank's first element among all elements of the unsharded weight."""
    if not isinstance(weight, DTensor):
        return 0
    mesh, placements = weight.device_mesh, weight.placements
    _, offset = compute_local_shape_and_global_offset(weight.shape, mesh, placements)
    return offset[0] * (weight.numel() // weight.shape[0]) if offset else 0


def block_size(shape: Sequence[int]) -> int | None:
    """Return the number of elements in a block of 8-bit codes, or None if codes are not used.

    The size is the largest number from 256 down to 64 that divides the last dimension, so that
    sharding by rows splits no block. Small and one-dimensional tensors do not use codes.
    """
    if len(shape) < 2 or math.prod(shape) < FEWEST_ELEMENTS:
        return None
    return next((size for size in BLOCKS if shape[-1] % size == 0), None)


def moment(part: State, name: str) -> Tensor:
    """Return a moment as float32. A moment stored as float32 is not copied."""
    stored, scales = part[name], part.get(name + SCALE)
    if scales is None:
        return stored.float()
    bits = stored.int()
    signs = bits.sign()
    bits = bits.abs_().add_(_ONE - _LARGEST[stored.dtype]).bitwise_left_shift_(BITS_LOST)
    return bits.view(torch.float32).mul_(signs).mul_(scales.unsqueeze(-1))


def round_into(
    values: Tensor, part: State, name: str, random: Callable[[int], Tensor] | None
) -> None:
    """Round float32 `values` (rows, unit) and store them in `part[name]`; overwrites `values`.

    A row is a block of 8-bit codes, or one element. `random(bits)` returns int32 noise below
    2**bits. Without `random`, each value is rounded to the nearest stored value. Values that
    bfloat16 represents exactly stay the same, including infinities and torch's NaNs.
    """
    stored, scales = part[name], part.get(name + SCALE)
    if scales is not None:
        added = 2 ** (BITS_LOST - 1) if random is None else random(BITS_LOST)
        _encode(values, stored, scales, added)
    elif stored is not values:
        if stored.dtype != torch.float32 and random is not None:
            lost = MANTISSA_BITS_LOST
            values.view(torch.int32).add_(random(lost)).bitwise_and_(-(2**lost))
        stored.copy_(values)


def _encode(values: Tensor, codes: Tensor, scales: Tensor, added: Tensor | int) -> None:
    """Store float32 `values` (blocks, block) as `codes` and `scales`; overwrites `values`.

    codes: int8 for signed values, else uint8. added: integers to add to the float32 bits before the
    low bits are dropped: noise to round at random, or half of the dropped range to round to nearest
    """
    torch.amax(values.abs(), dim=-1, out=scales)  # vector_norm takes ten times as long
    scales.clamp_(min=_TINY)
    values.div_(scales.unsqueeze(-1))
    largest, signed = _LARGEST[codes.dtype], codes.dtype == torch.int8
    signs = values.sign() if signed else None
    bits = values.abs_().view(torch.int32).add_(added).bitwise_right_shift_(BITS_LOST)
    bits.sub_(_ONE - largest).clamp_(0 if signed else 1, largest)
    codes.copy_(bits if signs is None else bits.mul_(signs.int()))


@functools.cache
def random_words(device: torch.device, unit: int) -> Tensor:
    """Return the table of random words: an odd int32 for each element of a period, (rows, unit).

    All devices have the same numbers, up to the length of the device's period.
    """
    generator = torch.Generator().manual_seed(0)
    words = torch.empty(PERIODS.get(device.type, PERIOD_ELSEWHERE), dtype=torch.int32)
    words.random_(-(2**31), 2**31 - 1, generator=generator)
    rows = len(words) // unit
    table = words[: rows * unit].view(rows, unit).bitwise_or(1).to(device)
    torch._dynamo.mark_static(table)  # let compiled code depend on this shape
    return table


def multipliers(*keys: int | np.ndarray) -> np.ndarray:
    """Return pseudo-random odd int32 numbers: hashes of the keys. Array keys broadcast."""
    state = np.zeros(1, dtype=np.uint64)
    for key in keys:
        state = mix(state + np.asarray(key, dtype=np.uint64))
    return ((state >> np.uint64(32)).astype(np.int64) - 2**31 | 1).astype(np.int32)


def noise(words: Tensor, factors: Tensor, bits: int) -> Tensor:
    """Return int32 noise below 2**bits: the high bits of the product of each word and its factor.

    This is multiplicative hashing. Words and factors are odd, so all products are equally likely.
    """
    return (words * factors).bitwise_right_shift_(32 - bits).bitwise_and_(2**bits - 1)
