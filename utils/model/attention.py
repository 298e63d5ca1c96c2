"""The choice of the attention, made and refused before any weight loads."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from utils.config.errors import ConfigurationError
from utils.kernels.varlen import (
    NAME,
    PER_DOCUMENT,
    AttentionNeeds,
    find_kernels,
    register_packed_varlen,
)
from utils.model.architecture import causal_lm_class, observe_attention, probe_config

PER_TOKEN = ("input_ids", "labels", "position_ids")
BOUNDARIES = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
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
    whole_rows: bool = False,
) -> AttentionChoice:
    """Choose the attention for packed training, or refuse; registers `packed_varlen` if chosen.

    `requested` as in --attn_implementation; `dtype` is the type that training computes in;
    `whole_rows`: no sequence holds more than one document. transformers would fetch a kernel that
    is not installed from the Hub, or drop what a kernel does not compute: both are refused here.
    Raises ConfigurationError.
    """
    name = requested or "auto"
    model_class = causal_lm_class(model_config)
    needs = observe_attention(probe_config(model_config))
    if name in ("auto", NAME) and needs is not None:
        return _choose_packed(name, device_type, dtype, needs, whole_rows)
    if name == "auto":
        name = "sdpa" if model_class._supports_sdpa else "eager"
        why = f"{model_class.__name__} does not call attention through the AttentionInterface"
        return AttentionChoice(name, name, f"auto: {name}, as {why}; {MASK_COST}")
    if name.startswith("flash"):
        problem = _flash_problem(name, device_type, dtype, needs)
        own = getattr(model_class, "_compatible_flash_implementations", None)
        supported = model_class._supports_flash_attn and (not own or name in own)
        how = "documents are kept apart by cu_seq_lens"
    else:
        problem, how = None, MASK_COST
        supported = name == "eager" or (name == "sdpa" and _sdpa_computes(model_config))
    if not supported:
        problem = f"transformers' {model_class.__name__} does not support it"
    if problem is not None:
        raise ConfigurationError(
            f"--attn_implementation {name}: {problem}: use auto, which takes the best kernel here."
        )
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


def _flash_problem(
    name: str, device_type: str, dtype: torch.dtype, needs: AttentionNeeds | None
) -> str | None:
    """Return why this package of FlashAttention cannot train the model here."""
    if device_type != "cuda":
        return f"it needs an NVIDIA GPU, and this run is on {device_type}"
    usable, refusals = find_kernels(device_type, dtype, needs or AttentionNeeds(0))
    if any(kernel.name == name for kernel in usable):
        return None
    own = ("flash kernels", f"FlashAttention {name[-1]}")
    why = "; ".join(one for one in refusals if one.startswith(own))
    return f"{why} (it needs its package, installed for this torch, and --bf16 true)"
