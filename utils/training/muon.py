"""Muon for the matrices between embedding and last layer, and AdamW for all other weights.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) averages the gradients of a matrix and
makes the average orthogonal: about the same direction, with all singular values near 1. The step is
scaled to the usual size of AdamW's steps (Liu et al. 2025, "Muon is Scalable for LLM Training",
arXiv 2502.16982), so learning rate and weight decay serve both optimizers. torch.optim.Muon takes
neither DTensors nor stacked experts.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from typing_extensions import override

from utils.model.adapters import trained_matrices

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Jordan et al., for five iterations
SMALLEST_NORM = 1e-7  # a matrix of zeros stays zero
# Root mean square of AdamW's steps at a learning rate of 1, by Liu et al., section 2.2.
USUAL_STEP = 0.2
MOMENTUM = "momentum_buffer"  # torch.optim.Muon's name
MOMENTS = ("exp_avg", "exp_avg_sq")

logger = logging.getLogger(__name__)


class MuonAdamW(torch.optim.Optimizer):
    """Muon for parameter groups with `muon: True`, AdamW for the others.

    A matrix of Muon has one state, of its own type. A stack of experts, (experts, ., .), counts as
    many matrices. Under FSDP2 the ranks divide the matrices: each one gathers a matrix, makes it
    orthogonal and sends the rows back. Experts are sharded by expert, so they stay where they are.

    in_bf16: iterate in bfloat16, as torch.optim.Muon does; otherwise in the type of the weights
    """

    def __init__(self, groups: Any, *, in_bf16: bool, **defaults: Any):
        super().__init__(groups, defaults)
        self.in_bf16 = in_bf16

    @torch.no_grad()
    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # Trainer gives none
        for group in self.param_groups:
            trained = [weight for weight in group["params"] if weight.grad is not None]
            if not group["muon"]:
                self._step_by_adamw(group, trained)
                continue
            whole = [weight for weight in trained if not _is_divided(weight)]
            for weight in whole:
                _apply(group, weight, orthogonal(self._average(group, weight), group["ns_steps"]))
            divided = [weight for weight in trained if _is_divided(weight)]
            ranks = distributed.get_world_size(_ranks_of(divided[0])) if divided else 1
            for first in range(0, len(divided), ranks):
                some = divided[first : first + ranks]
                parts = [self._average(group, weight) for weight in some]
                updates = orthogonal_parts(parts, some, group["ns_steps"])
                for weight, update in zip(some, updates, strict=True):
                    _apply(group, weight, update)

    def _average(self, group: dict[str, Any], weight: nn.Parameter) -> Tensor:
        """Add the gradient to its average; return Nesterov's mean of both, in the gradient."""
        state, gradient = self.state[weight], _local(weight.grad)
        if not state:
            state[MOMENTUM] = torch.zeros_like(weight)
        average = _local(state[MOMENTUM]).lerp_(gradient, 1 - group["momentum"])
        mean = gradient.lerp_(average, group["momentum"])
        return mean.bfloat16() if self.in_bf16 else mean

    def _step_by_adamw(self, group: dict[str, Any], weights: list[nn.Parameter]) -> None:
        for weight in weights:
            if not self.state[weight]:
                step = torch.zeros((), dtype=torch.float32, device=weight.device)
                moments = {name: torch.zeros_like(weight) for name in MOMENTS}
                self.state[weight].update(step=step, **moments)
        states = [self.state[weight] for weight in weights]
        first, second, steps = ([one[name] for one in states] for name in (*MOMENTS, "step"))
        beta1, beta2 = group["betas"]
        adamw(
            weights, [weight.grad for weight in weights], first, second, [], steps,
            fused=True, amsgrad=False, maximize=False, beta1=beta1, beta2=beta2, lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"],
        )  # fmt: skip


def _apply(group: dict[str, Any], weight: nn.Parameter, update: Tensor) -> None:
    """Decay this rank's rows of a weight and subtract their update."""
    rate, rows = group["lr"], _local(weight)
    rows.mul_(1 - rate * group["weight_decay"])
    scale = USUAL_STEP * math.sqrt(max(weight.shape[-2:]))
    rows.add_(update.to(rows.dtype), alpha=-rate * scale)


def orthogonal(matrices: Tensor, iterations: int) -> Tensor:
    """Return matrices (..., out, in) with singular values near 1, by Newton-Schulz iterations."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if tall else matrices
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(iterations):
        products = wide @ wide.mT
        wide = a * wide + (b * products + c * products @ products) @ wide
    return wide.mT if tall else wide


def orthogonal_parts(
    parts: Sequence[Tensor], weights: Sequence[nn.Parameter], iterations: int
) -> list[Tensor]:
    """Return this rank's rows of orthogonal matrices, given its rows; collective.

    Rank i of the weights' group computes matrix i, so there are at most as many as ranks.
    """
    group = _ranks_of(weights[0])
    rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
    sent = torch.cat([part.flatten() for part in parts])
    per_rank = [part.numel() for part in parts] + [0] * (ranks - len(parts))
    own = weights[rank].shape if rank < len(weights) else torch.Size((0, 1))
    most = -(-own[0] // ranks)  # FSDP2 gives as many rows to each rank, the last ones get less
    rows = [min(most, max(own[0] - most * other, 0)) for other in range(ranks)]
    from_rank = [count * own[1] for count in rows]
    matrix = sent.new_empty(own)
    distributed.all_to_all_single(matrix.view(-1), sent, from_rank, per_rank, group=group)
    matrix = orthogonal(matrix, iterations).contiguous()
    distributed.all_to_all_single(sent, matrix.view(-1), per_rank, from_rank, group=group)
    pieces = sent.split(per_rank)[: len(parts)]
    return [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)]


def _is_divided(weight: Tensor) -> bool:
    """Return whether the rows of one matrix are on several ranks."""
    return isinstance(weight, DTensor) and weight.ndim == 2


def _ranks_of(weight: Any) -> distributed.ProcessGroup:
    """Return the ranks that share a weight. Under HSDP they are those of one replica."""
    shard = next(i for i, each in enumerate(weight.placements) if each.is_shard())
    return weight.device_mesh.get_group(shard)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def make_muon(
    model: Any, decaying: Callable[[Any], list[str]], weight_decay: float, **settings: Any
) -> MuonAdamW:
    """Return the optimizer of a model. `decaying` names the weights that decay, as in Trainer."""
    matrices, names = dict.fromkeys(trained_matrices(model)), set(decaying(model))
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            kind = weight in matrices, weight_decay if name in names else 0.0
            groups.setdefault(kind, []).append(weight)
    logger.info(
        "optimizer: Muon for %d matrices (or stacks of experts), AdamW for %d other tensors",
        len(matrices), sum(len(weights) for weights in groups.values()) - len(matrices),
    )  # fmt: skip
    return MuonAdamW(
        [
            {"params": weights, "muon": muon, "weight_decay": decay}
            for (muon, decay), weights in groups.items()
        ],
        **settings,
    )
