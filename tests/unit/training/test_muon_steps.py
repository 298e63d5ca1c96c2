"""Muon's steps are those of a plain reference, in float32 and near it in bf16."""

import math

import torch
from torch import nn

from utils.training.optimizer import MuonAdamW

RATE, DECAY, MOMENTUM, ITERATIONS, STEPS = 1e-2, 0.1, 0.9, 5, 4
SHAPES = ((48, 64), (64, 40), (3, 20, 30), (8,))  # wide, tall, three experts, a norm
SETTINGS = {"lr": RATE, "betas": (0.9, 0.95), "eps": 1e-8}
MUON = {"muon": True, "momentum": MOMENTUM, "ns_steps": ITERATIONS}


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def trained(in_bf16: bool) -> list[nn.Parameter]:
    parameters = weights()
    groups = [
        {"params": parameters[:3], **MUON, "weight_decay": DECAY},
        {"params": parameters[3:], "muon": False, "weight_decay": DECAY},
    ]
    optimizer = MuonAdamW(groups, in_bf16=in_bf16, **SETTINGS)
    for step in range(STEPS):
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return parameters


def by_singular_values(matrix: torch.Tensor) -> torch.Tensor:
    """Apply the odd polynomial of the iteration to the singular values, and to nothing else."""
    left, values, right = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    for _ in range(ITERATIONS):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ values.diag() @ right


def reference(weight: torch.Tensor, of_steps: list[torch.Tensor]) -> torch.Tensor:
    weight, average = weight.detach().double(), torch.zeros(weight.shape, dtype=torch.float64)
    for gradient in map(torch.Tensor.double, of_steps):
        average = MOMENTUM * average + (1 - MOMENTUM) * gradient
        update = by_singular_values((1 - MOMENTUM) * gradient + MOMENTUM * average)
        scale = 0.2 * math.sqrt(max(weight.shape))
        weight = weight * (1 - RATE * DECAY) - RATE * scale * update
    return weight


def test_each_matrix_takes_the_steps_of_a_plain_reference():
    of_steps = [gradients(step) for step in range(STEPS)]
    wide, tall, experts, norm = trained(in_bf16=False)
    for place, found in ((0, wide), (1, tall)):
        expected = reference(weights()[place], [each[place] for each in of_steps])
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)
    for expert, found in enumerate(experts):
        expected = reference(weights()[2][expert], [each[2][expert] for each in of_steps])
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)
    plain = weights()[3]
    adamw = torch.optim.AdamW([plain], lr=RATE, betas=(0.9, 0.95), weight_decay=DECAY, fused=True)
    for each in of_steps:
        plain.grad = each[3]
        adamw.step()
    assert torch.equal(norm, plain)


def test_in_bf16_it_is_near_torchs_own():
    wide, tall, *_ = trained(in_bf16=True)
    theirs = weights()[:2]
    muon = torch.optim.Muon(
        theirs, lr=RATE, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(STEPS):
        for parameter, gradient in zip(theirs, gradients(step), strict=False):
            parameter.grad = gradient
        muon.step()
    for found, expected, start in zip((wide, tall), theirs, weights(), strict=False):
        moved = (expected - start).norm()
        assert (found - expected).norm() / moved < 0.02


def test_a_matrix_of_zeros_stays():
    parameter = nn.Parameter(torch.ones(4, 6))
    groups = [{"params": [parameter], **MUON, "weight_decay": 0.0}]
    parameter.grad = torch.zeros(4, 6)
    MuonAdamW(groups, in_bf16=False, **SETTINGS).step()
    assert torch.equal(parameter, torch.ones(4, 6))
