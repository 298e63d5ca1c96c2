"""Proof that packed documents stay apart, on a small model of the user's architecture.

The proof runs on the device that trains, before weights load. The first attention that passes is
chosen for the run.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from utils.config.errors import ConfigurationError
from utils.kernels.varlen import ROW_SDPA
from utils.model.architecture import MISFITS, first_line, layer_settings
from utils.model.attention import (
    ONE_A_ROW,
    PROOFS,
    RUN_ANYWHERE,
    AttentionChoice,
    attention_choices,
    is_recurrent,
    own_attention,
    shape_inputs,
)
from utils.model.probe import (
    CPU,
    VOCABULARY,
    ProbeError,
    build_probe_model,
    observe_attention,
    probe_config,
    tolerance,
)

# Two packed sequences: lengths of their documents, which all differ, and then of their padding.
ROWS = ((7, 5, 9, 3), (4, 13, 7))
# Two sequences of one document each. The first ends in padding.
WHOLE_ROWS = ((17, 7), (24,))
ROW_LENGTH = sum(ROWS[0])
FULL_ROW = ((ROW_LENGTH,),)  # transformers may skip the mask for it
# Values shorter than the documents of the equivalence check. Windows then hide tokens, and sparse
# attention (as in DeepSeek) must select tokens or blocks.
CUT_SHORT = {
    "sliding_window": 4, "attention_chunk_size": 4, "compress_rates": 4, "index_topk": 2,
    "index_topk_blocks": 2,
}  # fmt: skip
# Factors for the length and the number of the check's documents under sparse attention. With few
# tokens many scores would be equal.
LONGER, MORE = 4, 4
TOLERANCE = 1e-4
NO_PADDING = "--per_device_train_batch_size 1 --per_device_eval_batch_size 1"
KERNELS = (
    "install GPU kernels for its recurrent layers (flash-linear-attention and causal-conv1d, or "
    "mamba-ssm and causal-conv1d), with which this check decides anew"
)
Rows = tuple[tuple[int, ...], ...]


def choose_isolated_attention(
    requested: str | None,
    model_config: PretrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    whole_rows: bool,
) -> AttentionChoice:
    """Choose the attention and prove on `device` that documents do not see each other.

    The arguments are those of `attention_choices`. Raises ConfigurationError if no choice passes;
    its message names settings that would work, if there are any. Raises ProbeError if the probe
    model does not run, so that nothing is proved.
    """
    try:
        return _first_proved(requested, model_config, device, dtype, whole_rows)
    except ConfigurationError as refusal:
        way_out = _way_out(requested, model_config, device, dtype, whole_rows)
        raise type(refusal)(f"{refusal.problems[0]} {way_out}") from refusal


def _first_proved(
    requested: str | None,
    model_config: PretrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    whole_rows: bool,
) -> AttentionChoice:
    """Return the first choice that passes; raises the first refusal, which is the most useful."""
    try:
        probe = probe_config(model_config, device)
    except ProbeError as error:
        if not whole_rows:
            raise
        kind = own_attention(requested, model_config, None)
        reason = f"{kind}: each sequence is one document, as --packing none has it"
        return AttentionChoice(kind, kind, reason, "plain", f"not checked: {error.problems[0]}")
    needs = observe_attention(probe, device)
    refusals = []
    for choice in attention_choices(
        requested, model_config, needs, device.type, dtype, whole_rows=whole_rows
    ):
        try:
            check_isolation(probe, choice, device, dtype)
        except ConfigurationError as error:
            refusals.append(error)
        else:
            return choice
    raise refusals[0]


def _way_out(
    requested: str | None,
    model_config: PretrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    whole_rows: bool,
) -> str:
    """Return advice for the user: settings that pass the check, or to take another model."""
    named = requested not in (None, "auto")
    tries: list[tuple[str | None, bool]] = []
    tries += [("auto", False)] if named and not whole_rows else []
    tries += [] if whole_rows else [(requested, True)]
    tries += [("auto", True)] if named else []
    kernels = KERNELS if is_recurrent(model_config) else ""
    for attention, alone in tries:
        try:
            choice = _first_proved(attention, model_config, device, dtype, alone)
        except ConfigurationError:
            continue
        ways = ["leave --attn_implementation out"] if attention != requested else []
        ways += [ONE_A_ROW] if alone and not whole_rows else []
        ways += [f"with {NO_PADDING}"] if choice.batches == "alone" else []
        return f"To train it, {' and '.join(ways)}{', or ' if kernels else ''}{kernels}."
    if kernels:
        return f"To train it, {kernels}."
    if getattr(model_config, "is_decoder", None) is False:
        return "It is an encoder: to train it, set is_decoder: true in its config."
    return "No attention of transformers trains it here: take another model."


def check_isolation(
    config: PretrainedConfig,
    choice: AttentionChoice,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Prove that no document changes another's logits, bit for bit.

    Builds the model of a probe config on `device` in `dtype`, the type that training computes in,
    and perturbs each document of a batch in turn. If the attention also runs in float32, compares
    the logits with those of each document alone under eager attention, with short windows. A kernel
    for sequences of one document is also checked on such sequences. Raises ConfigurationError for a
    leak or a difference, and ProbeError for a batch that cannot be computed.
    """
    checked: tuple[Rows, ...] = (ROWS, FULL_ROW)
    if choice.kernel == ROW_SDPA:
        checked = (ROWS, WHOLE_ROWS, FULL_ROW)
    if choice.batches in PROOFS:
        checked = (WHOLE_ROWS, FULL_ROW)
    model = _built(config, choice.name, device, dtype)
    for rows in (FULL_ROW,) if choice.batches == "alone" else checked:
        _check_leaks(model, packed_batch(rows, device), rows, choice.batches)
    if choice.name in RUN_ANYWHERE:
        _check_equivalence(config, choice, checked[0], device)


