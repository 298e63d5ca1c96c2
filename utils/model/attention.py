"""The choice of a run's attention, and a test that packed documents do not see each other.

Before weights load, the test runs on a small model of the user's architecture, on the training
device. The run uses the first attention that passes the test.
"""

import copy
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
from utils.model.architecture import MODEL_ERRORS, causal_lm_class, error_text, layer_settings
from utils.model.probe import (
    CPU,
    VOCABULARY,
    ProbeError,
    build_probe_model,
    observe_attention,
    probe_config,
    tolerance,
)

PER_TOKEN = ("input_ids", "labels", "position_ids")
BOUNDARIES = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
MASK_COST = (
    "transformers builds a block mask from position_ids, whose memory grows with the square of the "
    "sequence length"
)
FLEX = "flex_attention"
RUN_ANYWHERE = (NAME, "sdpa", "eager")
UNDECIDED = "open"  # kernel in a plan for another machine, which chooses the kernel later
ONE_A_ROW = "set --packing none (one document a sequence, so that there is nothing to leak)"
ONE_DOCUMENT = "{}: each sequence is one document, as --packing none has it"
KERNELS = (
    "install GPU kernels for its recurrent layers (flash-linear-attention and causal-conv1d, or "
    "mamba-ssm and causal-conv1d), with which this check decides anew"
)

Rows = tuple[tuple[int, ...], ...]
# Two packed sequences for `check_isolation`. Each has the lengths of its documents and, at the end,
# the length of its padding. All documents have different lengths.
PROBE_LENGTHS = ((7, 5, 9, 3), (4, 13, 7))
# Two sequences of one document each. The first ends in padding.
WHOLE_ROWS = ((17, 7), (24,))
FULL_ROW = ((24,),)  # one document without padding, for which transformers may build no mask
# Settings for the comparison with eager attention. They are smaller than the documents, so that
# windows hide tokens, and sparse attention (DeepSeek) selects tokens or blocks.
SMALL_SETTINGS = {
    "sliding_window": 4, "attention_chunk_size": 4, "compress_rates": 4, "index_topk": 2,
    "index_topk_blocks": 2,
}  # fmt: skip
# Factors for the lengths of documents and the number of sequences under sparse attention. With few
# tokens many scores would be equal.
LENGTH_FACTOR, ROW_FACTOR = 4, 4
ATTENTION_TOLERANCE = 1e-4


@dataclass(frozen=True)
class AttentionChoice:
    """The attention of a run: its name in transformers, its kernel, and the reason to log."""

    name: str
    kernel: str
    reason: str
    batches: str = "packed"  # the shape of the model's inputs, see `shape_inputs`
    unproved: str = ""  # why `check_isolation` could not run

    @property
    def proof(self) -> str:
        """Return what `check_isolation` found, or why it could not run, as text for the log."""
        plain = self.batches == "plain"
        found = "no document sees the padding" if plain else "keeps packed documents apart"
        return self.unproved or found


