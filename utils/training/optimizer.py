"""Choice of the optimizer, Muon, and loading of an earlier run's state (--init_optimizer).

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) averages the gradients of a matrix and
makes the average orthogonal: about the same direction, with all singular values near 1. The step is
scaled to the usual size of AdamW's steps (Liu et al. 2025, "Muon is Scalable for LLM Training",
arXiv 2502.16982), so one learning rate and one weight decay fit Muon and AdamW. torch.optim.Muon
supports neither DTensors nor stacked experts.
"""

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from transformers import TrainerCallback, TrainerState, TrainingArguments
from typing_extensions import override

from utils.config.arguments import MUON
from utils.config.errors import ConfigurationError
from utils.model.adapters import trained_matrices
from utils.model.stages import OPTIMIZER_FILE
from utils.plan.rehearsal import muon_options
from utils.plan.run_plan import RunPlan
from utils.training.low_precision_adam import FIRST_SCALES, LowPrecisionAdamW, local_part

NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Jordan et al., for five iterations
SMALLEST_NORM = 1e-7  # a matrix of zeros stays zero
# Root mean square of AdamW's steps at a learning rate of 1, by Liu et al., section 2.2.
USUAL_STEP = 0.2
MOMENTUM = "momentum_buffer"  # torch.optim.Muon's name

logger = logging.getLogger(__name__)


def optimizer_of(
    training: TrainingArguments, plan: RunPlan, decaying: Callable[[Any], list[str]]
) -> tuple[Any, dict[str, Any]] | None:
    """Return (class, arguments) of Muon or LowPrecisionAdamW, or None for Trainer's optimizer.

    The result is Trainer's `optimizer_cls_and_kwargs`. `decaying` returns the names of the weights
    with weight decay. On a GPU LowPrecisionAdamW's step is compiled if the layers are compiled. On
    a CPU this step is never compiled, because the uncompiled step works on chunks that stay in the
    cache.
    """
    settings: dict[str, Any] = {
        "lr": training.learning_rate,
        "betas": (training.adam_beta1, training.adam_beta2),
        "eps": training.adam_epsilon,
    }
    if training.optim == MUON:
        # Trainer calls the first value without arguments, and the result with the model.
        return lambda: make_muon, settings | {
            "decaying": decaying,
            "weight_decay": training.weight_decay,
            "options": muon_options(training.optim_args),
            "in_bf16": training.mixed_precision == "bf16",
        }
    if plan.optimizer_states is None:
        return None
    return LowPrecisionAdamW, settings | {
        "seed": training.seed,
        "compiled": plan.compiled and training.device.type == "cuda",
        **vars(plan.optimizer_states),
    }


class InheritedOptimizer(TrainerCallback):
    """A callback that loads the optimizer state of an earlier run before the first step.

    The state has moments and step counts. The earlier run's learning rate schedule is not loaded.
    `directory` is a checkpoint of the earlier run. The caller must have checked that optimizer.pt
    in it is safe to unpickle.
    """

    def __init__(self, directory: Path):
        self.path = directory / OPTIMIZER_FILE

    @override
    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        optimizer = kwargs["optimizer"]
        saved = torch.load(self.path, map_location="cpu", weights_only=True)
        fresh = optimizer.state_dict()
        if problem := _state_mismatch(saved, fresh, optimizer):
            raise ConfigurationError(f"init_optimizer: {self.path}: {problem}")
        optimizer.load_state_dict({**fresh, "state": saved["state"]})
        line = "optimizer: the state of %d tensors from %s, under this run's own schedule"
        logger.info(line, len(saved["state"]), self.path)


def _state_mismatch(saved: dict[str, Any], fresh: dict[str, Any], optimizer: Any) -> str | None:
    groups = [each["param_groups"] for each in (saved, fresh)]
    keys, own_keys = (set(each[0]) - {"initial_lr"} for each in groups)
    if other := ", ".join(sorted(keys ^ own_keys)):
        return f"it is of another kind of optimizer (they differ in {other}): set the same optim."
    sizes, own_sizes = ([len(group["params"]) for group in each] for each in groups)
    if sizes != own_sizes:
        return f"it is of groups of {sizes} tensors, this run trains groups of {own_sizes}."
    torchs_own = not isinstance(getattr(optimizer, "optimizer", optimizer), LowPrecisionAdamW)
    if torchs_own and any(FIRST_SCALES in values for values in saved["state"].values()):
        return "it keeps Adam's moments in 8 bits: set optim_states, which reads them."
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in enumerate(parameters):
        own = tuple(parameter.shape)
        for key, value in saved["state"].get(index, {}).items():
            found = tuple(getattr(value, "shape", ()))
            if len(found) == len(own) and found != own:
                return f"{key} of tensor {index} is {found}, not {own}: the architectures differ."
    return None


