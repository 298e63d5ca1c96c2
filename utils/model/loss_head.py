"""The loss of a model: cross-entropy of the LM head, load balancing of experts, or a user's loss.

The load-balancing loss of E experts is E * sum over experts e of f_e * p_e. f_e is the number of
assignments to e per token. p_e is the mean router probability of e. Both are means over the tokens
of all layers (Switch Transformer, arXiv 2101.03961, equations 4 to 6). If each micro-batch had its
own f_e, the loss of the global batch would depend on the sizes of the micro-batches. Therefore f_e
is first counted over the whole global batch, without a gradient. With f_e fixed, the loss is a sum
over tokens, and any division into micro-batches gives the same loss.

The function of `--loss` gets the N loss tokens of a micro-batch: logits (N, vocabulary) in float32,
target ids (N,), and the position of each target in its document (N,). It returns the sum of their
losses. The run divides this sum by the number of loss tokens of the global batch. Evaluations
always use cross-entropy.
"""

import functools
import math
import sys
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from utils.config.errors import ConfigurationError
from utils.config.own_code import load_own
from utils.kernels.linear_cross_entropy import IGNORED, LogitTerms, linear_cross_entropy
from utils.model.architecture import (
    EXPERTS_PER_TOKEN,
    MODEL_ERRORS,
    body_of,
    causal_lm_class,
    first_set_attribute,
    routers,
    without_weights,
)
from utils.model.probe import (
    CPU,
    VOCABULARY,
    ProbeError,
    build_probe_model,
    fork_random,
    probe_config,
    tolerance,
)

BALANCE_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
SWITCH = "output_router_logits"  # transformers' name of a setting and of an argument of forward
# Settings by which architectures scale their logits. `_fusion_problem` detects any others.
FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
DIVISOR = "logits_scaling"
SOFT_CAPS = ("final_logit_softcapping", "output_logit_soft_cap")
# The input with which `_fusion_problem` compares fused and plain loss: shape (batch, tokens) and
# standard deviation of its logits, which is large enough that soft caps and factors matter.
SHAPE = (3, 17)
SPREAD = 10.0
LOSS_TOLERANCE = 1e-5
RELEVANT = 1e-3  # relative errors are divided by at least this share of the largest gradient


@dataclass(frozen=True)
class RouterTerm:
    """The load-balancing loss: its factor in the total loss, and the experts used per token."""

    coefficient: float
    experts_per_token: int


@dataclass
class LossOutput(ModelOutput):
    """The loss of a micro-batch, and sums over its tokens by data source and by expert."""

    loss: torch.Tensor | None = None
    # Only the fused head sets by_source, the result of `_sums_by_source`. hits: whether each label
    # had the largest logit, for N loss tokens (N,) or for all tokens (B, T).
    by_source: torch.Tensor | None = None
    hits: torch.Tensor | None = None
    assignments: torch.Tensor | None = None  # tokens routed to each expert, (experts,) float32
    probabilities: torch.Tensor | None = None  # sum over tokens and layers, (experts,) float32
    layers: torch.Tensor | None = None  # number of layers with a router


