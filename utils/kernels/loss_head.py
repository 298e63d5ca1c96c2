"""The choice of the loss head, made and proved before any weight loads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from utils.config.errors import ConfigurationError
from utils.kernels.fused_head import fuse_loss_head
from utils.kernels.linear_cross_entropy import IGNORED
from utils.kernels.probe_model import VOCABULARY, build_probe_model, probe_config

# Of the proof's tokens; their logits spread this far, for soft caps and factors to show.
SHAPE = (3, 17)
SPREAD = 10.0
TOLERANCE = 1e-5


@dataclass(frozen=True)
class LossHeadChoice:
    """`name` is "fused" or "logits", `reason` a line for the user."""

    name: str
    reason: str


def choose_loss_head(
    requested: str, model_config: PretrainedConfig, adapted_modules: Sequence[str] = ()
) -> LossHeadChoice:
    """Choose how the loss is computed; that the fused head computes the same is proved here.

    requested: "auto", "fused" or "logits". adapted_modules: names of modules that LoRA changes or
    trains whole. Loss and gradients of both heads must agree to rounding on a small random model of
    the architecture, in float32 on the CPU. Raises ConfigurationError when "fused" is asked for
    and does not do.
    """
    if requested == "logits":
        return LossHeadChoice("logits", "logits: as requested; those of all tokens are in memory")
    problem = _problem(model_config, adapted_modules)
    if problem is None:
        reason = "last layer and cross-entropy in one, some tokens at a time; proved equal"
        return LossHeadChoice("fused", f"{requested}: fused, {reason}")
    if requested == "fused":
        raise ConfigurationError(f"--loss_head fused: {problem}; use auto")
    return LossHeadChoice("logits", f"auto: logits of all tokens in memory, for {problem}")


def _problem(model_config: PretrainedConfig, adapted_modules: Sequence[str]) -> str | None:
    """Return why the fused head cannot train this model; None: it can."""
    if getattr(model_config.get_text_config(), "output_router_logits", False):
        return "its loss has a term for its router"
    model = build_probe_model(probe_config(model_config), "eager")
    name, head = type(model).__name__, model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"{name} has no linear last layer"
    names = [module for module, found in model.named_modules() if found is head]
    adapted = [own.rpartition(".")[2] for own in names]
    if set(adapted) & {own.rpartition(".")[2] for own in adapted_modules}:
        return f"LoRA adapts the last layer ({adapted[0]})"
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(0)
        worst = _difference(model, head)
    if worst < TOLERANCE:
        return None
    return (
        f"{name}'s loss is not the cross-entropy of its last layer alone (they differ by "
        f"{worst:.1e})"
    )


def _difference(model: PreTrainedModel, head: nn.Linear) -> float:
    """Return by how much loss or a gradient differs at most, relative to the largest of its own."""
    tokens = torch.randint(1, VOCABULARY, SHAPE)
    labels = tokens.clone()
    labels[:, 5:8] = IGNORED
    with torch.no_grad():
        head.weight *= SPREAD / model(input_ids=tokens, use_cache=False).logits.std()
    expected = _loss_and_gradients(model, tokens, labels)
    fuse_loss_head(model)
    actual = _loss_and_gradients(model, tokens, labels)
    worst = 0.0
    for name, value in expected.items():
        error = (actual[name] - value).abs().max() / value.abs().max().clamp(min=1e-30)
        worst = max(worst, error.item())
    return worst


def _loss_and_gradients(
    model: PreTrainedModel, tokens: torch.Tensor, labels: torch.Tensor
) -> Mapping[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
    loss.backward()
    gradients = {
        name: torch.zeros(()) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
    return {"loss": loss.detach(), **gradients}
