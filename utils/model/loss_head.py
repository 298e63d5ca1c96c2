"""Lets transformers' causal language models compute their loss without making all logits."""

import copy
import functools
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from utils.config.errors import ConfigurationError
from utils.kernels.linear_cross_entropy import IGNORED, LogitTerms, linear_cross_entropy
from utils.model.architecture import MISFITS, VOCABULARY, body_of, build_probe_model, probe_config
from utils.model.router_loss import (
    COEFFICIENTS,
    SWITCH,
    RouterTerm,
    balance_loss,
    route,
    split_router_term,
)

# Architectures multiply (or divide) their logits under these names; a proof at the start of each
# run (utils/model/loss_head.py) finds those that do something else.
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
        sequence_tokens: torch.Tensor | None = None,
        count_only: bool = False,
        **kwargs: Any,
    ) -> Any:
        if labels is None:
            return original(*args, **kwargs)
        made: Any = CausalLMOutput()
        if router is not None and sequence_tokens is not None:
            outputs, made = route(self, router, sequence_tokens, *args, **kwargs)
            if count_only:
                return made
        else:
            outputs = body_of(self)(*args, **kwargs, **without_term)
        hidden = outputs.last_hidden_state.flatten(0, 1)
        if loss_positions is None:
            loss_positions = find_loss_positions(labels)
        selected = hidden.index_select(0, loss_positions)
        targets = _following(labels).index_select(0, loss_positions)
        total = self.get_output_embeddings()(selected, targets=targets)
        items = len(targets) if num_items_in_batch is None else num_items_in_batch
        made.loss = total / items
        return made

    head.forward = types.MethodType(head_forward, head)
    model.forward = types.MethodType(forward, model)
    unlike_its_own: Any = model
    unlike_its_own.accepts_loss_kwargs = True  # Gemma 4's class says that it takes none


def find_loss_positions(labels: torch.Tensor) -> torch.Tensor:
    """Return which of the flattened (B * T) tokens predict one that is trained on, int64 (N,).

    labels (B, T) unshifted. On the CPU this waits for no device; N differs between micro-batches.
    """
    return _following(labels).ne(IGNORED).nonzero().squeeze(-1)


def _following(labels: torch.Tensor) -> torch.Tensor:
    """Return what follows each token in its row, flattened (B * T,)."""
    return functional.pad(labels, (0, 1), value=IGNORED)[:, 1:].flatten()


def _logit_terms(text_config: PretrainedConfig) -> LogitTerms:
    factors = [getattr(text_config, name, None) for name in FACTORS]
    divisors = [getattr(text_config, name, None) for name in DIVISORS]
    scale = math.prod(factor for factor in factors if factor is not None)
    scale /= math.prod(divisor for divisor in divisors if divisor is not None)
    return LogitTerms(scale, getattr(text_config, "final_logit_softcapping", None))


# Of the proof's tokens; their logits spread this far, for soft caps and factors to show.
SHAPE = (3, 17)
SPREAD = 10.0
TOLERANCE = 1e-5


@dataclass(frozen=True)
class LossHeadChoice:
    """`name` is "fused" or "logits", `reason` a line for the user; the experts' term apart."""

    name: str
    reason: str
    router: RouterTerm | None = None

    def install(self, model: PreTrainedModel, compiled: bool) -> None:
        """Let the model compute its loss so; before PEFT wraps it."""
        if self.name == "fused":
            fuse_loss_head(model, compiled, self.router)
        elif hasattr(model.config.get_text_config(), SWITCH):
            split_router_term(model, self.router)


def choose_loss_head(
    requested: str,
    model_config: PretrainedConfig,
    adapted: bool = False,
    router: RouterTerm | None = None,
) -> LossHeadChoice:
    """Choose how the loss is computed; that the fused head computes the same is proved here.

    requested: "auto", "fused" or "logits". adapted: whether LoRA trains the last layer beside its
    adapters. router: the term of its experts. Loss and gradients of both heads must agree to
    rounding on a small random model of the architecture, in float32 on the CPU. Raises
    ConfigurationError when "fused" is asked for and does not do.
    """
    if requested == "logits":
        reason = "logits: as requested; those of all tokens are in memory"
        return LossHeadChoice("logits", reason, router)
    problem = _problem(model_config, adapted, router)
    if problem is None:
        reason = "last layer and cross-entropy in one, some tokens at a time; proved equal"
        return LossHeadChoice("fused", f"{requested}: fused, {reason}", router)
    if requested == "fused":
        raise ConfigurationError(f"--loss_head fused: {problem}; use auto")
    return LossHeadChoice("logits", f"auto: logits of all tokens in memory, for {problem}", router)


def _problem(
    model_config: PretrainedConfig, adapted: bool, router: RouterTerm | None
) -> str | None:
    """Return why the fused head cannot train this model; None: it can."""
    model = build_probe_model(_with_term(probe_config(model_config), router), "eager")
    name, head = type(model).__name__, model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"{name} has no linear last layer"
    if adapted:
        return "LoRA trains the last layer, too"
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(0)
        try:
            worst = _difference(model, head, router)
        except MISFITS as error:
            return f"{name} does not run without its last layer ({type(error).__name__}: {error})"
    if worst < TOLERANCE:
        return None
    return (
        f"{name}'s loss is not the cross-entropy of its last layer alone (they differ by "
        f"{worst:.1e})"
    )


def _with_term(config: PretrainedConfig, router: RouterTerm | None) -> PretrainedConfig:
    """Return the config of a model whose own loss has the term just if training adds it."""
    config = copy.deepcopy(config)
    text: Any = config.get_text_config()
    if hasattr(text, SWITCH):
        setattr(text, SWITCH, router is not None)
    for name in COEFFICIENTS:
        if router is not None and hasattr(text, name):
            setattr(text, name, router.coefficient)
    return config


def _difference(model: PreTrainedModel, head: nn.Linear, router: RouterTerm | None) -> float:
    """Return by how much loss or a gradient differs at most, relative to the largest of its own."""
    tokens = torch.randint(1, VOCABULARY, SHAPE)
    labels = tokens.clone()
    labels[:, 5:8] = IGNORED
    with torch.no_grad():
        head.weight *= SPREAD / model(input_ids=tokens, use_cache=False).logits.std()
    expected = _loss_and_gradients(model, tokens, labels, None)
    fuse_loss_head(model, router=router)
    actual = _loss_and_gradients(model, tokens, labels, router)
    worst = 0.0
    for name, value in expected.items():
        error = (actual[name] - value).abs().max() / value.abs().max().clamp(min=1e-30)
        worst = max(worst, error.item())
    return worst


def _loss_and_gradients(
    model: PreTrainedModel, tokens: torch.Tensor, labels: torch.Tensor, apart: RouterTerm | None
) -> Mapping[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    rows = {} if apart is None else {"sequence_tokens": torch.full((len(tokens),), tokens.shape[1])}
    made = model(input_ids=tokens, labels=labels, use_cache=False, **rows)
    loss = made.loss
    if apart is not None:
        everything = made.layers * tokens.numel()
        term = balance_loss(made.assignments, made.probabilities, everything)
        loss = loss + apart.coefficient * term
    loss.backward()
    gradients = {
        name: torch.zeros(()) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
    return {"loss": loss.detach(), **gradients}