@dataclass(frozen=True)
class LossHeadChoice:
    """The way to compute the loss: from all logits ("logits"), or chunk by chunk ("fused")."""

    name: str
    reason: str  # for the log
    router: RouterTerm | None = None

    def install(self, model: PreTrainedModel, compiled: bool = False) -> None:
        """Make model.forward compute the loss this way. Call this before PEFT wraps the model.

        compiled: compile the softmax on a GPU. The new model.forward accepts further arguments:
        loss_positions   result of `find_loss_positions`; without it, the host waits for the GPU
        shift_labels     (B, T), result of `next_labels`
        sequence_tokens  argument of `count_routed`; the output then has the sums of `count_routed`
        count_only       whether to compute only the sums of `count_routed`
        sources          bool (sources, B), the data source of each sequence
        """
        fused, router, original = self.name == "fused", self.router, model.forward
        has_term = hasattr(model.config.get_text_config(), SWITCH)
        if fused:
            _fuse_head(model, compiled)

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
            items: dict[str, Any] = {"num_items_in_batch": num_items_in_batch}
            sources, shift_labels = (kwargs.pop(name, None) for name in ("sources", "shift_labels"))
            term = None if sequence_tokens is None else router
            if has_term:
                kwargs[SWITCH] = term is not None
            if not fused and term is None and shift_labels is None:
                return original(*args, labels=labels, **items, **kwargs)
            following = next_labels(labels) if shift_labels is None else shift_labels
            run = body_of(self) if fused or count_only else original
            outputs, result = run(*args, **kwargs), LossOutput()
            if term is not None and sequence_tokens is not None:
                result = count_routed(outputs.router_logits, sequence_tokens, term)
            if count_only:
                return result
            if not fused:
                logits, size = outputs.logits, outputs.logits.shape[-1]
                items["shift_labels"] = following.contiguous()
                result.loss = self.loss_function(logits, labels, size, **items)
                result.hits = None if self.training else logits.argmax(-1) == following
                return result
            if loss_positions is None:
                loss_positions = find_loss_positions(following)
            hidden = outputs.last_hidden_state.flatten(0, 1).index_select(0, loss_positions)
            targets = following.flatten().index_select(0, loss_positions)
            total, losses, result.hits = self.get_output_embeddings()(hidden, targets=targets)
            count = len(losses) if num_items_in_batch is None else num_items_in_batch
            result.loss = total / count
            result.by_source = _sums_by_source(losses, loss_positions, sources, labels.shape[1])
            return result

        model.forward = types.MethodType(forward, model)


def _fuse_head(model: PreTrainedModel, compiled: bool) -> None:
    """Compute the loss in the LM head's forward, where FSDP2 and ZeRO-3 gather the weight."""
    terms, head = _logit_terms(model.config.get_text_config()), model.get_output_embeddings()

    def head_forward(
        self: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor | None = None
    ) -> Any:
        if targets is None:
            return functional.linear(hidden, self.weight, self.bias)
        return linear_cross_entropy(
            hidden, self.weight, targets, bias=self.bias, terms=terms, compiled=compiled
        )

    layer: Any = head
    layer.forward = types.MethodType(head_forward, head)
    vars(model)["accepts_loss_kwargs"] = True  # Gemma 4's class sets it to False


