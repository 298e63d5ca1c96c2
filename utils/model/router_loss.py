"""The load-balancing loss of experts, in parts that add up to that of a whole global batch.

transformers computes it of a micro-batch: E * sum over experts e of f_e * p_e, f_e being the
assignments to e per token and p_e the mean router probability of e, over the tokens of all layers
(Switch Transformer, arXiv 2101.03961, equations 4 to 6). That is no mean over tokens: micro-batches
do not add up to their global batch. With the assignments of the whole global batch, which have no
gradient, the rest is a sum over tokens, and any layout gives the same value and gradient.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_outputs import ModelOutput

from utils.config.errors import ConfigurationError
from utils.model.architecture import EXPERTS_PER_TOKEN, causal_lm_class, first_set, has_experts

COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
SWITCH = "output_router_logits"  # transformers' setting, and its argument of forward


@dataclass(frozen=True)
class RouterTerm:
    """How much of it is added to the loss, and how many experts a token is assigned to."""

    coefficient: float
    experts_per_token: int


@dataclass
class LossOutput(ModelOutput):
    """A loss, and with a router's term what a micro-batch has of it, each (experts,) float32.

    `assignments` of its tokens, over all layers, and their summed `probabilities`. Padding is left
    out. `layers` is how many layers route.
    """

    loss: torch.Tensor | None = None
    assignments: torch.Tensor | None = None
    probabilities: torch.Tensor | None = None
    layers: torch.Tensor | None = None


def router_term(
    config: PretrainedConfig, *, fine_tuning: bool, given: float | None = None
) -> RouterTerm | None:
    """Return the term that training adds; None: none.

    Fine-tuning adds it wherever the architecture has a coefficient, as TRL does; `given` stands for
    that one. Pretraining adds it where the configuration says output_router_logits. Raises
    ConfigurationError where a coefficient is given to a model that has no such term.
    """
    text: Any = config.get_text_config()
    own = next((getattr(text, name) for name in COEFFICIENTS if hasattr(text, name)), None)
    # Llama 4 has the settings alone: transformers adds no term to its loss.
    computed = hasattr(sys.modules[causal_lm_class(config).__module__], "load_balancing_loss_func")
    if own is None or not has_experts(config) or not computed:
        if given:
            raise ConfigurationError(
                f"--router_aux_loss_coef {given}: {config.model_type} has no load-balancing loss "
                "(it has no experts, or balances them by itself): leave the setting out."
            )
        return None
    coefficient = own if given is None else given
    if not coefficient or not (fine_tuning or getattr(text, SWITCH)):
        return None
    return RouterTerm(coefficient, first_set(text, EXPERTS_PER_TOKEN))


def describe_term(term: RouterTerm | None, accumulation: int) -> str:
    """Return a line for the user about a model with experts."""
    if term is None:
        return "no load-balancing loss (a configuration asks for it by output_router_logits)"
    line = f"load-balancing loss of each global batch, times {term.coefficient:g}, as aux_loss"
    if accumulation > 1:
        line += (
            f"; an extra forward pass counts the assignments of a step's {accumulation} "
            "micro-batches first: a larger per_device_train_batch_size needs none"
        )
    return line


def balance_loss(
    assignments: torch.Tensor, probabilities: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Return the part of the load-balancing loss that these probabilities are of, shape ().

    assignments (experts,) of the global batch, probabilities (experts,) of a part of it; rows:
    tokens of the global batch times layers that route. The parts' sum is the global batch's loss.
    """
    return len(assignments) * (assignments * probabilities).sum() / rows.clamp(min=1).square()


def count_routed(
    router_logits: tuple[torch.Tensor, ...], sequence_tokens: torch.Tensor, term: RouterTerm
) -> LossOutput:
    """Add up what a micro-batch has of the term, over layers.

    router_logits: of each layer, (B * T, experts) or (B, T, experts). sequence_tokens (B,): how
    many tokens of each row come before its padding.
    """
    experts = router_logits[0].shape[-1]
    length = router_logits[0].numel() // experts // len(sequence_tokens)
    real = (
        (torch.arange(length, device=sequence_tokens.device) < sequence_tokens[:, None])
        .flatten()
        .float()
    )
    assignments = torch.zeros(experts, dtype=torch.float32, device=real.device)
    probabilities = torch.zeros_like(assignments)
    for logits in router_logits:
        shares = torch.softmax(logits.reshape(-1, experts), dim=-1, dtype=torch.float32)
        chosen = shares.detach().topk(term.experts_per_token, dim=-1).indices.flatten()
        assignments = assignments + torch.zeros_like(assignments).scatter_add_(
            0, chosen, real.repeat_interleave(term.experts_per_token)
        )
        probabilities = probabilities + (shares * real[:, None]).sum(dim=0)
    layers = torch.full((), len(router_logits), device=real.device)
    return LossOutput(assignments=assignments, probabilities=probabilities, layers=layers)
