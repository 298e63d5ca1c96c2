"""AdamW that computes in float32 and keeps its states, and the weights, in fewer bits."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, zeros
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import AdamW
from torch.optim.adamw import adamw
from transformers import TrainingArguments
from typing_extensions import override

from utils.kernels import eight_bit
from utils.kernels.stochastic_rounding import multiplier, noise, places
from utils.planning.plan import RunPlan
from utils.training.adam_parts import MOMENTS, SCALE, keep_moment, keep_weight, moment
from utils.training.compiled_adam import NoiseTable, compiled_update, step_numbers, words

CODES = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
FIRST_SCALES = MOMENTS[0] + SCALE  # in no state of torch's AdamW
State = dict[str, torch.Tensor]
Group = dict[str, Any]


def optimizer_of(
    training: TrainingArguments, plan: RunPlan
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """Return the class and settings that Trainer is to build an optimizer of; None: its own.

    It is compiled with the layers on a GPU alone: a CPU's chunks stay in its cache as they are.
    """
    states = plan.optimizer_states
    if states is None:
        return None
    return LowPrecisionAdamW, {
        "lr": training.learning_rate,
        "betas": (training.adam_beta1, training.adam_beta2),
        "eps": training.adam_epsilon,
        "kept_as": states.kept_as,
        "stochastic_rounding": states.stochastic_rounding,
        "seed": training.seed,
        "compiled": plan.compiled and training.device.type == "cuda",
    }


class LowPrecisionAdamW(AdamW):
    """torch's fused AdamW on float32 copies, some ten thousand elements at a time.

    `kept_as` is what the moments are kept as: float32, bfloat16 or int8. They are rounded up or
    down at random: a second moment decays by a thousandth a step, which bfloat16 and 8 bits would
    round away. bfloat16 weights are rounded so if `stochastic_rounding` says so, else to the
    nearest. Rounding follows from `seed`, step and place alone, on any number of ranks.
    `compiled` makes one call of millions of elements: the same noise, but sums and products
    round as the compiler orders them.

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
        trained = [
            (index, group, weight)
            for index, (group, weight) in enumerate(self._weights())
            if weight.grad is not None
        ]
        for *_, weight in trained:
            if not self.state[weight]:
                self.state[weight].update(self._new_state(weight))
        if trained:
            torch._foreach_add_([self.state[weight]["step"] for *_, weight in trained], 1)
        if self.compiled:
            self._compiled_updates(trained)
            return
        for index, group, weight in trained:
            self._update(index, group, weight, self.state[weight])

    def _weights(self) -> Iterator[tuple[Group, torch.Tensor]]:
        return ((group, weight) for group in self.param_groups for weight in group["params"])

    def _new_state(self, weight: torch.Tensor) -> State:
        state = {"step": torch.zeros((), dtype=torch.float32, device=weight.device)}
        block = eight_bit.block_size(weight.shape) if self.kept_as == "int8" else None
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

    def _update(self, index: int, group: Group, weight: torch.Tensor, state: State) -> None:
        flat = _flat(weight, state)
        device = flat["weight"].device
        block = _unit(weight)
        size = places(device) // block * block
        start = _first_element(weight)
        end = start + flat["weight"].numel()
        # Chunks begin where they would in the whole tensor, whichever rows are here.
        for begin in range(start - start % size, end, size):
            first, last = max(begin, start), min(begin + size, end)
            if first == last:
                continue  # this rank has no rows of it
            part = slice(first - start, last - start)
            keys = (self.seed, self.steps, index, begin)
            place = _Place(device, first - begin, last - first, keys)
            cut = {name: _part(value, name, part, block) for name, value in flat.items()}
            self._update_part(group, cut, state["step"], place)

    def _update_part(self, group: Group, part: State, step: torch.Tensor, place: "_Place") -> None:
        weight, gradient = part["weight"].float(), part["gradient"].float()
        moments = {name: moment(part, name) for name in MOMENTS}
        beta1, beta2 = group["betas"]
        adamw(
            [weight], [gradient], [moments["exp_avg"]], [moments["exp_avg_sq"]], [],
            [step - 1],
            fused=True, amsgrad=False, maximize=False, beta1=beta1, beta2=beta2, lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"],
        )  # fmt: skip
        for name in MOMENTS:
            keep_moment(moments[name], part, name, place)
        keep_weight(weight, part, place if self.stochastic_rounding else None)

    def _compiled_updates(self, trained: Sequence[tuple[int, Group, torch.Tensor]]) -> None:
        if self.noise_table is None:
            weights = [weight for _, weight in self._weights()]
            spans = [(_unit(one), _first_element(one), _local(one).numel()) for one in weights]
            self.noise_table = NoiseTable(self.seed, spans, weights[0].device)
        table = self.noise_table.multipliers(self.steps)
        numbers = [
            row
            for group in self.param_groups
            for row in step_numbers(
                group, [self.state[w]["step"] for w in group["params"] if w.grad is not None]
            )
        ]
        for (index, _, weight), its_numbers in zip(trained, numbers, strict=True):
            unit, parts = self.noise_table.units[index], self.noise_table.parts[index]
            rows = _flat(weight, self.state[weight], unit)
            dtypes = tuple((name, value.dtype) for name, value in rows.items())
            rounding, device = self.stochastic_rounding, weight.device
            update = compiled_update(device, unit, dtypes, rounding)
            for part, where in parts:
                cut = rows if len(parts) == 1 else {k: v[part] for k, v in rows.items()}
                update(cut, its_numbers, where, table, words(device, unit), rounding)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of any AdamW; torch's own loading makes states of the weights' type."""
        super().load_state_dict({**state_dict, "state": {}})
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        for (_, weight), name in zip(self._weights(), names, strict=True):
            if name in state_dict["state"]:
                self.state[weight] = self._taken_over(weight, state_dict["state"][name])
        counts = {int(state["step"]) for state in self.state.values()}
        self.steps = max(counts, default=0)

    def _taken_over(self, weight: torch.Tensor, saved: State) -> State:
        state = self._new_state(weight)
        same = state.keys() == saved.keys() and all(
            state[name].dtype == saved[name].dtype for name in state
        )
        if same:
            return {name: value.to(weight.device) for name, value in saved.items()}
        assert not isinstance(weight, DTensor), "sharded states are loaded as they were saved"
        state["step"].copy_(saved["step"])
        for name in MOMENTS:
            value = saved[name].to(weight.device).view(-1)
            if name + SCALE in saved:
                value = eight_bit.decode(value, saved[name + SCALE].to(weight.device).view(-1))
            flat = {key: tensor.view(-1) for key, tensor in state.items()}
            keep_moment(value.float().clone(), flat, name, None)
        return state


class _Place:
    """Where a part lies, which is what its noise follows from."""

    def __init__(self, device: torch.device, first: int, count: int, keys: tuple[int, ...]):
        self.device, self.first, self.count, self.keys = device, first, count, keys

    def noise(self, number: int, bits: int) -> torch.Tensor:
        """Return (elements,) int32 below 2**bits, other noise for each number."""
        factor = multiplier(*self.keys, number)
        return noise(self.device, self.first, self.count, factor, bits)


def _flat(weight: torch.Tensor, state: State, *unit: int) -> State:
    """Return what this rank has of a weight, its gradient and its state, but for the step count.

    They are (elements,), with a unit (rows, unit); scales are always of one dimension.
    """
    assert weight.grad is not None
    tensors = {"weight": weight, "gradient": weight.grad, **state}
    return {
        name: _local(tensor).view(-1, *(() if name.endswith(SCALE) else unit))
        for name, tensor in tensors.items()
        if name != "step"
    }


def _unit(weight: torch.Tensor) -> int:
    """Return how many elements stay together, whichever type the moments have."""
    return eight_bit.block_size(weight.shape) or 1


def _part(tensor: torch.Tensor, name: str, part: slice, block: int) -> torch.Tensor:
    if name.endswith(SCALE):
        return tensor[part.start // block : part.stop // block]
    return tensor[part]


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