def packed_batch(rows: Rows = ROWS, device: torch.device = CPU) -> dict[str, Any]:
    """Return a packed batch as the loader makes it. A sequence's padding is a separate segment."""
    generator = torch.Generator().manual_seed(0)
    row_length = sum(rows[0])
    shape = (len(rows), row_length)
    # 0 is the padding id, with an embedding of zeros. The last id is used to perturb.
    input_ids = torch.randint(1, VOCABULARY - 1, shape, generator=generator)
    for row, lengths in enumerate(rows):
        if len(lengths) > 1:
            input_ids[row, -lengths[-1] :] = 1
    segments = [length for row in rows for length in row]
    missing = len(rows) * max(map(len, rows)) - len(segments)
    ends = torch.tensor([0, *segments, *[0] * missing]).cumsum(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in segments]).view(shape)
    ends = ends.to(device)
    return {
        "input_ids": input_ids.to(device), "position_ids": positions.to(device),
        "cu_seq_lens_q": ends, "cu_seq_lens_k": ends,
        "max_length_q": row_length, "max_length_k": row_length,
    }  # fmt: skip


def _segments(rows: Rows) -> Iterator[tuple[int, int, int]]:
    """Yield (row, start, stop) of every segment, including padding."""
    for row, lengths in enumerate(rows):
        start = 0
        for length in lengths:
            yield row, start, start + length
            start += length


def _built(config: PretrainedConfig, *how: Any) -> PreTrainedModel:
    try:
        return build_probe_model(config, *how)
    except MISFITS as error:
        raise ProbeError(_fault(config, how[0], f"does not run ({first_line(error)})")) from error


@torch.no_grad()
def _logits(model: PreTrainedModel, batch: dict[str, Any], batches: str) -> torch.Tensor:
    """Return the logits (B, T, vocabulary) of a batch; `batches` is its shape for the model."""
    attention = model.config._attn_implementation
    try:
        logits = model(**shape_inputs(batch, batches)).logits
    except MISFITS as error:
        shape = "flat" if batches == "flat" else "packed" if batches == "packed" else "plain"
        why = error.problems[0] if isinstance(error, ConfigurationError) else first_line(error)
        raise ProbeError(
            _fault(model.config, attention, f"does not take {shape} batches ({why})")
        ) from error
    return logits.view(*batch["input_ids"].shape, -1) if batches == "flat" else logits


def _fault(config: PretrainedConfig, attention: str, fault: str) -> str:
    return f"model type {config.model_type!r} under --attn_implementation {attention} {fault}."


def _check_leaks(model: PreTrainedModel, batch: dict[str, Any], rows: Rows, batches: str) -> None:
    """Perturb the first and the last token of each segment in turn.

    Only logits from that token to the end of its document may change.
    """
    reference = _logits(model, batch, batches)
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
                raise ConfigurationError(
                    _fault(model.config, model.config._attn_implementation, fault)
                )


def _cut_short(config: PretrainedConfig) -> None:
    """Make the windows of all layers, and the selections of sparse attention, small."""
    settings = layer_settings(config)
    config.per_layer_config = None
    for name, short in CUT_SHORT.items():
        if value := getattr(config, name, None):
            setattr(config, name, dict.fromkeys(value, short) if isinstance(value, dict) else short)
        for own in settings.values():
            if own.get(name):
                own[name] = short
    if settings:
        config.per_layer_config = settings


def _check_equivalence(
    config: PretrainedConfig, choice: AttentionChoice, rows: Rows, device: torch.device
) -> None:
    """Compare logits with those of each document alone under eager attention, in float32."""
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    _cut_short(text)
    if getattr(text, "index_topk", None):
        rows = MORE * tuple(tuple(LONGER * length for length in row) for row in rows)
    batch = packed_batch(rows, device)
    model, eager = _built(config, choice.name, device), _built(config, "eager", device)
    together = None if choice.batches == "alone" else _logits(model, batch, choice.batches)
    for row, start, stop in _segments(rows):
        if start and choice.batches in PROOFS:
            continue  # padding, which may see the document before it
        document = {"input_ids": batch["input_ids"][row : row + 1, start:stop]}
        expected = _logits(eager, document, "plain")[0]
        if together is None:
            own = _logits(model, document, "plain")[0]
        else:
            own = together[row, start:stop]
        worst = (own - expected).abs().max() / expected.abs().max()
        if not worst < tolerance(device, TOLERANCE):
            fault = (
                f"computes other logits than eager attention does (by {worst:.1e} of the largest)"
            )
            raise ConfigurationError(_fault(config, choice.name, fault))
