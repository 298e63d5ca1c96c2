"""The load-balancing loss of experts, in parts that add up to that of a whole global batch.

transformers computes it of a micro-batch: E * sum over experts e of f_e * p_e, f_e being the
assignments to e per token and p_e the mean router probability of e, over the tokens of all layers
(Switch Transformer, arXiv 2101.03961, equations 4 to 6). That is no mean over tokens: micro-batches
do not add up to their global batch. With the assignments of the whole global batch, which have no
gradient, the rest is a sum over tokens, and any layout gives the same value and gradient.
"""

import functools
import sys
import types
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from utils.config.errors import ConfigurationError
from utils.model.architecture import EXPERTS_PER_TOKEN, body_of, causal_lm_class, has_experts

COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
SWITCH = "output_router_logits"  # transformers' setting, and its argument of forward


@dataclass(frozen=True)
class RouterTerm:
    """How much of it is added to the loss, and how many experts a token is assigned to."""

    coefficient: float
    experts_per_token: int


@dataclass
class RoutedOutput(ModelOutput):
    """A loss without the term, and what a micro-batch has of it, each (experts,) float32.

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
    model_class = causal_lm_class(config)
    if own is None or not has_experts(config) or not _adds_term(model_class):
        if given:
            raise ConfigurationError(
                f"--router_aux_loss_coef {given}: {config.model_type} has no load-balancing loss "
                "(it has no experts, or balances them by itself): leave the setting out."
            )
        return None
    coefficient = own if given is None else given
    if not coefficient or not (fine_tuning or getattr(text, SWITCH)):
        return None
    names = (name for name in EXPERTS_PER_TOKEN if isinstance(getattr(text, name, None), int))
    return RouterTerm(coefficient, getattr(text, next(names)))


def _adds_term(model_class: type[PreTrainedModel]) -> bool:
    """Say whether transformers' loss of this model has the term; Llama 4 has the settings alone."""
    module = sys.modules[model_class.__module__]
    return hasattr(module, "load_balancing_loss_func")


def describe_term(term: RouterTerm | None, accumulation: int) -> str:
    """Return a line for the user about a model with experts."""
    if term is None:
        return "no load-balancing loss (a configuration asks for it by output_router_logits)"
    counted = (
        f"; the experts' assignments of a step's {accumulation} micro-batches are counted first, "
        "which takes a forward pass more: a larger per_device_train_batch_size needs none"
    )
    return (
        f"load-balancing loss of each global batch, times {term.coefficient:g}, logged as aux_loss"
        f"{counted if accumulation > 1 else ''}"
    )


def balance_loss(
    assignments: torch.Tensor, probabilities: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Return the part of the load-balancing loss that these probabilities are of, shape ().

    assignments (experts,) of the global batch, probabilities (experts,) of a part of it; rows:
    tokens of the global batch times layers that route. The parts' sum is the global batch's loss.
    """
    return len(assignments) * (assignments * probabilities).sum() / rows.clamp(min=1).square()


def route(
    model: PreTrainedModel,
    term: RouterTerm,
    sequence_tokens: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, RoutedOutput]:
    """Run the model without its head; return its output and what it has of the term.

    sequence_tokens (B,): how many tokens of each row come before its padding.
    """
    outputs: Any = body_of(model)(*args, **kwargs, output_router_logits=True)
    return outputs, _statistics(outputs.router_logits, sequence_tokens, term)


def _statistics(
    router_logits: tuple[torch.Tensor, ...], sequence_tokens: torch.Tensor, term: RouterTerm
) -> RoutedOutput:
    """Add up each layer's logits, (B * T, experts) or (B, T, experts)."""
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
    return RoutedOutput(assignments=assignments, probabilities=probabilities, layers=layers)


def split_router_term(model: PreTrainedModel, term: RouterTerm | None) -> None:
    """Let `model(labels=..., sequence_tokens=...)` return its loss and its part of the term apart.

    Without sequence_tokens the loss is without the term, whatever the configuration says; with
    `count_only` the head is left out.
    """
    original = model.forward

    @functools.wraps(original)
    def forward(
        self: Any,
        *args: Any,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        sequence_tokens: torch.Tensor | None = None,
        count_only: bool = False,
        **kwargs: Any,
    ) -> Any:
        if labels is None:
            return original(*args, **kwargs)
        loss_options = {"num_items_in_batch": num_items_in_batch}
        if sequence_tokens is None or term is None:
            return original(*args, labels=labels, **loss_options, **kwargs, **{SWITCH: False})
        if count_only:
            return route(self, term, sequence_tokens, *args, **kwargs)[1]
        made = original(*args, **kwargs, **{SWITCH: True})
        routed = _statistics(made.router_logits, sequence_tokens, term)
        vocabulary = made.logits.shape[-1]
        routed.loss = self.loss_function(made.logits, labels, vocabulary, **loss_options)
        return routed

    model.forward = types.MethodType(forward, model)
