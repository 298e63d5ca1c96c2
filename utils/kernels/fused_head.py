"""Lets transformers' causal language models compute their loss without making all logits."""

import functools
import types
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from utils.kernels.linear_cross_entropy import IGNORED, LogitTerms, linear_cross_entropy
from utils.kernels.probe_model import body_of
from utils.kernels.router_loss import SWITCH, RouterTerm, route

# Architectures multiply (or divide) their logits under these names; a proof at the start of each
# run (utils/kernels/loss_head.py) finds those that do something else.
FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
DIVISORS = ("logits_scaling",)


def fuse_loss_head(
    model: PreTrainedModel, compiled: bool = False, router: RouterTerm | None = None
) -> None:
    """Let `model(labels=...)` compute its loss a few tokens at a time, `compiled` on a GPU.

    The output then has a loss and no logits; without labels nothing changes. With
    `loss_positions=find_loss_positions(labels)` no GPU has to be waited for. The head's weight is
    read in the head's own forward, for there FSDP2 and ZeRO-3 have gathered it. The term of a
    `router` comes apart from the loss, as `split_router_term` has it.
    """
    text_config = model.config.get_text_config()
    original, terms = model.forward, _logit_terms(text_config)
    without_term = {SWITCH: False} if hasattr(text_config, SWITCH) else {}
    head: Any = model.get_output_embeddings()

    def head_forward(
        self: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor | None = None
    ) -> torch.Tensor:
        if targets is None:
            return functional.linear(hidden, self.weight, self.bias)
        return linear_cross_entropy(
            hidden, self.weight, targets, bias=self.bias, terms=terms, compiled=compiled
        )

    @functools.wraps(original)
    def forward(
        self: Any,
        *args: Any,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        loss_positions: torch.Tensor | None = None,
        row_tokens: torch.Tensor | None = None,
        count_only: bool = False,
        **kwargs: Any,
    ) -> Any:
        if labels is None:
            return original(*args, **kwargs)
        made: Any = CausalLMOutput()
        if router is not None and row_tokens is not None:
            outputs, made = route(self, router, row_tokens, *args, **kwargs)
            if count_only:
                return made
        else:
            outputs = body_of(self)(*args, **kwargs, **without_term)
        hidden = outputs.last_hidden_state.flatten(0, 1)
        if loss_positions is None:
            loss_positions = find_loss_positions(labels)
        bears_loss = hidden.index_select(0, loss_positions)
        targets = _following(labels).index_select(0, loss_positions)
        total = self.get_output_embeddings()(bears_loss, targets=targets)
        items = len(targets) if num_items_in_batch is None else num_items_in_batch
        made.loss = total / items
        return made

    head.forward = types.MethodType(head_forward, head)
    model.forward = types.MethodType(forward, model)
    unlike_its_own: Any = model
    unlike_its_own.accepts_loss_kwargs = True  # Gemma 4's class says that it takes none


def find_loss_positions(labels: torch.Tensor) -> torch.Tensor:
    """Return which of the flattened (B * T) tokens predict one that bears loss, int64 (N,).

    labels (B, T) unshifted. On the CPU this waits for no device; N differs between micro-batches.
    """
    return _following(labels).ne(IGNORED).nonzero().squeeze(-1)


def _following(labels: torch.Tensor) -> torch.Tensor:
    """Return what follows each token in its row, flattened (B * T,)."""
    return functional.pad(labels, (0, 1), value=IGNORED)[:, 1:].flatten()


def _logit_terms(text_config: PretrainedConfig) -> LogitTerms:
    factors = [getattr(text_config, name, None) for name in FACTORS]
    divisors = [getattr(text_config, name, None) for name in DIVISORS]
    scale = 1.0
    for factor in factors:
        scale *= 1.0 if factor is None else factor
    for divisor in divisors:
        scale /= 1.0 if divisor is None else divisor
    return LogitTerms(scale, getattr(text_config, "final_logit_softcapping", None))
