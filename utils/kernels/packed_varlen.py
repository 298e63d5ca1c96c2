"""The attention function that transformers' models call under the name `packed_varlen`."""

import logging
from functools import lru_cache, partial
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

from utils.config.errors import ConfigurationError
from utils.kernels.per_document import HALF_TYPES, Documents, ScoreTerms, causal_sdpa
from utils.kernels.varlen import PER_DOCUMENT, VarlenKernel

logger = logging.getLogger(__name__)

# transformers looks for "flash", "sdpa" and "flex_attention" inside a name: it has none of them.
NAME = "packed_varlen"


def register_packed_varlen(kernel: VarlenKernel) -> None:
    """Register `packed_varlen` with `kernel` for half precision on CUDA.

    No mask function goes with it, so that models make no mask at all: the kernel learns where
    documents lie from `cu_seq_lens`, and padding has to be a segment of its own.
    """
    AttentionInterface.register(NAME, partial(packed_varlen, kernel=kernel))


def packed_varlen(  # noqa: PLR0913 - transformers' signature
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    kernel: VarlenKernel = PER_DOCUMENT,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally inside each document of a packed micro-batch.

    query (B, H, T, D), key and value (B, Hkv, T, D); `cu_seq_lens_q` runs over the B * T tokens
    laid end to end. Returns ((B, T, H, D), None). Without `cu_seq_lens_q`, in evaluation, every row
    is taken as one document. Raises ConfigurationError for what it cannot compute.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    _refuse_unsupported(module, causal, attention_mask, query.shape[2], key.shape[2])
    dtype = _compute_dtype(query, value)
    query, key, value = (states.to(dtype) for states in (query, key, value))
    if kernel.on_cuda_only and not (query.is_cuda and dtype in HALF_TYPES):
        _warn_other_kernel(kernel.label, query.device.type, dtype)
        kernel = PER_DOCUMENT
    terms = ScoreTerms(scaling, dropout, sliding_window, softcap, s_aux)
    _refuse_terms(module, kernel, terms)
    if cu_seq_lens_q is None:
        _refuse_unmarked_packing(module, kwargs.get("position_ids"))
        return causal_sdpa(query, key, value, terms).transpose(1, 2).contiguous(), None
    rows, heads, length, head_dim = query.shape
    value_dim = value.shape[-1]
    if kernel.on_cuda_only and value_dim != head_dim:
        value = functional.pad(value, (0, head_dim - value_dim))
    query, key, value = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    longest = length if max_length_q is None else max_length_q
    documents = Documents(cu_seq_lens_q, longest, row_length=length)
    output = kernel.run(query, key, value, documents, terms)
    return output[..., :value_dim].reshape(rows, length, heads, value_dim), None


def _compute_dtype(query: torch.Tensor, value: torch.Tensor) -> torch.dtype:
    """Choose the dtype to attend in: autocast's, or the narrower one of query and value.

    Rotary embeddings and norms kept in fp32 leave queries wider than values.
    """
    if torch.is_autocast_enabled(query.device.type):
        return torch.get_autocast_dtype(query.device.type)
    return value.dtype if query.dtype == torch.float32 else query.dtype


@lru_cache(maxsize=8)
def _warn_other_kernel(label: str, device_type: str, dtype: torch.dtype) -> None:
    logger.warning(
        "packed_varlen: %s does not run on %s in %s; per-document SDPA does, more slowly",
        label,
        device_type,
        dtype,
    )


def _refuse_unsupported(
    module: torch.nn.Module,
    causal: bool,
    attention_mask: torch.Tensor | None,
    queries: int,
    keys: int,
) -> None:
    name = type(module).__name__
    if not causal:
        raise ConfigurationError(
            f"{name} attends in both directions, but packed_varlen is causal; "
            "train a causal language model"
        )
    if attention_mask is not None:
        raise ConfigurationError(
            f"{name} was given an attention mask, which packed_varlen does not apply; "
            "mark documents by cu_seq_lens and make padding a document of its own, "
            "or use --attn_implementation sdpa"
        )
    if queries != keys:
        raise ConfigurationError(
            f"{name} has {queries} queries for {keys} keys: packed_varlen trains on whole rows "
            "and has no key/value cache; call model.set_attn_implementation('sdpa') to generate"
        )


def _refuse_terms(module: torch.nn.Module, kernel: VarlenKernel, terms: ScoreTerms) -> None:
    unsupported = {
        "softcap": ("logit soft caps", terms.softcap is not None),
        "sinks": ("attention sinks", terms.sinks is not None),
        "dropout": ("attention dropout", terms.dropout > 0),
    }
    for feature, (text, used) in unsupported.items():
        if used and feature not in kernel.features:
            raise ConfigurationError(
                f"{type(module).__name__} uses {text}, which {kernel.label} does not compute; "
                "use --attn_implementation eager"
            )


def _refuse_unmarked_packing(module: torch.nn.Module, position_ids: torch.Tensor | None) -> None:
    restarts = position_ids is not None and bool((position_ids.diff(dim=-1) != 1).any())
    if module.training or restarts:
        raise ConfigurationError(
            "packed_varlen was given no cu_seq_lens_q, so packed documents would see each other; "
            "train on Stoker's packed batches, or use --attn_implementation sdpa"
        )
