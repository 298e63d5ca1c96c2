"""Without clipping the norm is the same, and no gradient is written."""

import math

import pytest
import torch

from utils.training.gradients import gradient_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_norm_that_clipping_to_infinity_returns(dtype):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(17, 17) for _ in range(3))).to(dtype)
    model[1].requires_grad_(False)
    model(torch.randn(5, 17, dtype=dtype)).sum().backward()
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    versions = [gradient._version for gradient in gradients]
    norm = gradient_norm(model)
    assert norm > 0
    assert [gradient._version for gradient in gradients] == versions
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf))
    assert [gradient._version for gradient in gradients] != versions  # what is spared