def _sums_by_source(
    losses: torch.Tensor, positions: torch.Tensor, sources: torch.Tensor | None, length: int
) -> torch.Tensor | None:
    """Return loss sums and counts of loss tokens, float64 (2, sources); None without `sources`."""
    if sources is None:
        return None
    own = sources.index_select(1, positions // length)
    # Masked sums, because index_add on a GPU adds in a different order each time.
    return torch.stack((torch.where(own, losses.double(), 0.0), own.double())).sum(dim=2)


def find_loss_positions(following: torch.Tensor) -> torch.Tensor:
    """Return the flattened (B * T) indices of tokens that predict a token with a loss, int64 (N,).

    `following` is the result of `next_labels`. If it is on a GPU, the host waits for the GPU.
    """
    return following.flatten().ne(IGNORED).nonzero().squeeze(-1)


def next_labels(labels: torch.Tensor) -> torch.Tensor:
    """Return the label that follows each token in its sequence, (B, T)."""
    return functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def _logit_terms(text_config: PretrainedConfig) -> LogitTerms:
    factors = [getattr(text_config, name, None) for name in FACTORS]
    scale = math.prod(factor for factor in factors if factor is not None)
    scale /= getattr(text_config, DIVISOR, None) or 1
    return LogitTerms(scale, first_set_attribute(text_config, SOFT_CAPS))


def choose_loss_head(
    requested: str,
    model_config: PretrainedConfig,
    adapted: bool = False,
    router: RouterTerm | None = None,
    device: torch.device | None = CPU,
) -> LossHeadChoice:
    """Choose how to compute the loss. `requested` is "auto", "fused" or "logits".

    "auto" tests a small random model on `device`. It chooses "fused" if both ways give equal losses
    and gradients up to rounding. device: the training device. None means that this host lacks the
    device, and the test runs on the CPU if possible. adapted: whether LoRA trains the LM head or
    rows of new tokens. Raises ConfigurationError if "fused" is requested but not possible.
    """
    problem, proved = None, ""
    if adapted and requested != "logits":
        problem = "LoRA trains the last layer or rows of new tokens"
    elif requested != "logits":
        try:
            problem = _fusion_problem(model_config, device or CPU)
        except ProbeError as error:
            problem = None if device is None else error.problems[0]
            proved = "; tested where the run trains"
    if problem is None and requested != "logits":
        reason = f"last layer and cross-entropy in one, some tokens at a time{proved}"
        return LossHeadChoice("fused", f"{requested}: fused, {reason}", router)
    if requested == "fused":
        raise ConfigurationError(f"--loss_head fused: {problem}; use auto")
    why = f"for {problem}" if problem else "as requested"
    return LossHeadChoice("logits", f"{requested}: logits of all tokens in memory, {why}", router)


def _fusion_problem(model_config: PretrainedConfig, device: torch.device) -> str | None:
    """Return why the loss cannot be "fused", or None. Raises ProbeError if the test cannot run."""
    config = probe_config(model_config, device)
    if hasattr(config.get_text_config(), SWITCH):
        setattr(config.get_text_config(), SWITCH, False)  # compare only the cross-entropy
    model = build_probe_model(config, "eager", device)
    name = type(model).__name__
    if type(model.get_output_embeddings()) is not nn.Linear:
        return f"{name} has no linear last layer"
    with fork_random(device), torch.enable_grad():
        torch.default_generator.manual_seed(0)
        try:
            worst = _largest_error(model)
        except MODEL_ERRORS as error:
            return f"{name} does not run without its last layer ({type(error).__name__}: {error})"
    if worst < tolerance(device, LOSS_TOLERANCE):
        return None
    return f"{name}'s loss is not the cross-entropy of its last layer alone ({worst:.1e} off)"


def _largest_error(model: PreTrainedModel) -> float:
    tokens = torch.randint(1, VOCABULARY, SHAPE).to(model.device)
    head: Any = model.get_output_embeddings()
    with torch.no_grad():
        head.weight *= SPREAD / model(input_ids=tokens, use_cache=False).logits.std()
    expected = _loss_and_gradients(model, tokens)
    LossHeadChoice("fused", "").install(model)
    actual = _loss_and_gradients(model, tokens)
    # The error of a tiny gradient may be all rounding: divide it by RELEVANT x the largest.
    floor = RELEVANT * max(value.abs().max() for value in expected.values())
    errors = [
        (actual[name] - value).abs().max() / value.abs().max().clamp(min=floor)
        for name, value in expected.items()
    ]
    return torch.stack(errors).max().item()  # NaN if one of them is NaN


def _loss_and_gradients(model: PreTrainedModel, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    labels = tokens.clone()
    labels[:, 5:8] = IGNORED
    loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
    loss.backward()
    gradients = {
        name: torch.zeros_like(loss) if value.grad is None else value.grad.clone()
        for name, value in model.named_parameters()
    }
    return {"loss": loss.detach(), **gradients}


def router_term(
    config: PretrainedConfig, *, fine_tuning: bool, given: float | None = None
) -> RouterTerm | None:
    """Return the load-balancing loss that training adds to the cross-entropy, or None.

    Fine-tuning always adds this loss, as TRL does. Pretraining adds it if the configuration sets
    output_router_logits. `given` replaces the configuration's coefficient. Raises
    ConfigurationError if `given` is set for a model without a load-balancing loss.
    """
    text: Any = config.get_text_config()
    own = next((getattr(text, name) for name in BALANCE_COEFFICIENTS if hasattr(text, name)), None)
    # Llama 4 has these settings, but transformers adds no term to its loss.
    computed = hasattr(sys.modules[causal_lm_class(config).__module__], "load_balancing_loss_func")
    if own is None or not computed or not routers(without_weights(config)):
        if given:
            raise ConfigurationError(
                f"--router_aux_loss_coef {given}: {config.model_type} has no load-balancing loss "
                "(it has no experts, or balances them by itself): leave the setting out."
            )
        return None
    coefficient = own if given is None else given
    if not coefficient or not (fine_tuning or getattr(text, SWITCH)):
        return None
    return RouterTerm(coefficient, first_set_attribute(text, EXPERTS_PER_TOKEN))


def balance_loss(
    assignments: torch.Tensor, probabilities: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Return one micro-batch's share of the load-balancing loss of the global batch, shape ().

    assignments (experts,): how often the global batch's tokens were routed to each expert.
    probabilities (experts,): the micro-batch's router probabilities, summed over tokens and layers.
    rows: the global batch's tokens times the number of layers with a router.
    """
    return len(assignments) * (assignments * probabilities).sum() / rows.clamp(min=1).square()


def count_routed(
    router_logits: tuple[torch.Tensor, ...], sequence_tokens: torch.Tensor, term: RouterTerm
) -> LossOutput:
    """Return a micro-batch's expert assignments and probabilities, summed over tokens and layers.

    router_logits: for each layer, (B * T, experts) or (B, T, experts). sequence_tokens (B,): the
    number of tokens of each sequence before the padding.
    """
    experts = router_logits[0].shape[-1]
    length = router_logits[0].numel() // experts // len(sequence_tokens)
    positions = torch.arange(length, device=sequence_tokens.device)
    is_token = (positions < sequence_tokens[:, None]).flatten().float()
    assignments = torch.zeros(experts, dtype=torch.float32, device=is_token.device)
    probabilities = torch.zeros_like(assignments)
    for logits in router_logits:
        shares = torch.softmax(logits.reshape(-1, experts), dim=-1, dtype=torch.float32)
        chosen = shares.detach().topk(term.experts_per_token, dim=-1).indices.flatten()
        assignments = assignments + torch.zeros_like(assignments).scatter_add_(
            0, chosen, is_token.repeat_interleave(term.experts_per_token)
        )
        probabilities = probabilities + (shares * is_token[:, None]).sum(dim=0)
    layers = torch.full((), len(router_logits), device=is_token.device)
    return LossOutput(assignments=assignments, probabilities=probabilities, layers=layers)


def check_own_loss(entry: str) -> None:
    """Raise ConfigurationError unless the function of --loss returns a sum with a gradient."""
    function, generator = load_own(entry), torch.Generator().manual_seed(0)
    logits = torch.randn(7, 11, generator=generator).requires_grad_()
    targets, positions = torch.arange(7), torch.arange(1, 8)
    parts = (slice(0, 7), slice(0, 3), slice(3, 7))
    try:
        whole, *halves = (function(logits[part], targets[part], positions[part]) for part in parts)
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
    """Make model.forward compute the loss of --loss in training. Call before PEFT wraps `model`."""
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
        selected = logits.flatten(0, 1).index_select(0, chosen).float()
        targets = following.flatten().index_select(0, chosen)
        if not self.training:
            total = functional.cross_entropy(selected, targets, reduction="sum")
            return LossOutput(loss=total / num_items_in_batch, hits=selected.argmax(-1) == targets)
        if not len(chosen):  # a micro-batch of padding
            return LossOutput(loss=selected.sum())
        positions = kwargs.get("position_ids")
        if positions is None:  # each sequence is one document
            positions = torch.arange(labels.shape[1], device=labels.device).expand_as(labels)
        # A target follows its prediction in the same document.
        places = positions.flatten().index_select(0, chosen) + 1
        return LossOutput(loss=function(selected, targets, places) / num_items_in_batch)

    model.forward = types.MethodType(forward, model)
    vars(model)["accepts_loss_kwargs"] = True  # False in the classes of Qwen3.5 and Gemma 4
