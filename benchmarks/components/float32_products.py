"""Products of a layer in float32 on a CPU, both passes, by the library that torch takes."""

from collections.abc import Callable

import torch

TITLE = "Products of 2,048 tokens with a square matrix, float32, both passes, by its width"
UNIT = "tokens"
SIZES = (384, 1024, 2048)
TOKENS = 2048


def _timed(width: int) -> tuple[Callable[[], object], int]:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, width, generator=random).requires_grad_()
    weight = torch.randn(width, width, generator=random).requires_grad_()
    gradient = torch.ones(TOKENS, width)

    def call() -> None:
        hidden.grad = weight.grad = None
        (hidden @ weight.T).backward(gradient)

    return call, TOKENS


def stoker(width: int) -> tuple[Callable[[], object], int]:
    """Multiply as a run does."""
    from utils.kernels.cpu_products import settle_products

    settle_products()
    return _timed(width)


def torch_alone(width: int) -> tuple[Callable[[], object], int]:
    """Multiply as torch does unless it is told."""
    return _timed(width)


BASELINES = {"Stoker": stoker, "torch's default": torch_alone}
