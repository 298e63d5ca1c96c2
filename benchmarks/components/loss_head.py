"""Last layer and cross-entropy, forward and backward, over vocabularies of two sizes."""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.components.gpu_loss_head import LOSSES
from benchmarks.hardware.device import device

TITLE = (
    "Loss head, 2,048 tokens of width 384, bf16 (fp32 weights), forward and backward, by "
    "vocabulary size"
)
UNIT = "tokens"
SIZES = (32_000, 152_000)
TOKENS, WIDTH = 2048, 384


def _prepare(name: str, vocabulary: int) -> tuple[Callable[[], object], int]:
    loss_of = LOSSES[name]()
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=random).to(device()).requires_grad_()
    weight = torch.randn(vocabulary, WIDTH, generator=random).mul(0.02).to(device())
    weight.requires_grad_()
    targets = torch.randint(vocabulary, (TOKENS,), generator=random).to(device())

    def call() -> None:
        hidden.grad = weight.grad = None
        with torch.autocast(device(), torch.bfloat16):
            loss = loss_of(hidden, weight, targets)
        loss.backward()

    return call, TOKENS


BASELINES = {
    name: partial(_prepare, name) for name in ("Stoker", "all logits", "TRL's chunked head")
}
