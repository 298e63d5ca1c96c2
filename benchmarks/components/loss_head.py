"""Last layer and cross-entropy, forward and backward, over vocabularies of two sizes."""

from collections.abc import Callable

import torch
from torch.nn import functional

TITLE = "Loss head, 2,048 tokens of width 384, bf16 (fp32 weights), forward and backward"
UNIT = "tokens"
SIZES = (32_000, 152_000)
TOKENS, WIDTH = 2048, 384


def _timed(
    vocabulary: int, loss_of: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
) -> tuple[Callable[[], object], int]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=random).to(device).requires_grad_()
    weight = (torch.randn(vocabulary, WIDTH, generator=random) * 0.02).to(device).requires_grad_()
    targets = torch.randint(vocabulary, (TOKENS,), generator=random).to(device)

    def call() -> None:
        hidden.grad = weight.grad = None
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(hidden, weight, targets)
        loss.backward()

    return call, TOKENS


def stoker(vocabulary: int) -> tuple[Callable[[], object], int]:
    """Compute it some tokens at a time, gradients in the forward pass."""
    from utils.kernels.linear_cross_entropy import linear_cross_entropy

    return _timed(vocabulary, lambda hidden, weight, targets: (
        linear_cross_entropy(hidden, weight, targets)[0] / TOKENS
    ))  # fmt: skip


def all_logits(vocabulary: int) -> tuple[Callable[[], object], int]:
    """Compute it as transformers' ForCausalLMLoss does: logits of all tokens, in float32."""
    return _timed(vocabulary, lambda hidden, weight, targets: (
        functional.cross_entropy(functional.linear(hidden, weight).float(), targets)
    ))  # fmt: skip


def trl(vocabulary: int) -> tuple[Callable[[], object], int]:
    """Compute it as SFTTrainer does."""
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as CHUNK
    from trl.trainer.utils import _ChunkedLogProbFunction as Chunked

    return _timed(vocabulary, lambda hidden, weight, targets: (
        -Chunked.apply(
            hidden, weight, None, targets, 1.0, CHUNK, None, 1.0, ("log_probs",)
        )[0].mean()
    ))  # fmt: skip


BASELINES = {"Stoker": stoker, "all logits": all_logits, "TRL's chunked head": trl}
