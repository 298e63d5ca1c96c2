"""Lets transformers' causal language models compute their loss without making all logits."""

import copy
import functools
import math
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from utils.config.errors import ConfigurationError
from utils.kernels.linear_cross_entropy import IGNORED, LogitTerms, linear_cross_entropy
from utils.model.architecture import MISFITS, VOCABULARY, body_of, build_probe_model, probe_config
from utils.model.router_loss import (
    COEFFICIENTS,
    SWITCH,
    LossOutput,
    RouterTerm,
    balance_loss,
    count_routed,
)

# Architectures multiply (or divide) their logits under these names; a proof at the start of each
# run finds those that do something else.
FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
DIVISOR = "logits_scaling"
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

    def install(self, model: PreTrainedModel, compiled: bool = False) -> None:
        """Let `model(labels=...)` compute its loss so; before PEFT wraps it.

        Fused, it does so a few tokens at a time, `compiled` on a GPU, and returns no logits; with
        `loss_positions=find_loss_positions(labels)` no GPU has to be waited for. With
        `sequence_tokens` (how many tokens of each row come before its padding) the router's part of
        the loss comes apart; `count_only` leaves out the rest. Without them there is no such term,
        whatever the configuration says; without labels nothing changes.
        """
        fused, router, original = self.name == "fused", self.router, model.forward
        has_term = hasattr(model.config.get_text_config(), SWITCH)
        if fused:
            _fuse_head(model, compiled)
        elif not has_term:
            return

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
            items = {"num_items_in_batch": num_items_in_batch}
            routed = router is not None and sequence_tokens is not None
            if has_term:
                kwargs[SWITCH] = routed
            if not fused and not routed:
                return original(*args, labels=labels, **items, **kwargs)
            run = body_of(self) if fused or count_only else original
            outputs, made = run(*args, **kwargs), LossOutput()
            if router is not None and sequence_tokens is not None:
                made = count_routed(outputs.router_logits, sequence_tokens, router)
            if count_only:
                return made
            if not fused:
                logits = outputs.logits
                made.loss = self.loss_function(logits, labels, logits.shape[-1], **items)
                return made
            total, targets = _summed_loss(self, outputs.last_hidden_state, labels, loss_positions)
            made.loss = total / (targets if num_items_in_batch is None else num_items_in_batch)
            return made

        model.forward = types.MethodType(forward, model)


def _fuse_head(model: PreTrainedModel, compiled: bool) -> None:
    """Let the last layer return the summed loss of `targets`.

    Its weight is read in its own forward, for there FSDP2 and ZeRO-3 have gathered it.
    """
    terms, head = _logit_terms(model.config.get_text_config()), model.get_output_embeddings()

    def head_forward(
        self: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor | None = None
    ) -> torch.Tensor:
        if targets is None:
            return functional.linear(hidden, self.weight, self.bias)
        return linear_cross_entropy(
            hidden, self.weight, targets, bias=self.bias, terms=terms, compiled=compiled
        )

    layer: Any = head
    layer.forward = types.MethodType(head_forward, head)
    unlike_its_own: Any = model
    unlike_its_own.accepts_loss_kwargs = True  # Gemma 4's class says that it takes none


def _summed_loss(
    model: PreTrainedModel,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    positions: torch.Tensor | None,
) -> tuple[torch.Tensor, int]:
    """Return the loss of hidden states (B, T, width), summed, and how many tokens it is of."""
    if positions is None:
        positions = find_loss_positions(labels)
    selected = hidden.flatten(0, 1).index_select(0, positions)
    targets = _following(labels).index_select(0, positions)
    head: Any = model.get_output_embeddings()
    return head(selected, targets=targets), len(targets)


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
    scale = math.prod(factor for factor in factors if factor is not None)
    scale /= getattr(text_config, DIVISOR, None) or 1
    return LogitTerms(scale, getattr(text_config, "final_logit_softcapping", None))


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
    name = type(model).__name__
    if type(model.get_output_embeddings()) is not nn.Linear:
        return f"{name} has no linear last layer"
    if adapted:
        return "LoRA trains the last layer, too"
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(0)
        try:
            worst = _difference(model, router)
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


def _difference(model: PreTrainedModel, router: RouterTerm | None) -> float:
    """Return by how much loss or a gradient differs at most, relative to the largest of its own."""
    tokens = torch.randint(1, VOCABULARY, SHAPE)
    head: Any = model.get_output_embeddings()
    with torch.no_grad():
        head.weight *= SPREAD / model(input_ids=tokens, use_cache=False).logits.std()
    expected = _loss_and_gradients(model, tokens, None)
    LossHeadChoice("fused", "", router).install(model)
    actual = _loss_and_gradients(model, tokens, router)
    return max(
        ((actual[name] - value).abs().max() / value.abs().max().clamp(min=1e-30)).item()
        for name, value in expected.items()
    )


def _loss_and_gradients(
    model: PreTrainedModel, tokens: torch.Tensor, apart: RouterTerm | None
) -> dict[str, torch.Tensor]:
    """Return the loss, with a term that comes apart, and its gradients by parameter."""
    model.zero_grad(set_to_none=True)
    labels = tokens.clone()
    labels[:, 5:8] = IGNORED
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
