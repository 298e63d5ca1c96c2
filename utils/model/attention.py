"""The attention of a run: chosen or refused before any weight loads, and proved.

The proof, on a small model of the user's own architecture, is that packed documents stay apart.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from utils.config.errors import ConfigurationError
from utils.kernels.varlen import (
    NAME,
    PER_DOCUMENT,
    ROW_SDPA,
    AttentionNeeds,
    find_kernels,
    register_packed_varlen,
)
from utils.model.architecture import (
    VOCABULARY,
    build_probe_model,
    causal_lm_class,
    is_multimodal,
    observe_attention,
    probe_config,
)

PER_TOKEN = ("input_ids", "labels", "position_ids")
BOUNDARIES = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
MASK_COST = (
    "transformers builds a block mask from position_ids, whose memory grows with the square of the "
    "sequence length"
)
# Two rows of three and two documents and a tail each; lengths differ so that nothing lines up.
ROWS = ((7, 5, 9, 3), (4, 13, 7))
# One document a row and a tail.
WHOLE_ROWS = ((17, 7), (24,))
ROW_LENGTH = sum(ROWS[0])
FULL_ROW = ((ROW_LENGTH,),)  # for which no mask may be made
# Documents of the equivalence check are longer than this window, so that it cuts.
WINDOW = 4
TOLERANCE = 1e-4
RUN_ON_CPU = (NAME, "sdpa", "eager")
# What to do about a leak: always, and where layers are recurrent.
ONE_A_ROW = "set --packing none (one document a sequence, so that there is nothing to leak)"
KERNELS = (
    ", or install GPU kernels for its recurrent layers (flash-linear-attention and causal-conv1d, "
    "or mamba-ssm and causal-conv1d), with which this check decides anew"
)
Rows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class AttentionChoice:
    """What transformers is told, what computes, and a line for the user."""

    name: str
    kernel: str
    reason: str
    batches: str = "packed"  # what the model is given, see `shape_inputs`


def choose_isolated_attention(
    requested: str | None,
    model_config: PretrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    whole_rows: bool,
) -> AttentionChoice:
    """Choose the attention and prove, on `device`, that documents do not see each other.

    The arguments are those of `attention_choices`. Raises ConfigurationError with what to set.
    """
    refusals = []
    for choice in attention_choices(requested, model_config, device.type, dtype, whole_rows):
        try:
            check_isolation(model_config, choice, device, dtype)
        except ConfigurationError as error:
            refusals.append(error)
        else:
            return choice
    raise refusals[0]  # it says more


def attention_choices(
    requested: str | None,
    model_config: PretrainedConfig,
    device_type: str,
    dtype: torch.dtype,
    whole_rows: bool = False,
) -> Iterator[AttentionChoice]:
    """Yield the attention for packed training, and what is tried if documents are not apart in it.

    `requested` as in --attn_implementation, where a flash kernel is `packed_varlen` through that
    one, which is registered; `dtype` is the type that training computes in; `whole_rows`: no
    sequence holds more than one document, so that plain batches do (padding lies behind it, where
    no token sees it). Else block masks are tried by default. Raises ConfigurationError.
    """
    name = requested or "auto"
    model_class = causal_lm_class(model_config)
    needs = observe_attention(probe_config(model_config))
    # In transformers 5.17 Gemma 2 claims SDPA, which loses its caps.
    sdpa = model_class._supports_sdpa and not (needs and (needs.softcap or needs.sinks))
    if needs is not None and name not in ("sdpa", "eager"):
        first = _choose_packed(name, device_type, dtype, needs, whole_rows)
    elif name == "auto":
        kind = "sdpa" if sdpa else "eager"
        why = f"{model_class.__name__} does not call attention through the AttentionInterface"
        first = AttentionChoice(kind, kind, f"auto: {kind}, as {why}; {MASK_COST}")
    elif name == "eager" or (name == "sdpa" and sdpa):
        first = AttentionChoice(name, name, f"{name}: as requested; {MASK_COST}")
    else:
        raise ConfigurationError(
            f"--attn_implementation {name}: transformers' {model_class.__name__} does not support "
            "it: use auto."
        )
    yield replace(first, batches="flat") if is_recurrent(model_config) else first
    # Without a mask SDPA lets PaliGemma's tokens see those that follow.
    for kind in (name,) if name in ("sdpa", "eager") else ("sdpa", "eager")[not sdpa :]:
        if whole_rows:
            reason = f"{kind}: each sequence is one document, as --packing none has it"
            yield AttentionChoice(kind, kind, f"{reason}; no mask is made", batches="plain")
        elif (
            name == "auto"
            and kind != first.name
            and (kind == "sdpa" or is_multimodal(model_config))
        ):
            reason = f"auto: {kind}, as {model_class.__name__} needs its own masks; {MASK_COST}"
            yield AttentionChoice(kind, kind, reason)


def _choose_packed(
    name: str, device_type: str, dtype: torch.dtype, needs: AttentionNeeds, whole_rows: bool
) -> AttentionChoice:
    """Take the best kernel for packed_varlen, or the one asked for."""
    usable, refusals = find_kernels(device_type, dtype, needs, whole_rows)
    wanted = [kernel for kernel in usable if name in ("auto", NAME, kernel.name)]
    if not wanted:
        why = f" ({'; '.join(refusals)})" if refusals else ""
        raise ConfigurationError(
            f"--attn_implementation {name} cannot run on {device_type} here{why}: it needs an "
            "NVIDIA GPU, its package built for this torch, and --bf16 true. Use auto, which takes "
            "the best kernel here."
        )
    kernel = wanted[0]
    register_packed_varlen(kernel)
    where = device_type.upper()
    if kernel is PER_DOCUMENT and refusals:
        where += f"; {'; '.join(refusals)}"
    return AttentionChoice(NAME, kernel.name, f"{name}: {NAME} through {kernel.label} ({where})")


def shape_inputs(inputs: dict[str, Any], batches: str) -> dict[str, Any]:
    """Return the inputs of packed sequences, (B, T), as the model is to take them.

    "packed": as they are. "plain": tokens and labels alone, for sequences of one document. "flat",
    for kernels of recurrent layers: (1, B * T) with `seq_idx`, the document of each token, int32.
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


