"""Last layer and cross-entropy, forward and backward, as large as in training on a GPU."""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from benchmarks.hardware.device import device
from benchmarks.recording.job import CannotRunError

TITLE = "Loss head, 8,192 tokens of width 2,048, bf16, forward and backward, by vocabulary size"
UNIT = "tokens"
SIZES = (128_256, 151_936)  # Llama 3's and Qwen3's vocabularies
TOKENS, WIDTH = 8192, 2048

# hidden (N, H), weight (V, H), both bf16, targets (N,) to the mean loss.
LossOf = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def stoker(compiled: bool) -> LossOf:
    """Compute it some tokens at a time, gradients in the forward pass; compiled by --compile."""
    from utils.kernels.linear_cross_entropy import linear_cross_entropy

    return lambda hidden, weight, targets: (
        linear_cross_entropy(hidden, weight, targets, compiled=compiled)[0] / len(targets)
    )


def all_logits() -> LossOf:
    """Compute it as transformers' ForCausalLMLoss does: logits of all tokens, in float32."""
    return lambda hidden, weight, targets: functional.cross_entropy(
        functional.linear(hidden, weight).float(), targets
    )


def trl() -> LossOf:
    """Compute it as SFTTrainer does."""
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as CHUNK
    from trl.trainer.utils import _ChunkedLogProbFunction as Chunked

    return lambda hidden, weight, targets: (
        -Chunked.apply(
            hidden, weight, None, targets, 1.0, CHUNK, None, 1.0, ("log_probs",)
        )[0].mean()
    )  # fmt: skip


def liger() -> LossOf:
    """Compute it by Liger's Triton kernel."""
    _require("liger_kernel")
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss_of = LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight, targets: loss_of(weight, hidden, targets)


def cut_cross_entropy(filter_eps: str | None) -> LossOf:
    """Compute it by Apple's kernel; `filter_eps` None: without leaving small gradients out."""
    _require("cut_cross_entropy")
    from cut_cross_entropy import linear_cross_entropy

    return partial(linear_cross_entropy, filter_eps=filter_eps)


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise CannotRunError(f"{package} is not installed")
    if device() == "cpu":
        raise CannotRunError(f"{package} needs a GPU")


LOSSES: dict[str, Callable[[], LossOf]] = {
    "Stoker": partial(stoker, False),
    "Stoker, compiled": partial(stoker, True),
    "all logits": all_logits,
    "TRL's chunked head": trl,
    "Liger": liger,
    "cut-cross-entropy": partial(cut_cross_entropy, "high"),
    "cut-cross-entropy, exact": partial(cut_cross_entropy, None),
}


def make_inputs(tokens: int, width: int, vocabulary: int) -> list[torch.Tensor]:
    """Return hidden states, weight and targets."""
    where: dict[str, Any] = {
        "generator": torch.Generator(device()).manual_seed(0),
        "device": device(),
    }
    hidden = torch.randn(tokens, width, **where)
    weight = torch.randn(vocabulary, width, **where) * 0.02
    trained = [one.bfloat16().requires_grad_() for one in (hidden, weight)]
    return [*trained, torch.randint(vocabulary, (tokens,), **where)]


def _prepare(name: str, vocabulary: int) -> tuple[Callable[[], object], int]:
    loss_of = LOSSES[name]()
    # Toys have few words, and few tokens then.
    tokens, width = (TOKENS, WIDTH) if vocabulary >= min(SIZES) else (vocabulary, 64)
    hidden, weight, targets = make_inputs(tokens, width, vocabulary)

    def call() -> None:
        hidden.grad = weight.grad = None
        loss_of(hidden, weight, targets).backward()

    return call, tokens


BASELINES = {name: partial(_prepare, name) for name in LOSSES}
