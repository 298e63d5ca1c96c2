"""FlashAttention 2 as torch carries it, for transformers where the package is not installed.

The kernels are the same, so that a peer is not slower here for want of a package that takes an hour
to build. transformers asks for it under its usual name, `flash_attention_2`.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

# Before torch 2.12 heads may be grouped without a word.
_grouped: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)
_varlen: Callable[..., Any] = partial(varlen_attn, **_grouped)


def stand_in_for_flash_attn() -> None:
    """Let transformers take torch's kernels for those of the package flash_attn."""
    from transformers import PreTrainedModel, modeling_flash_attention_utils

    functions = (flash_attn_func, flash_attn_varlen_func, None)
    unpadding = (
        modeling_flash_attention_utils._pad_input, modeling_flash_attention_utils._unpad_input,
    )  # fmt: skip
    replaced: Any = modeling_flash_attention_utils
    replaced._lazy_imports = lambda *_, **__: (*functions, *unpadding)
    replaced = PreTrainedModel
    replaced._flash_attn_import_error = lambda *_, **__: None  # that it is not installed


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """Attend in (rows, tokens, heads, head_dim)."""
    query, key, value = (states.transpose(1, 2) for states in (q, k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=softmax_scale, enable_gqa=True
        )
    return attended.transpose(1, 2)


def flash_attn_varlen_func(  # noqa: PLR0913 - the package's names, which transformers reads
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """Attend causally in documents end to end, (tokens, heads, head_dim)."""
    assert causal
    return _varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        scale=softmax_scale, window_size=(-1, 0),
    )  # fmt: skip
