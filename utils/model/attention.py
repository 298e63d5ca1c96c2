"""The attention of a run, chosen or refused before weights load, and the shape of its batches."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
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
from utils.model.architecture import causal_lm_class

PER_TOKEN = ("input_ids", "labels", "position_ids")
BOUNDARIES = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
MASK_COST = (
    "transformers builds a block mask from position_ids, whose memory grows with the square of the "
    "sequence length"
)
RUN_ANYWHERE = (NAME, "sdpa", "eager")
OPEN = "open"  # kernel not known yet: the run trains on another machine and chooses there
ONE_A_ROW = "set --packing none (one document a sequence, so that there is nothing to leak)"
PROOFS = {
    "plain": "no document sees the padding behind it",
    "alone": "padding would change its numbers, so that each sequence ends with its document",
}


@dataclass(frozen=True)
class AttentionChoice:
    """The attention name for transformers, the kernel behind it, and the reason to log."""

    name: str
    kernel: str
    reason: str
    batches: str = "packed"  # the shape of the model's inputs, see `shape_inputs`
    unproved: str = ""  # why isolation could not be proved

    @property
    def proof(self) -> str:
        """Return what the isolation check found, in words for the log."""
        return self.unproved or PROOFS.get(self.batches, "keeps packed documents apart")


def attention_choices(
    requested: str | None,
    model_config: PretrainedConfig,
    needs: AttentionNeeds | str,
    device_type: str,
    dtype: torch.dtype,
    whole_rows: bool = False,
) -> Iterator[AttentionChoice]:
    """Yield the attention for packed training, then alternatives in case documents leak in it.

    `requested` is --attn_implementation; a flash kernel's name means `packed_varlen` with that
    kernel, which is registered here. `needs` is the result of `observe_attention`. `dtype` is the
    type that training computes in. With `whole_rows` no sequence has more than one document. The
    alternatives are then plain batches (padding comes last, where no token sees it) and batches
    without padding. Without `whole_rows` the alternative is a block mask, yielded only if no
    attention is requested. Raises ConfigurationError.
    """
    name, class_name = requested or "auto", causal_lm_class(model_config).__name__
    own = own_attention(requested, model_config, needs)
    if isinstance(needs, AttentionNeeds) and name not in ("sdpa", "eager"):
        first = _choose_packed(name, device_type, dtype, needs, whole_rows)
    elif name == "auto":
        first = AttentionChoice(own, own, f"auto: {own}, as {needs}; {MASK_COST}")
    elif name == own:
        first = AttentionChoice(name, name, f"{name}: as requested; {MASK_COST}")
    else:
        why = f": {needs}" if isinstance(needs, str) else ""
        raise ConfigurationError(
            f"--attn_implementation {name}: transformers' {class_name} does not support it{why}."
        )
    recurrent = is_recurrent(model_config)
    yield replace(first, batches="flat") if recurrent else first
    # With SDPA and without a mask, PaliGemma's tokens would see later tokens: try eager as well.
    kinds = ("sdpa", "eager") if own == "sdpa" and name not in ("sdpa", "eager") else (own,)
    for kind in kinds:
        if whole_rows:
            reason = f"{kind}: each sequence is one document, as --packing none has it"
            yield AttentionChoice(kind, kind, f"{reason}; no mask is made", batches="plain")
        elif name == "auto" and kind != first.name:
            reason = f"auto: {kind}, as {class_name} needs its own masks; {MASK_COST}"
            yield AttentionChoice(kind, kind, reason, "flat" if recurrent else "packed")
    if whole_rows:
        reason = f"{own}: each sequence is one document, as --packing none has it"
        yield AttentionChoice(own, own, reason, batches="alone")


def own_attention(
    requested: str | None, model_config: PretrainedConfig, needs: AttentionNeeds | str | None
) -> str:
    """Return transformers' own masked attention for this model: sdpa or eager."""
    # SDPA has neither soft caps nor sinks.
    special = isinstance(needs, AttentionNeeds) and (needs.softcap or needs.sinks)
    sdpa = causal_lm_class(model_config)._supports_sdpa and not special
    return "sdpa" if sdpa and requested != "eager" else "eager"


def _choose_packed(
    name: str, device_type: str, dtype: torch.dtype, needs: AttentionNeeds, whole_rows: bool
) -> AttentionChoice:
    """Choose and register the best kernel for packed_varlen, or the requested one."""
    usable, refusals = find_kernels(device_type, dtype, needs, whole_rows)
    wanted = [kernel for kernel in usable if name in ("auto", NAME, kernel.name)]
    if not wanted:
        why = f" ({'; '.join(refusals)})" if refusals else ""
        raise ConfigurationError(
            f"--attn_implementation {name} cannot run on {device_type} here{why}: it needs an "
            "NVIDIA GPU, its package built for this torch, and --bf16 true."
        )
    kernel = wanted[0]
    register_packed_varlen(kernel)
    where = device_type.upper()
    if kernel is PER_DOCUMENT and refusals:
        where += f"; {'; '.join(refusals)}"
    return AttentionChoice(NAME, kernel.name, f"{name}: {NAME} through {kernel.label} ({where})")


def shape_inputs(inputs: dict[str, Any], batches: str) -> dict[str, Any]:
    """Bring the inputs of packed sequences, (B, T), into the shape that the model takes.

    "packed": unchanged. "plain": only tokens and labels, for sequences of one document. "alone":
    the same without padding, for B = 1. "flat", for kernels of recurrent layers: (1, B * T) with
    `seq_idx`, the document of each token, int32.
    """
    if batches == "packed":
        return inputs
    if batches in ("plain", "alone"):
        plain = {name: value for name, value in inputs.items() if name not in BOUNDARIES}
        if batches == "plain":
            return plain
        # The first segment is the document, the second its padding.
        length = max(1, int(inputs["cu_seq_lens_q"][1]))
        return {
            name: value[:, :length] if name in PER_TOKEN else value for name, value in plain.items()
        }
    flat = {
        name: value.reshape(1, -1) if name in PER_TOKEN else value for name, value in inputs.items()
    }
    # Positions restart at 0 where a document begins.
    flat["seq_idx"] = (flat["position_ids"] == 0).cumsum(-1, dtype=torch.int32) - 1
    return flat


def is_recurrent(model_config: PretrainedConfig) -> bool:
    """Return whether a model has recurrent layers, which carry a state from token to token."""
    types = getattr(model_config.get_text_config(decoder=True), "layer_types", None) or ()
    if types and all("attention" in kind and "linear" not in kind for kind in types):
        return False  # DeepSeek-V4's state is a cache of token blocks
    return bool(causal_lm_class(model_config)._is_stateful or "conv" in types)


def check_row_positions(model_config: PretrainedConfig, sequence_length: int) -> None:
    """Refuse packing if Llama 4 would scale queries by the position in the packed sequence."""
    text = model_config.get_text_config(decoder=True)
    first = getattr(text, "floor_scale", None)
    if first and text.attn_temperature_tuning and sequence_length >= first:
        raise ConfigurationError(
            f"--sequence_length {sequence_length:,}: {text.model_type} scales its attention from "
            f"token {first:,} of a sequence on (floor_scale), wherever a packed document begins. "
            f"To train it, {ONE_A_ROW}, or shorten the sequences."
        )
