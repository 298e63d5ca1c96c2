"""The choice of the attention, made and refused before any weight loads."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from utils.config.errors import ConfigurationError
from utils.kernels.per_document import HALF_TYPES
from utils.kernels.varlen import (
    NAME,
    PER_DOCUMENT,
    AttentionNeeds,
    find_kernels,
    load_flash_attention,
    register_packed_varlen,
)
from utils.model.architecture import causal_lm_class, observe_attention, probe_config

CHOICES = (
    "auto",
    NAME,
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
    "eager",
)
PER_TOKEN = ("input_ids", "labels", "position_ids")
BOUNDARIES = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
INSTALL = {
    2: "pip install flash-attn --no-build-isolation",
    3: "build it from the hopper/ folder of github.com/Dao-AILab/flash-attention",
}
MASK_COST = (
    "transformers builds a block mask from position_ids, whose memory grows with the square of the "
    "sequence length"
)


@dataclass(frozen=True)
class AttentionChoice:
    """`name` is what transformers is told, `kernel` what computes, `reason` a line for the user.

    batches: what the model is given, see `shape_inputs`.
    """

    name: str
    kernel: str
    reason: str
    batches: str = "packed"


def choose_attention(
    requested: str | None,
    model_config: PretrainedConfig,
    device_type: str,
    dtype: torch.dtype,
    compute_dtype: torch.dtype | None = None,
    whole_rows: bool = False,
) -> AttentionChoice:
    """Choose the attention for packed training, or refuse; registers `packed_varlen` if chosen.

    `requested` is one of CHOICES, None means auto. `dtype` is the weights'; `compute_dtype` is
    mixed precision's, when there is any; `whole_rows`: no row holds more than one document. Never
    lets transformers reach for the Hub: a flash kernel that is not installed is refused here.
    Raises ConfigurationError.
    """
    name = requested or "auto"
    if name not in CHOICES:
        raise ConfigurationError(
            f"--attn_implementation {name}: not one of {', '.join(CHOICES)}; kernels are not "
            "fetched from the Hub, which compute nodes cannot reach"
        )
    model_class = causal_lm_class(model_config)
    needs = observe_attention(probe_config(model_config))
    dtype = compute_dtype or dtype
    if name in ("auto", NAME) and needs is not None:
        return _choose_packed(name, device_type, dtype, needs, whole_rows)
    if name == "auto":
        name = "sdpa" if model_class._supports_sdpa else "eager"
        why = f"{model_class.__name__} does not call attention through the AttentionInterface"
        return AttentionChoice(name, name, f"auto: {name}, as {why}; {MASK_COST}")
    problems = _problems(name, model_config, device_type, dtype, needs)
    if problems:
        raise ConfigurationError([f"--attn_implementation {name}: {text}" for text in problems])
    by_bounds = name.startswith("flash")
    how = "documents are kept apart by cu_seq_lens" if by_bounds else MASK_COST
    return AttentionChoice(name, name, f"{name}: as requested; {how}")


def shape_inputs(inputs: dict[str, Any], batches: str) -> dict[str, Any]:
    """Return the inputs of packed sequences, (B, T), as the model is to take them.

    "packed": as they are. "flat": (1, B * T) with `seq_idx`, the document of each token, int32:
    the kernels of recurrent layers take boundaries for a single sequence. "plain": tokens and
    labels alone, for sequences of one document.
    """
    if batches == "packed":
        return inputs
    if batches == "plain":
        return {name: value for name, value in inputs.items() if name not in BOUNDARIES}
    flat = {
        name: value.reshape(1, -1) if name in PER_TOKEN else value for name, value in inputs.items()
    }
    # A document begins wherever positions begin again.
    flat["seq_idx"] = (flat["position_ids"] == 0).cumsum(-1, dtype=torch.int32) - 1
    return flat


def is_recurrent(model_config: PretrainedConfig) -> bool:
    """Whether a model has layers that read on from token to token, beside attention."""
    types = getattr(model_config.get_text_config(decoder=True), "layer_types", None)
    return bool(causal_lm_class(model_config)._is_stateful or "conv" in (types or ()))


def choose_masked(model_config: PretrainedConfig) -> AttentionChoice | None:
    """Choose SDPA with block masks, for models that put more into their masks than packing.

    None where the model has no SDPA, or loses a term of its scores there.
    """
    if not _sdpa_computes(model_config):
        return None
    model_class = causal_lm_class(model_config).__name__
    reason = f"auto: sdpa, as {model_class} needs its own masks; {MASK_COST}"
    return AttentionChoice("sdpa", "sdpa", reason)


def choose_for_plain_rows(requested: str | None, model_config: PretrainedConfig) -> AttentionChoice:
    """Choose transformers' own attention, as requested where it is, for one document a sequence.

    Padding lies behind the document, where no token of a causal model sees it: there is no mask.
    """
    name = requested or "auto"
    if name in ("auto", NAME):
        name = "sdpa" if _sdpa_computes(model_config) else "eager"
    reason = f"{name}: each sequence is one document, as --packing none has it; no mask is made"
    return AttentionChoice(name, name, reason, batches="plain")


def _choose_packed(
    name: str, device_type: str, dtype: torch.dtype, needs: AttentionNeeds, whole_rows: bool
) -> AttentionChoice:
    """Take the best kernel for packed_varlen; say why when it is not one of the fast ones."""
    usable, refusals = find_kernels(device_type, dtype, needs, whole_rows)
    kernel = usable[0]
    register_packed_varlen(kernel)
    where = device_type.upper()
    if kernel is PER_DOCUMENT and refusals:
        where += f"; {'; '.join(refusals)}"
    return AttentionChoice(NAME, kernel.name, f"{name}: {NAME} through {kernel.label} ({where})")


def _sdpa_computes(model_config: PretrainedConfig) -> bool:
    """Whether SDPA has all terms: in transformers 5.17 Gemma 2 claims it, and loses its caps."""
    needs = observe_attention(probe_config(model_config))
    lost = needs is not None and (needs.softcap or needs.sinks)
    return causal_lm_class(model_config)._supports_sdpa and not lost


def _problems(
    name: str,
    model_config: PretrainedConfig,
    device_type: str,
    dtype: torch.dtype,
    needs: AttentionNeeds | None,
) -> list[str]:
    """List why an attention that was asked for cannot train this model here.

    transformers would fetch a kernel from the Hub, or drop what the kernel does not compute.
    """
    model_class = causal_lm_class(model_config)
    unsupported = f"transformers' {model_class.__name__} does not support it; use auto"
    if name.startswith("flash"):
        if device_type != "cuda":
            return [f"needs an NVIDIA GPU, and this run is on {device_type}; use auto"]
        problems = _flash_problems(int(name[-1]), dtype, needs)
        own = getattr(model_class, "_compatible_flash_implementations", None)
        if not model_class._supports_flash_attn or (own and name not in own):
            problems.append(unsupported)
        return problems
    supported = {
        NAME: needs is not None,
        "sdpa": _sdpa_computes(model_config),
        "flex_attention": model_class._supports_flex_attn,
    }
    problems = [] if supported.get(name, True) else [unsupported]
    if name == "flex_attention" and device_type == "cpu":
        problems.append("has no backward pass on the CPU; use auto")
    if name == "flex_attention" and needs is not None and needs.dropout > 0:
        problems.append("does not compute this model's attention dropout; set it to 0 or use auto")
    return problems


def _flash_problems(version: int, dtype: torch.dtype, needs: AttentionNeeds | None) -> list[str]:
    kernel = load_flash_attention(version)
    problems = []
    if isinstance(kernel, str):
        problems.append(f"FlashAttention {version} is not here ({kernel}); {INSTALL[version]}")
    elif needs is not None and (missing := kernel.missing(needs)):
        problems.append(f"FlashAttention {version} does not compute {', '.join(missing)}; use auto")
    if version == 3 and torch.cuda.get_device_capability()[0] != 9:
        problems.append("FlashAttention 3 needs a Hopper GPU (H100, H200); use auto")
    if dtype not in HALF_TYPES:
        problems.append(f"computes in float16 or bfloat16, not in {dtype}; set --bf16 true")
    return problems
