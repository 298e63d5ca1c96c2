"""Causal attention over packed documents: `packed_varlen` for transformers, and its kernels.

A kernel takes query (tokens, heads, head_dim), key and value (tokens, kv_heads, head_dim) of all
sequences of a micro-batch, `Documents` and `ScoreTerms`. It returns (tokens, heads, value_dim).
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface

from utils.config.errors import ConfigurationError
from utils.kernels.per_document import (
    HALF_TYPES,
    Documents,
    ScoreTerms,
    causal_sdpa,
    per_document_sdpa,
)  # fmt: skip
from utils.kernels.ulysses import ContextGroup

# Must not contain "flash", "sdpa" or "flex_attention": transformers treats such names differently.
NAME = "packed_varlen"
ROW_SDPA = "row_sdpa"
MAX_FLASH_HEAD_DIM = 256  # limit of FlashAttention 2 and 3 and of torch's copy
# On Hopper torch would prefer FlashAttention 2, although cuDNN's kernel is about twice as fast
# (transformers#48163).
CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip


class AttentionNeeds(NamedTuple):
    """The features that a model needs from an attention kernel. dropout: a probability."""

    head_dim: int
    softcap: bool = False
    sinks: bool = False
    dropout: float = 0.0
    windows: bool = False


KernelFunction = Callable[[Tensor, Tensor, Tensor, Documents, ScoreTerms], Tensor]


@dataclass(frozen=True)
class VarlenKernel:
    """An attention kernel for packed documents.

    name: the value of --attn_implementation. label: the name in messages. features: which of
    softcap, sinks and dropout the kernel supports.
    """

    name: str
    label: str
    features: frozenset[str]
    run: KernelFunction
    on_cuda_only: bool = True

    def missing(self, needs: AttentionNeeds) -> list[str]:
        """Return the needed features that this kernel lacks, as texts for a message."""
        wanted = {
            "softcap": (needs.softcap, "logit soft caps"),
            "sinks": (needs.sinks, "attention sinks"),
            "dropout": (needs.dropout > 0, f"attention dropout ({needs.dropout:g})"),
        }
        missing = [text for key, (on, text) in wanted.items() if on and key not in self.features]
        if self.on_cuda_only and (needs.head_dim > MAX_FLASH_HEAD_DIM or needs.head_dim % 8):
            missing.append(f"a head dimension of {needs.head_dim}")
        return missing


_ALL_FEATURES = frozenset({"dropout", "softcap", "sinks"})
PER_DOCUMENT = VarlenKernel(
    "per_document_sdpa", "per-document SDPA", _ALL_FEATURES, per_document_sdpa, on_cuda_only=False
)


def _cudnn_sdpa(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, terms: ScoreTerms
) -> Tensor:
    # cuDNN refuses a document of one token (torch's sdp_utils.cpp, check_cudnn_tensor_shapes).
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], set_priority=True):
        return per_document_sdpa(query, key, value, documents, terms)


CUDNN = VarlenKernel("cudnn", "cuDNN's SDPA of each document", frozenset({"dropout"}), _cudnn_sdpa)


def register_packed_varlen(kernel: VarlenKernel) -> None:
    """Register `packed_varlen` in transformers without a mask function, so models build no mask."""
    AttentionInterface.register(NAME, partial(packed_varlen, kernel=kernel))


def packed_varlen(  # noqa: PLR0913 - transformers' signature
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None = None, *, dropout: float = 0.0, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    is_causal: bool | None = None, cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None, kernel: VarlenKernel = PER_DOCUMENT,
    context: ContextGroup | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return causal attention inside each packed document. transformers' models call this.

    query (B, H, T, D), key and value (B, Hkv, T, D); returns ((B, T, H, D), None). `cu_seq_lens_q`
    has the boundaries of documents in the B * T tokens. On a CPU or in float32, PER_DOCUMENT
    replaces a kernel that needs CUDA. With `context`, query, key and value have this rank's slice
    of each sequence, but `cu_seq_lens_q` counts the tokens of whole sequences. Raises
    ConfigurationError for unsupported inputs.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    terms = ScoreTerms(scaling, dropout, sliding_window, softcap, s_aux)
    queries, keys = (states.shape[2] for states in (query, key))
    if not causal or attention_mask is not None or queries != keys or cu_seq_lens_q is None:
        raise ConfigurationError(
            f"{type(module).__name__} asks packed_varlen for other than causal attention inside "
            f"marked documents (causal: {causal}, a mask: {attention_mask is not None}, {queries} "
            f"queries for {keys} keys, cu_seq_lens_q: {cu_seq_lens_q is not None}). It "
            "computes Stoker's batches alone; to generate, call "
            "model.set_attn_implementation('sdpa'), or 'eager' where the model has no sdpa."
        )
    # Rotary embeddings and norms in float32 can make queries wider than values.
    dtype = value.dtype if query.dtype == torch.float32 else query.dtype
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    query, key, value = (states.to(dtype) for states in (query, key, value))
    if kernel.on_cuda_only and not (query.is_cuda and dtype in HALF_TYPES):
        kernel = PER_DOCUMENT
    needs = AttentionNeeds(0, softcap is not None, s_aux is not None, dropout)
    if missing := kernel.missing(needs):
        raise ConfigurationError(
            f"{type(module).__name__} uses {', '.join(missing)}, which {kernel.label} does not "
            "compute; use --attn_implementation eager"
        )
    query, key, value = (states.transpose(1, 2) for states in (query, key, value))
    if context is not None:
        query, key, value, terms = context.own_heads(query, key, value, terms)
    (rows, length, heads, head_dim), value_dim = query.shape, value.shape[-1]
    if kernel.on_cuda_only and value_dim != head_dim:
        value = functional.pad(value, (0, head_dim - value_dim))
    query, key, value = (states.flatten(0, 1) for states in (query, key, value))
    documents = Documents(cu_seq_lens_q, max_length_q or length, row_length=length)
    output = kernel.run(query, key, value, documents, terms)
    output = output[..., :value_dim].reshape(rows, length, heads, value_dim)
    return (output if context is None else context.own_tokens(output)), None


def find_kernels(
    device_type: str, dtype: torch.dtype, needs: AttentionNeeds, whole_rows: bool = False
) -> tuple[list[VarlenKernel], list[str]]:
    """Return the usable kernels, fastest first, and a reason for each kernel that is not usable.

    dtype: the type that attention computes in. whole_rows: each sequence of the run has at most one
    document.
    """
    candidates = _cuda_kernels(dtype) if device_type == "cuda" else []
    usable, refusals = [], []
    on_request = [(CUDNN.label, CUDNN)] if device_type == "cuda" and dtype in HALF_TYPES else []
    for label, kernel in [*candidates, (PER_DOCUMENT.label, PER_DOCUMENT), *on_request]:
        if isinstance(kernel, str):
            refusals.append(f"{label}: {kernel}")
        elif missing := kernel.missing(needs):
            refusals.append(f"{label} lacks {', '.join(missing)}")
        else:
            usable.append(kernel)
    # On Hopper, cuDNN's half-precision kernel is faster than these two kernels, but not faster than
    # FlashAttention 3.
    if whole_rows and usable[0].name in ("flash_attention_2", "torch_varlen") and _is_hopper():
        row_kernel = load_row_sdpa(needs, packed=usable[0])
        usable = [row_kernel, *usable] if row_kernel else usable
    return usable, refusals


def _cuda_kernels(dtype: torch.dtype) -> list[tuple[str, VarlenKernel | str]]:
    """Return pairs (label, kernel) for CUDA, fastest first; a reason replaces a missing kernel."""
    if dtype not in HALF_TYPES:
        return [("flash kernels", f"computed in {str(dtype).removeprefix('torch.')}")]
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return [("flash kernels", f"compute capability {major}.{minor}, below 8.0")]
    hopper = load_flash_attention(3) if _is_hopper() else "not a Hopper GPU"
    return [
        ("FlashAttention 3", hopper),
        ("FlashAttention 2", load_flash_attention(2)),
        ("torch's varlen_attn", load_torch_varlen()),
    ]


def _is_hopper() -> bool:
    return torch.cuda.get_device_capability()[0] == 9


def _import_function(module: str, name: str) -> Callable[..., Tensor] | str:
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        return f"no module named {error.name}"
    except (ImportError, OSError, AttributeError) as error:
        return f"{module} is installed but broken ({error})"


def load_flash_attention(version: int) -> VarlenKernel | str:
    """Return FlashAttention 2 or 3 as a kernel, or a text that says why it is missing."""
    module = {2: "flash_attn", 3: "flash_attn_interface"}[version]
    function = _import_function(module, "flash_attn_varlen_func")
    if isinstance(function, str):
        return function
    parameters = inspect.signature(function).parameters
    parameter_names = {"softcap": "softcap", "dropout": "dropout_p", "sinks": "s_aux"}
    features = frozenset(feature for feature, name in parameter_names.items() if name in parameters)
    label = f"FlashAttention {version}"
    return VarlenKernel(f"flash_attention_{version}", label, features, partial(_flash, function))


def _flash(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, terms: ScoreTerms,
) -> Tensor:  # fmt: skip
    """Call `function`, the `flash_attn_varlen_func` of FlashAttention 2 or 3.

    Pass only options that differ from their default, because some versions lack some options.
    """
    options: dict[str, object] = {"causal": True, "softmax_scale": terms.scale}
    # By default the backward pass sums with atomic additions, in varying order.
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    if terms.window is not None:
        options["window_size"] = (terms.window - 1, 0)  # tokens to the left, inclusive
    if terms.softcap is not None:
        options["softcap"] = terms.softcap
    if terms.dropout:
        options["dropout_p"] = terms.dropout
    if terms.sinks is not None:
        options["s_aux"] = terms.sinks.to(query.dtype)
    ends, longest = documents.cu_seq_lens, documents.max_length
    output = function(
        query, key, value, cu_seqlens_q=ends, cu_seqlens_k=ends,
        max_seqlen_q=longest, max_seqlen_k=longest, **options,
    )  # fmt: skip
    return output[0] if isinstance(output, tuple) else output


def load_torch_varlen() -> VarlenKernel | str:
    """Return torch's varlen_attn as a kernel, or a text that says why it is missing."""
    function = _import_function("torch.nn.attention.varlen", "varlen_attn")
    if isinstance(function, str):
        return function
    # torch before 2.12 does not have this option and always supports grouped heads.
    has_option = "enable_gqa" in inspect.signature(function).parameters
    grouped = {"enable_gqa": True} if has_option else {}

    def run(
        query: Tensor, key: Tensor, value: Tensor, documents: Documents, terms: ScoreTerms
    ) -> Tensor:
        window = (-1 if terms.window is None else terms.window - 1, 0)
        ends, longest = documents.cu_seq_lens, documents.max_length
        return function(
            query, key, value, ends, ends, longest, longest,
            scale=terms.scale, window_size=window, **grouped,
        )  # fmt: skip

    return VarlenKernel("torch_varlen", "torch's varlen_attn", frozenset(), run)