def check_row_positions(model_config: PretrainedConfig, sequence_length: int) -> None:
    """Refuse packing where Llama 4 scales its queries by the position in the sequence."""
    text = model_config.get_text_config(decoder=True)
    first = getattr(text, "floor_scale", None)
    if first and text.attn_temperature_tuning and sequence_length >= first:
        raise ConfigurationError(
            f"--sequence_length {sequence_length:,}: {text.model_type} scales its attention from "
            f"token {first:,} of a sequence on (floor_scale), wherever a packed document begins. "
            f"To train it, {ONE_A_ROW}, or shorten the sequences."
        )


def check_isolation(
    model_config: PretrainedConfig,
    choice: AttentionChoice,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Prove that no document changes another's logits, bit for bit.

    Builds a small random model of the user's architecture (`model_config` as training will use it)
    on `device` in `dtype`, the type that training computes in, and perturbs each document of a
    batch in turn. Where the attention also runs on the CPU, compares the logits with those of each
    document alone under eager attention, in fp32 and with windows cut short. A kernel for sequences
    of one document is tried on those as well. Raises ConfigurationError on a leak or a difference.
    """
    config = probe_config(model_config)
    model = build_probe_model(config, choice.name, device, dtype)
    checked: tuple[Rows, ...] = (ROWS, FULL_ROW)
    if choice.kernel == ROW_SDPA:
        checked = (ROWS, WHOLE_ROWS, FULL_ROW)
    if choice.batches == "plain":
        checked = (WHOLE_ROWS, FULL_ROW)
    for rows in checked:
        batch = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in packed_batch(rows).items()
        }
        _check_leaks(model, batch, rows, choice.batches)
    if choice.name in RUN_ON_CPU:
        _check_equivalence(config, choice, checked[0])


def packed_batch(rows: Rows = ROWS) -> dict[str, Any]:
    """Return packed rows as the loader makes them, the tail a segment of its own."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(rows), ROW_LENGTH)
    # 0 is the padding id, whose embedding is all zeros; the last id is what perturbs.
    input_ids = torch.randint(1, VOCABULARY - 1, shape, generator=generator)
    for row, lengths in enumerate(rows):
        if len(lengths) > 1:
            input_ids[row, -lengths[-1] :] = 1
    segments = [length for row in rows for length in row]
    missing = len(rows) * max(map(len, rows)) - len(segments)
    ends = torch.tensor([0, *segments, *[0] * missing]).cumsum(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in segments]).view(shape)
    return {
        "input_ids": input_ids, "position_ids": positions, "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends, "max_length_q": ROW_LENGTH, "max_length_k": ROW_LENGTH,
    }  # fmt: skip