def attention_choices(
    requested: str | None,
    model_config: PretrainedConfig,
    needs: AttentionNeeds | str,
    device_type: str,
    dtype: torch.dtype,
    whole_rows: bool = False,
) -> Iterator[AttentionChoice]:
    """Yield the best attention for packed training, then the fallbacks to try if the best fails.

    requested: --attn_implementation, an attention of transformers or a kernel for Stoker's
    attention `packed_varlen`. needs: the result of `observe_attention`. dtype: the type that
    training computes in. whole_rows: each sequence has at most one document.

    With `whole_rows` the fallbacks are sdpa, eager or both, without document boundaries, because
    causal attention never sees the padding after a document. Without `whole_rows` there are
    fallbacks only if no attention is requested. They use a block mask. Raises ConfigurationError if
    the requested attention cannot run.
    """
    name, model_class = requested or "auto", causal_lm_class(model_config)
    class_name = model_class.__name__
    own = own_attention(requested, model_config, needs)
    if name == FLEX and device_type == "cpu":
        raise ConfigurationError(
            f"--attn_implementation {FLEX}: torch computes its gradients on a GPU only; leave it "
            "out for a CPU."
        )
    if isinstance(needs, AttentionNeeds) and name not in ("sdpa", "eager", FLEX):
        first = _choose_packed(name, device_type, dtype, needs, whole_rows)
    elif name == "auto":
        first = AttentionChoice(own, own, f"auto: {own}, as {needs}; {MASK_COST}")
    elif name == own or (name == FLEX and model_class._supports_flex_attn):
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
            reason = f"{ONE_DOCUMENT.format(kind)}; no mask is made"
            yield AttentionChoice(kind, kind, reason, batches="plain")
        elif name == "auto" and kind != first.name:
            reason = f"auto: {kind}, as {class_name} needs its own masks; {MASK_COST}"
            yield AttentionChoice(kind, kind, reason, "flat" if recurrent else "packed")


def own_attention(
    requested: str | None, model_config: PretrainedConfig, needs: AttentionNeeds | str | None
) -> str:
    """Return "sdpa", or "eager" if eager is requested or the model does not support SDPA."""
    # SDPA has neither soft caps nor sinks.
    special = isinstance(needs, AttentionNeeds) and (needs.softcap or needs.sinks)
    sdpa = causal_lm_class(model_config)._supports_sdpa and not special
    return "sdpa" if sdpa and requested != "eager" else "eager"


def _choose_packed(
    name: str, device_type: str, dtype: torch.dtype, needs: AttentionNeeds, whole_rows: bool
) -> AttentionChoice:
    """Choose a kernel and register it in transformers under the name `packed_varlen`.

    name: the requested kernel. "auto" and "packed_varlen" request the fastest kernel. Raises
    ConfigurationError if the requested kernel cannot run on this host.
    """
    usable, refusals = find_kernels(device_type, dtype, needs, whole_rows)
    matching = [kernel for kernel in usable if name in ("auto", NAME, kernel.name)]
    if not matching:
        why = f" ({'; '.join(refusals)})" if refusals else ""
        raise ConfigurationError(
            f"--attn_implementation {name} cannot run on {device_type} here{why}: it needs an "
            "NVIDIA GPU, its package built for this torch, and --bf16 true."
        )
    kernel = matching[0]
    register_packed_varlen(kernel)
    where = device_type.upper()
    if kernel is PER_DOCUMENT and refusals:
        where += f"; {'; '.join(refusals)}"
    return AttentionChoice(NAME, kernel.name, f"{name}: {NAME} through {kernel.label} ({where})")


def shape_inputs(inputs: dict[str, Any], batches: str) -> dict[str, Any]:
    """Return the inputs of packed sequences (B, T) in the form that the model needs.

    batches: "packed" keeps `inputs` unchanged. "plain", for sequences of one document, removes the
    document boundaries. "flat", for recurrent layers, makes one sequence, (1, B * T), and adds the
    document index of each token as `seq_idx`.
    """
    if batches == "packed":
        return inputs
    if batches == "plain":
        return {name: value for name, value in inputs.items() if name not in BOUNDARIES}
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
    """Raise ConfigurationError if Llama 4 would scale queries by positions in a packed sequence.

    Llama 4 scales queries from token `floor_scale` of a sequence on, even if a document begins
    later. Tokens are counted from 1.
    """
    text = model_config.get_text_config(decoder=True)
    first = getattr(text, "floor_scale", None)
    if first and text.attn_temperature_tuning and sequence_length >= first:
        raise ConfigurationError(
            f"--sequence_length {sequence_length:,}: {text.model_type} scales its attention from "
            f"token {first:,} of a sequence on (floor_scale), wherever a packed document begins. "
            f"To train it, {ONE_A_ROW}, or shorten the sequences."
        )


