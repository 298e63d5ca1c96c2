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
from torch.optim import AdamW
from typing_extensions import override

from utils.model.adapters import trained_matrices

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Jordan et al., for five iterations
SMALLEST_NORM = 1e-7  # a matrix of zeros stays zero
# Root mean square of AdamW's steps at a learning rate of 1, by Liu et al., section 2.2.
USUAL_STEP = 0.2
MOMENTUM = "momentum_buffer"  # torch.optim.Muon's name

logger = logging.getLogger(__name__)


class MuonAdamW(AdamW):
    """Muon for parameter groups with `muon: True`, AdamW for the others.

    A matrix of Muon has one state, of its own type. A stack of experts, (experts, ., .), counts as
    many matrices. Under FSDP2 the ranks divide the matrices: each one gathers a matrix, makes it
    orthogonal and sends the rows back. Experts are sharded by expert, so they stay where they are.

    in_bf16: iterate in bfloat16, as torch.optim.Muon does; otherwise in the type of the weights
    """

    def __init__(self, groups: Any, *, in_bf16: bool, **kwargs: Any):
        super().__init__(groups, fused=True, **kwargs)
        self.in_bf16 = in_bf16
        self._step_supports_amp_scaling = False  # let the scaler of fp16 unscale the gradients

    @torch.no_grad()
    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # Trainer gives none
        for group in self.param_groups:
            trained = [weight for weight in group["params"] if weight.grad is not None]
            for some in _together(trained) if group["muon"] else ():
                means = [self._mean(group, weight) for weight in some]
                updates = orthogonal_rows(means, some, group["ns_steps"])
                for weight, update in zip(some, updates, strict=True):
                    rows = _local(weight).mul_(1 - group["lr"] * group["weight_decay"])
                    rate = group["lr"] * USUAL_STEP * math.sqrt(max(weight.shape[-2:]))
                    rows.add_(update.to(rows.dtype), alpha=-rate)
                    weight.grad = None  # AdamW's step skips this weight
        super().step()

    def _mean(self, group: dict[str, Any], weight: nn.Parameter) -> Tensor:
        """Add the gradient to its average; return Nesterov's mean of both, in the gradient."""
        state, gradient = self.state[weight], _local(weight.grad)
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state[MOMENTUM] = torch.zeros_like(weight)
        state["step"] += 1  # torch's AdamW expects it in each state
        average = _local(state[MOMENTUM]).lerp_(gradient, 1 - group["momentum"])
        mean = gradient.lerp_(average, group["momentum"])
        return mean.bfloat16() if self.in_bf16 else mean


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


def orthogonal_rows(
    parts: Sequence[Tensor], weights: Sequence[nn.Parameter], iterations: int
) -> list[Tensor]:
    """Return this rank's rows of the orthogonal matrices, given its rows; collective.

    `weights` come from `_together`: one that the rank has whole, or at most as many as ranks.
    """
    group = _ranks_of(weights[0])
    if group is None:
        return [orthogonal(part, iterations) for part in parts]
    rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
    sent = torch.cat([part.flatten() for part in parts])
    to_rank = [part.numel() for part in parts] + [0] * (ranks - len(parts))
    own = weights[rank].shape if rank < len(weights) else torch.Size((0, 1))
    most = -(-own[0] // ranks)  # FSDP2 gives as many rows to each rank, fewer to the last ones
    rows = [min(most, max(own[0] - most * other, 0)) for other in range(ranks)]
    from_rank = [count * own[1] for count in rows]
    matrix = sent.new_empty(own)
    distributed.all_to_all_single(matrix.view(-1), sent, from_rank, to_rank, group=group)
    matrix = orthogonal(matrix, iterations).contiguous()
    distributed.all_to_all_single(sent, matrix.view(-1), to_rank, from_rank, group=group)
    pieces = sent.split(to_rank)
    return [piece.view_as(part) for piece, part in zip(pieces, parts, strict=False)]


def _together(weights: Sequence[nn.Parameter]) -> list[Sequence[nn.Parameter]]:
    """Cut weights into lists for `orthogonal_rows`, in the same way on every rank."""
    divided = [weight for weight in weights if _ranks_of(weight) is not None]
    at_once = distributed.get_world_size(_ranks_of(divided[0])) if divided else 1
    lists = [divided[first : first + at_once] for first in range(0, len(divided), at_once)]
    return [*lists, *([weight] for weight in weights if _ranks_of(weight) is None)]


def _ranks_of(weight: Any) -> distributed.ProcessGroup | None:
    """Return the ranks that share the rows of a matrix, None if this rank has whole matrices.

    Under HSDP they are the ranks of one replica.
    """
    if not isinstance(weight, DTensor) or weight.ndim > 2:
        return None
    shard = next(i for i, each in enumerate(weight.placements) if each.is_shard())
    return weight.device_mesh.get_group(shard)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def make_muon(
    model: Any, decaying: Callable[[Any], list[str]], weight_decay: float,
    options: dict[str, Any], **settings: Any,
) -> MuonAdamW:  # fmt: skip
    """Return the optimizer of a model.

    decaying: returns the names of the weights that decay. options: of Muon, see `muon_options`
    """
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
            {"params": weights, "muon": muon, "weight_decay": decay, **options}
            for (muon, decay), weights in groups.items()
        ],
        **settings,
    )
