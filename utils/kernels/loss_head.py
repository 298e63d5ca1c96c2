"""The choice of the loss head, made and proved before any weight loads."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from utils.config.errors import ConfigurationError
from utils.kernels.fused_head import fuse_loss_head
from utils.kernels.linear_cross_entropy import IGNORED
from utils.kernels.probe_model import MISFITS, VOCABULARY, build_probe_model, probe_config
from utils.kernels.router_loss import (
    COEFFICIENTS,
    SWITCH,
    RouterTerm,
    balance_loss,
    split_router_term,
)

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
    rows = {} if apart is None else {"row_tokens": torch.full((len(tokens),), tokens.shape[1])}
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