def choose_isolated_attention(
    requested: str | None,
    model_config: PretrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    whole_rows: bool,
) -> AttentionChoice:
    """Return the first attention of `attention_choices` that passes `check_isolation`.

    For the arguments see `attention_choices`. Raises ConfigurationError if no attention passes. If
    no small model runs on `device`, the check is impossible. In this case raise ProbeError, but
    return an unchecked attention if `whole_rows` is True.
    """
    refusals: list[ConfigurationError] = []
    try:
        try:
            probe = probe_config(model_config, device)
        except ProbeError as error:
            if not whole_rows:
                raise
            kind = own_attention(requested, model_config, None)
            unproved = f"not checked: {error.problems[0]}"
            return AttentionChoice(kind, kind, ONE_DOCUMENT.format(kind), "plain", unproved)
        needs = observe_attention(probe, device)
        for choice in attention_choices(
            requested, model_config, needs, device.type, dtype, whole_rows=whole_rows
        ):
            try:
                check_isolation(probe, choice, device, dtype)
            except ConfigurationError as error:
                refusals.append(error)
            else:
                return choice
    except ConfigurationError as error:
        refusals.append(error)
    remedies = ["leave --attn_implementation out"] if requested not in (None, "auto") else []
    remedies += [] if whole_rows else [ONE_A_ROW]
    remedies += [KERNELS] if is_recurrent(model_config) else []
    if getattr(model_config, "is_decoder", None) is False:  # an encoder
        remedies.insert(0, "set is_decoder: true in its config")
    remedies += ["take another model"]
    first = refusals[0]  # why the best attention is refused
    advice = f"To train it, {', or '.join(remedies)}."
    raise type(first)(f"{first.problems[0]} {advice}") from first


def check_isolation(
    config: PretrainedConfig, choice: AttentionChoice, device: torch.device, dtype: torch.dtype
) -> None:
    """Check that a changed token of one document changes no logit of another document.

    `config` is the small model's configuration, made by `probe_config`. The model runs on `device`
    in `dtype`, the type that training computes in. If the attention also runs in float32, its
    logits are compared with eager attention on each document alone. Raises ConfigurationError if
    documents see each other or the logits differ, and ProbeError if the model does not run.
    """
    row_sets: tuple[Rows, ...] = (PROBE_LENGTHS, FULL_ROW)
    if choice.kernel == ROW_SDPA:
        row_sets = (PROBE_LENGTHS, WHOLE_ROWS, FULL_ROW)
    elif choice.batches == "plain":
        row_sets = (WHOLE_ROWS, FULL_ROW)
    subject = f"model type {config.model_type!r} under --attn_implementation {choice.name}"
    fault = ""
    try:
        model = build_probe_model(config, choice.name, device, dtype)
        for rows in row_sets:
            fault = fault or _find_leak(model, rows, choice.batches)
        if not fault and choice.name in RUN_ANYWHERE:
            fault = _compare_with_eager(config, choice, row_sets[0], device)
    except MODEL_ERRORS as error:
        raise ProbeError(
            f"{subject} does not run on the check's batches ({error_text(error)})."
        ) from (error)
    if fault:
        raise ConfigurationError(f"{subject} {fault}.")


def packed_batch(rows: Rows = PROBE_LENGTHS, device: torch.device = CPU) -> dict[str, Any]:
    """Return model inputs of random packed sequences. rows: each sequence's document lengths."""
    generator = torch.Generator().manual_seed(0)
    row_length = sum(rows[0])
    shape = (len(rows), row_length)
    # Leave out 0, the padding id with an embedding of zeros, and the last id, for `_find_leak`.
    input_ids = torch.randint(1, VOCABULARY - 1, shape, generator=generator)
    for row, lengths in enumerate(rows):
        if len(lengths) > 1:
            input_ids[row, -lengths[-1] :] = 1
    segments = [length for row in rows for length in row]
    missing = len(rows) * max(map(len, rows)) - len(segments)
    ends = torch.tensor([0, *segments, *[0] * missing]).cumsum(0, dtype=torch.int32).to(device)
    positions = torch.cat([torch.arange(length) for length in segments]).view(shape)
    return {
        "input_ids": input_ids.to(device), "position_ids": positions.to(device),
        "cu_seq_lens_q": ends, "cu_seq_lens_k": ends,
        "max_length_q": row_length, "max_length_k": row_length,
    }  # fmt: skip


