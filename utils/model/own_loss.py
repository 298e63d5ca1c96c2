"""A training loss of the user's own (`--loss`), on the tokens that have a loss.

The function gets logits (N, vocabulary) in float32, the targets (N,), and the position of each
target in its document (N,), over all packed documents of a micro-batch. It returns the sum over the
N tokens. The run divides the sum by the loss tokens of the global batch. Evaluations keep
cross-entropy.
"""

import functools
import types
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from utils.config.errors import ConfigurationError
from utils.config.own_code import load_own
from utils.model.loss_head import LossOutput, find_loss_positions, next_labels

TOKENS, VOCABULARY = 7, 11  # of the check


def check_own_loss(entry: str) -> None:
    """Raise ConfigurationError unless the function returns a sum over tokens with a gradient."""
    function, generator = load_own(entry), torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, VOCABULARY, generator=generator).requires_grad_()
    targets, places = torch.arange(TOKENS), torch.arange(1, TOKENS + 1)
    parts = (slice(0, TOKENS), slice(0, 3), slice(3, TOKENS))
    try:
        whole, *halves = (function(logits[part], targets[part], places[part]) for part in parts)
        (gradient,) = torch.autograd.grad(whole, logits)
    except Exception as error:  # the user's function may raise anything
        raise ConfigurationError(f"--loss {entry}: {type(error).__name__}: {error}") from error
    same = whole.ndim == 0 and torch.allclose(whole, sum(halves), rtol=1e-4)
    if not same or not gradient.any():
        raise ConfigurationError(
            f"--loss {entry}: return a sum over tokens with a gradient, not a mean: the loss of 7 "
            "tokens is not the sum of the losses of 3 and of 4. The run divides by the loss tokens "
            "of the global batch."
        )


def install_own_loss(model: PreTrainedModel, entry: str) -> None:
    """Let model.forward compute the user's loss in training; call this before PEFT wraps it."""
    function, original = load_own(entry), model.forward

    @functools.wraps(original)
    def forward(
        self: Any, *args: Any, labels: torch.Tensor | None = None,
        num_items_in_batch: Any = None, loss_positions: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if labels is None:
            return original(*args, **kwargs)
        logits = original(*args, **kwargs).logits
        following = next_labels(labels) if shift_labels is None else shift_labels
        chosen = find_loss_positions(following) if loss_positions is None else loss_positions
        of_tokens = logits.flatten(0, 1).index_select(0, chosen).float()
        targets = following.flatten().index_select(0, chosen)
        if not self.training:
            total = cross_entropy(of_tokens, targets, reduction="sum")
            return LossOutput(loss=total / num_items_in_batch, hits=of_tokens.argmax(-1) == targets)
        if not len(chosen):  # a micro-batch of padding
            return LossOutput(loss=of_tokens.sum())
        positions = kwargs.get("position_ids")
        if positions is None:  # each sequence is one document
            positions = torch.arange(labels.shape[1], device=labels.device).expand_as(labels)
        # A target follows its prediction in the same document.
        places = positions.flatten().index_select(0, chosen) + 1
        return LossOutput(loss=function(of_tokens, targets, places) / num_items_in_batch)

    model.forward = types.MethodType(forward, model)
    unlike_its_own: Any = model
    unlike_its_own.accepts_loss_kwargs = True  # False in the classes of Qwen3.5 and Gemma 4