def load_row_sdpa(needs: AttentionNeeds, packed: VarlenKernel) -> VarlenKernel | None:
    """Return a kernel that runs cuDNN's SDPA on whole sequences of one document each.

    The padding after a document attends to the document but has no loss. For sequences of several
    documents, as in `check_isolation`, the kernel calls `packed`. Returns None if the model needs
    soft caps, sinks, dropout or windows, or if torch does not choose cuDNN on this GPU.
    """
    plain = needs == AttentionNeeds(needs.head_dim)
    if not plain or sdpa_backend(needs.head_dim) != SDPBackend.CUDNN_ATTENTION:
        return None

    def run(
        query: Tensor, key: Tensor, value: Tensor, documents: Documents, terms: ScoreTerms
    ) -> Tensor:
        rows = query.shape[0] // documents.row_length
        if len(documents.cu_seq_lens) - 1 > 2 * rows:  # more than a document and padding per row
            return packed.run(query, key, value, documents, terms)
        query, key, value = (
            states.unflatten(0, (rows, documents.row_length)).transpose(1, 2)
            for states in (query, key, value)
        )
        with sdpa_kernel(CUDNN_FIRST, set_priority=True):
            attended = causal_sdpa(query, key, value, terms)
        return attended.transpose(1, 2).flatten(0, 1)

    return VarlenKernel(ROW_SDPA, "SDPA by row, cuDNN first", frozenset(), run)


def sdpa_backend(head_dim: int) -> SDPBackend:
    """Return the backend that SDPA chooses on this GPU for bfloat16 if cuDNN has priority."""
    states = torch.empty(1, 2, 128, head_dim, device="cuda", dtype=torch.bfloat16)
    states.requires_grad_()
    with sdpa_kernel(CUDNN_FIRST, set_priority=True):
        return SDPBackend(torch._fused_sdp_choice(states, states, states, is_causal=True))
