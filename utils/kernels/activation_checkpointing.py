"""What of a decoder layer is kept for its backward pass, and what is computed a second time.

none keeps what autograd wants; selective keeps what matrix products and attention return and
computes norms, activation functions, rotations and casts again; full keeps the layer's input alone.
No number changes: what is computed again comes from the same inputs and the same random state.
"""

from functools import partial
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

CHOICES = ("none", "selective", "full")  # least recomputation first

_PRODUCTS = frozenset({"mm", "addmm", "_scaled_mm"})
# The last is transformers' for experts where torch's does not run.
_EXPERT_PRODUCTS = frozenset({"_grouped_mm", "grouped_mm_fallback"})
_ATTENTION = frozenset(
    {
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
        "blocked_attention",
    }
)
# FlashAttention's operators, whose namespaces differ by build, and torch's varlen_attn. Baddbmm and
# bmm are no such products: in attention without a kernel they return all scores.
_KERNELS = ("flash_attn", "varlen_attn")
_DROPOUT_ARGUMENTS = ("dropout_p", "p_dropout")


def keep_products(model: PreTrainedModel) -> None:
    """Let activation checkpointing of `model`, once it is turned on, be the selective one.

    Trainer turns it on when training begins; before PEFT wraps the model and FSDP2 shards it, so
    that it is theirs too. Reentrant checkpointing has no such choice and is never used with it.
    Products of experts with a bias (gpt-oss) are computed again: transformers adds the bias in
    place, and what is kept must stay as it is.
    """
    enable = type(model).activation_checkpointing_enable
    biased = any(getattr(module, "has_bias", False) is True for module in model.modules())
    contexts = partial(
        create_selective_checkpoint_contexts, kept_but_of_experts if biased else kept
    )

    def enable_selective(activation_checkpointing_kwargs: Any = None, **options: Any) -> None:
        assert not activation_checkpointing_kwargs, "refused with the settings"
        enable(model, {"use_reentrant": False, "context_fn": contexts}, **options)

    model.activation_checkpointing_enable = enable_selective  # type: ignore[method-assign,assignment]


def kept(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Say whether what an operator returned is kept; the policy of selective checkpointing.

    What draws random numbers is never kept: the layer's second pass starts from the same random
    state, and has to draw as often as the first.
    """
    name = operator._schema.name.rpartition("::")[2]
    known = name in _PRODUCTS or name in _EXPERT_PRODUCTS or name in _ATTENTION
    if not known and not any(kernel in str(operator) for kernel in _KERNELS):
        return CheckpointPolicy.PREFER_RECOMPUTE
    if operator._schema.is_mutable or _dropout(operator, args, kwargs):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def kept_but_of_experts(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """As `kept`, but no product of experts."""
    if operator._schema.name.rpartition("::")[2] in _EXPERT_PRODUCTS:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return kept(context, operator, *args, **kwargs)


def _dropout(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Return the share that a call of an attention operator drops."""
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name in _DROPOUT_ARGUMENTS:
            given = kwargs.get(argument.name, args[place] if place < len(args) else None)
            return argument.default_value or 0.0 if given is None else given
    return 0.0
