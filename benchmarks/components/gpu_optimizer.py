"""A step of AdamW, its states kept in fewer and fewer bits: torch's own, and ours beside it."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from benchmarks.hardware.device import device
from utils.training.low_precision_adam import LowPrecisionAdamW

TITLE = (
    "AdamW on square matrices and vectors of the same width (Stoker's states: bfloat16, or as the "
    "row says), by width"
)
UNIT = "parameters"
SIZES = (1024, 4096, 8192)
MATRICES = 24

OptimizerOf = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def ours(moment_type: str, compiled: bool, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Keep the states so; weights in bfloat16 are rounded stochastically."""
    return LowPrecisionAdamW(
        weights,
        lr=1e-4,
        moment_type=moment_type,
        stochastic_rounding=True,
        seed=1,
        compiled=compiled,
    )


# The weights' type and the optimizer. Eager and compiled as without and with --compile.
STEPS: dict[str, tuple[torch.dtype, OptimizerOf]] = {
    "torch, float32": (torch.float32, partial(torch.optim.AdamW, lr=1e-4, fused=True)),
    "Stoker": (torch.float32, partial(ours, "bfloat16", False)),
    "Stoker, compiled": (torch.float32, partial(ours, "bfloat16", True)),
    "Stoker, int8": (torch.float32, partial(ours, "int8", False)),
    "Stoker, int8, compiled": (torch.float32, partial(ours, "int8", True)),
    "Stoker, bfloat16 weights, int8": (torch.bfloat16, partial(ours, "int8", False)),
    "Stoker, bfloat16 weights, int8, compiled": (torch.bfloat16, partial(ours, "int8", True)),
}


def _prepare(name: str, width: int) -> tuple[Callable[[], object], int]:
    dtype, optimizer_of = STEPS[name]
    random = torch.Generator(device()).manual_seed(0)
    # Toys have few.
    shapes = [(width, width), (width,)] * (MATRICES if width >= min(SIZES) else 2)
    weights = []
    for shape in shapes:
        values, gradient = (
            torch.randn(shape, generator=random, device=device()) * scale for scale in (0.02, 1e-3)
        )
        weights.append(nn.Parameter(values.to(dtype)))
        weights[-1].grad = gradient.to(dtype)
    return optimizer_of(weights).step, sum(weight.numel() for weight in weights)


BASELINES = {name: partial(_prepare, name) for name in STEPS}
