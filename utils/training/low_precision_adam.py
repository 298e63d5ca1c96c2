"""AdamW that computes in float32 and keeps its states, and the weights, in fewer bits."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, zeros
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import AdamW
from torch.optim.adamw import adamw
from transformers import TrainingArguments
from typing_extensions import override

from utils.kernels import eight_bit
from utils.kernels.stochastic_rounding import (
    MANTISSA_BITS_LOST,
    multiplier,
    noise,
    places,
    round_to_bfloat16_,
)
from utils.planning.optimizer_states import OptimizerStates

MOMENTS = ("exp_avg", "exp_avg_sq")
CODES = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
SCALE = "_scale"  # ends the name of a moment's scales, one for each block of 8-bit codes
FIRST_SCALES = MOMENTS[0] + SCALE  # in no state of torch's AdamW
State = dict[str, torch.Tensor]


def optimizer_of(
    training: TrainingArguments, states: OptimizerStates | None
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """Return the class and settings that Trainer is to build an optimizer of; None: its own."""
    if states is None:
        return None
    return LowPrecisionAdamW, {
        "lr": training.learning_rate,
        "betas": (training.adam_beta1, training.adam_beta2),
        "eps": training.adam_epsilon,
        "kept_as": states.kept_as,
        "stochastic_rounding": states.stochastic_rounding,
        "seed": training.seed,
    }


class LowPrecisionAdamW(AdamW):
    """torch's fused AdamW on float32 copies, some ten thousand elements at a time.

    `kept_as` is what the moments are kept as: float32, bfloat16 or int8. They are rounded up or
    down at random: a second moment decays by a thousandth a step, which bfloat16 and 8 bits would
    round away. bfloat16 weights are rounded so if `stochastic_rounding` says so, else to the
    nearest. Rounding follows from `seed`, step and place alone, on any number of ranks.

    Loads the state of any AdamW, torch's too. Weights may be shards of rows (FSDP2).
    """

    def __init__(
        self, params: Any, *, kept_as: str, stochastic_rounding: bool, seed: int, **kwargs: Any
    ):
        super().__init__(params, fused=True, **kwargs)
        self.kept_as, self.stochastic_rounding, self.seed = kept_as, stochastic_rounding, seed
        self.steps = 0  # on the host: the state's are on the device

    @torch.no_grad()
    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # Trainer gives none
        """Take a step."""
        assert closure is None
        self.steps += 1
        for index, (group, weight) in enumerate(self._weights()):
            if weight.grad is not None:
                state = self.state[weight]
                if not state:
                    state.update(self._new_state(weight))
                state["step"] += 1
                self._update(index, group, weight, state)

    def _weights(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
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

    def _update(
        self, index: int, group: Mapping[str, Any], weight: torch.Tensor, state: State
    ) -> None:
        tensors = {"weight": weight, "gradient": weight.grad, **state}
        flat = {
            name: _local(value).view(-1) for name, value in tensors.items() if value is not None
        }
        device = flat["weight"].device
        block = eight_bit.block_size(weight.shape) or 1
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
            self._update_part(group, {k: _part(v, k, part, block) for k, v in flat.items()}, place)

    def _update_part(self, group: Mapping[str, Any], part: State, place: "_Place") -> None:
        weight, gradient = part["weight"].float(), part["gradient"].float()
        moments = {
            name: eight_bit.decode(part[name], part[name + SCALE])
            if name + SCALE in part
            else part[name].float()
            for name in MOMENTS
        }
        beta1, beta2 = group["betas"]
        adamw(
            [weight], [gradient], [moments["exp_avg"]], [moments["exp_avg_sq"]], [],
            [part["step"] - 1],
            fused=True, amsgrad=False, maximize=False, beta1=beta1, beta2=beta2, lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"],
        )  # fmt: skip
        for number, name in enumerate(MOMENTS):
            _keep(moments[name], part, name, place, number)
        if part["weight"].dtype != torch.float32:
            if self.stochastic_rounding:
                round_to_bfloat16_(weight, place.noise(len(MOMENTS), MANTISSA_BITS_LOST))
            part["weight"].copy_(weight)

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
            _keep(value.float().clone(), flat, name, None, 0)
        return state


class _Place:
    """Where a part lies, which is what its noise follows from."""

    def __init__(self, device: torch.device, first: int, count: int, keys: tuple[int, ...]):
        self.device, self.first, self.count, self.keys = device, first, count, keys

    def noise(self, number: int, bits: int) -> torch.Tensor:
        """Return (elements,) int32 below 2**bits, other noise for each number."""
        factor = multiplier(*self.keys, number)
        return noise(self.device, self.first, self.count, factor, bits)


def _keep(values: torch.Tensor, part: State, name: str, place: _Place | None, number: int) -> None:
    """Round float32 moments to how they are kept; without a place to the nearest."""
    kept = part[name]
    if name + SCALE in part:
        bits = eight_bit.BITS_LOST
        added = torch.full_like(values, 2 ** (bits - 1), dtype=torch.int32)
        rounding = added if place is None else place.noise(number, bits)
        eight_bit.encode(values, kept, part[name + SCALE], rounding)
    elif kept.dtype != torch.float32 and place is not None:
        kept.copy_(round_to_bfloat16_(values, place.noise(number, MANTISSA_BITS_LOST)))
    elif kept is not values:
        kept.copy_(values)


def _part(tensor: torch.Tensor, name: str, part: slice, block: int) -> torch.Tensor:
    if name == "step":
        return tensor
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