class MuonAdamW(AdamW):
    """Muon for parameter groups with `muon: True`, AdamW for groups with `muon: False`.

    Muon stores one average per matrix, in the matrix's type. A stack of experts, (experts, ., .),
    counts as one matrix per expert. Under FSDP2 the ranks divide the work: each rank gathers the
    rows of a matrix, makes the matrix orthogonal and sends the rows back. Experts are sharded by
    expert, so each rank has complete matrices of its experts.

    in_bf16: whether matrices are made orthogonal in bfloat16, as in torch.optim.Muon. False means
    the weights' type.
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
            for batch in _weight_batches(trained) if group["muon"] else ():
                directions = [self._nesterov_update(group, weight) for weight in batch]
                updates = orthogonal_rows(directions, batch, group["ns_steps"])
                for weight, update in zip(batch, updates, strict=True):
                    rows = local_part(weight).mul_(1 - group["lr"] * group["weight_decay"])
                    rate = group["lr"] * USUAL_STEP * math.sqrt(max(weight.shape[-2:]))
                    rows.add_(update.to(rows.dtype), alpha=-rate)
                    weight.grad = None  # AdamW's step skips this weight
        super().step()

    def _nesterov_update(self, group: dict[str, Any], weight: nn.Parameter) -> Tensor:
        """Update Muon's momentum; return the Nesterov update. Overwrites the gradient."""
        state, gradient = self.state[weight], local_part(weight.grad)
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state[MOMENTUM] = torch.zeros_like(weight)
        state["step"] += 1  # torch's AdamW expects a step count in each state
        average = local_part(state[MOMENTUM]).lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp_(average, group["momentum"])
        return update.bfloat16() if self.in_bf16 else update


def orthogonal(matrices: Tensor, iterations: int) -> Tensor:
    """Return matrices (..., out, in), made orthogonal by Newton-Schulz iterations."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
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
    """Make matrices orthogonal; return this rank's rows of each result. All ranks must call this.

    parts: this rank's rows of each matrix. weights: the matrices as parameters, a list from
    `_weight_batches`. The list has either one weight with whole matrices on this rank, or at most
    one sharded weight for each rank.
    """
    group = _shard_group(weights[0])
    if group is None:
        return [orthogonal(part, iterations) for part in parts]
    rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
    sent = torch.cat([part.flatten() for part in parts])
    to_rank = [part.numel() for part in parts] + [0] * (ranks - len(parts))
    own = weights[rank].shape if rank < len(weights) else torch.Size((0, 1))
    most = -(-own[0] // ranks)  # FSDP2 gives each rank equally many rows, the last fewer
    rows = [min(most, max(own[0] - most * other, 0)) for other in range(ranks)]
    from_rank = [count * own[1] for count in rows]
    matrix = sent.new_empty(own)
    distributed.all_to_all_single(matrix.view(-1), sent, from_rank, to_rank, group=group)
    matrix = orthogonal(matrix, iterations).contiguous()
    distributed.all_to_all_single(sent, matrix.view(-1), to_rank, from_rank, group=group)
    pieces = sent.split(to_rank)
    return [piece.view_as(part) for piece, part in zip(pieces, parts, strict=False)]


def _weight_batches(weights: Sequence[nn.Parameter]) -> list[Sequence[nn.Parameter]]:
    """Divide weights into lists, one per call of `orthogonal_rows`. All ranks get equal lists."""
    sharded = [weight for weight in weights if _shard_group(weight) is not None]
    ranks = distributed.get_world_size(_shard_group(sharded[0])) if sharded else 1
    lists = [sharded[first : first + ranks] for first in range(0, len(sharded), ranks)]
    return [*lists, *([weight] for weight in weights if _shard_group(weight) is None)]


def _shard_group(weight: Any) -> distributed.ProcessGroup | None:
    """Return the process group that shards a matrix's rows, or None if they are not sharded.

    Under HSDP this group has the ranks of one replica.
    """
    if not isinstance(weight, DTensor) or weight.ndim > 2:
        return None
    shard = next(i for i, each in enumerate(weight.placements) if each.is_shard())
    return weight.device_mesh.get_group(shard)


def make_muon(
    model: Any, decaying: Callable[[Any], list[str]], weight_decay: float,
    options: dict[str, Any], **settings: Any,
) -> MuonAdamW:  # fmt: skip
    """Return a MuonAdamW optimizer for the trained weights of a model.

    decaying: returns the names of the weights with weight decay. options: Muon's options, the
    result of `muon_options`
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