def _segments(rows: Rows) -> Iterator[tuple[int, int, int]]:
    """Yield (sequence index, first token, last token + 1) of each document and of the padding."""
    for row, lengths in enumerate(rows):
        start = 0
        for length in lengths:
            yield row, start, start + length
            start += length


@torch.no_grad()
def _logits(model: PreTrainedModel, batch: dict[str, Any], batches: str) -> torch.Tensor:
    """Return the logits (B, T, vocabulary) of a packed batch. See `shape_inputs` for `batches`."""
    logits = model(**shape_inputs(batch, batches)).logits
    return logits.view(*batch["input_ids"].shape, -1) if batches == "flat" else logits


def _find_leak(model: PreTrainedModel, rows: Rows, batches: str) -> str:
    """Change one token of a packed batch at a time; return a text on the first wrong effect, or "".

    The changed tokens are the first and the last token of each document. Only logits from the
    changed token to the end of its document may change.
    """
    batch = packed_batch(rows, model.device)
    reference = _logits(model, batch, batches)
    for row, start, stop in _segments(rows):
        for position in (start, stop - 1):
            perturbed = batch["input_ids"].clone()
            perturbed[row, position] = VOCABULARY - 1
            logits = _logits(model, {**batch, "input_ids": perturbed}, batches)
            changed = (logits != reference).any(dim=-1)
            earlier = changed[row, start:position].any()
            later = position > start or changed[row, start + 1 : stop].any()
            # In a sequence of one document, padding may see the document.
            changed[row, start : None if rows is WHOLE_ROWS else stop] = False
            if changed.any():
                return (
                    "lets packed documents see each other: a changed token changed others' logits"
                )
            if earlier:
                return "lets tokens see those that follow: a changed token changed earlier logits"
            if not later:
                return "passes nothing on: a changed token changed no later logits of its document"
    return ""


def _shrink_settings(config: PretrainedConfig) -> None:
    settings = layer_settings(config)
    config.per_layer_config = None
    for name, small in SMALL_SETTINGS.items():
        if value := getattr(config, name, None):
            setattr(config, name, dict.fromkeys(value, small) if isinstance(value, dict) else small)
        for own in settings.values():
            if own.get(name):
                own[name] = small
    if settings:
        config.per_layer_config = settings


def _compare_with_eager(
    config: PretrainedConfig, choice: AttentionChoice, rows: Rows, device: torch.device
) -> str:
    """Compare float32 logits of packed rows with eager attention; return an error text or "".

    Eager attention computes each document of `rows` alone.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    _shrink_settings(text)
    if getattr(text, "index_topk", None):
        rows = ROW_FACTOR * tuple(tuple(LENGTH_FACTOR * length for length in row) for row in rows)
    batch = packed_batch(rows, device)
    model = build_probe_model(config, choice.name, device)
    eager = build_probe_model(config, "eager", device)
    together = _logits(model, batch, choice.batches)
    for row, start, stop in _segments(rows):
        if start and choice.batches == "plain":
            continue  # padding, which may see the document before it
        document = {"input_ids": batch["input_ids"][row : row + 1, start:stop]}
        expected = _logits(eager, document, "packed")[0]
        worst = (together[row, start:stop] - expected).abs().max() / expected.abs().max()
        if not worst < tolerance(device, ATTENTION_TOLERANCE):
            return (
                f"computes other logits than eager attention does (by {worst:.1e} of the largest)"
            )
    return ""