def _segments(rows: Rows) -> Iterator[tuple[int, int, int]]:
    """Yield (row, start, stop) of every segment, tails included."""
    for row, lengths in enumerate(rows):
        start = 0
        for length in lengths:
            yield row, start, start + length
            start += length


@torch.no_grad()
def _logits(model: PreTrainedModel, batch: dict[str, Any], batches: str) -> torch.Tensor:
    """Return the logits (B, T, words) of a batch that is given to the model in another shape."""
    try:
        return model(**shape_inputs(batch, batches)).logits.view(*batch["input_ids"].shape, -1)
    except ConfigurationError:
        raise
    except (TypeError, ValueError, NotImplementedError) as error:
        raise _refusal(model.config, f"does not take packed batches ({error})") from error


def _check_leaks(model: PreTrainedModel, batch: dict[str, Any], rows: Rows, batches: str) -> None:
    """Perturb the first and the last token of each segment in turn.

    Logits from there to the end of its document change, no others.
    """
    reference = _logits(model, batch, batches)
    attention = model.config._attn_implementation
    other = "" if attention == NAME else f" (or try --attn_implementation {NAME})"
    for row, start, stop in _segments(rows):
        for place in (start, stop - 1):
            perturbed = batch["input_ids"].clone()
            perturbed[row, place] = VOCABULARY - 1
            logits = _logits(model, {**batch, "input_ids": perturbed}, batches)
            changed = (logits != reference).any(dim=-1)
            fault = ""
            if place == start and not changed[row, start + 1 : stop].any():
                fault = "passes nothing on: a changed token changed no later logits of its document"
            if changed[row, start:place].any():
                fault = "lets tokens see those that follow: a changed token changed earlier logits"
            own = ROW_LENGTH if rows is WHOLE_ROWS else stop
            changed[row, start:own] = False
            if changed.any():
                fault = (
                    "lets packed documents see each other: a changed token changed others' logits"
                )
            if fault:
                raise _refusal(
                    model.config, f"under --attn_implementation {attention} {fault}{other}"
                )


def _refusal(config: PretrainedConfig, fault: str) -> ConfigurationError:
    way_out = ONE_A_ROW + (KERNELS if is_recurrent(config) else "")
    return ConfigurationError(f"model type {config.model_type!r} {fault}. To train it, {way_out}")


def _check_equivalence(config: PretrainedConfig, choice: AttentionChoice, rows: Rows) -> None:
    """Compare logits with those of each document alone under eager attention."""
    text = config.get_text_config(decoder=True)
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(text, name, None):
            setattr(text, name, WINDOW)
    batch = packed_batch(rows)
    together = _logits(build_probe_model(config, choice.name), batch, choice.batches)
    alone = build_probe_model(config, "eager")
    for row, start, stop in _segments(rows):
        if start and choice.batches == "plain":
            continue  # padding, which sees the document before it
        tokens = batch["input_ids"][row : row + 1, start:stop]
        expected = _logits(alone, {"input_ids": tokens}, "plain")[0]
        worst = (together[row, start:stop] - expected).abs().max() / expected.abs().max()
        if not worst < TOLERANCE:
            fault = (
                f"computes other logits than eager attention does (by {worst:.1e} of the largest)"
            )
            raise _refusal(config, f"under --attn_implementation {choice.name} {fault}")
