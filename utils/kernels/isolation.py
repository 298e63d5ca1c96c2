"""The leak probe: proof, on the user's own architecture, that packed documents stay apart."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig, PreTrainedModel

from utils.config.errors import ConfigurationError
from utils.kernels.probe_model import VOCABULARY, build_probe_model, observe_attention, probe_config

# Two rows of three and two documents and a tail each; lengths differ so that nothing lines up.
ROWS = ((7, 5, 9, 3), (4, 13, 7))
# One document a row and a tail.
WHOLE_ROWS = ((17, 7), (24,))
ROW_LENGTH = sum(ROWS[0])
# Documents of the equivalence check are longer than this window, so that it cuts.
WINDOW = 4
TOLERANCE = 1e-4
RUN_ON_CPU = ("packed_varlen", "sdpa", "eager")


@dataclass(frozen=True)
class IsolationReport:
    """What was checked: `documents` were perturbed one at a time on a small random model."""

    model_type: str
    attn_implementation: str
    documents: int
    seconds: float


def check_isolation(
    model_config: PretrainedConfig,
    attn_implementation: str,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    whole_rows: bool = False,
) -> IsolationReport:
    """Prove that no packed document changes another's logits, bit for bit.

    Builds a small random model of the user's architecture (`model_config` as training will use it,
    `use_cache` included) on `device` in `dtype`, the type that training computes in, packs
    documents and perturbs each one in turn. Then, where `attn_implementation` also runs on the CPU,
    compares the packed logits with those of each document alone under eager attention, in fp32 and
    with windows cut short. `whole_rows`: rows of one document, for which there is a path of their
    own, are perturbed as well; the padding behind a document may see it. The state of the random
    number generators stays as it was. Raises ConfigurationError on a leak or a difference.
    """
    started = time.perf_counter()
    config = probe_config(model_config)
    model = build_probe_model(config, attn_implementation, device, dtype)
    for rows in (ROWS, WHOLE_ROWS) if whole_rows else (ROWS,):
        batch = {name: _to(value, device) for name, value in packed_batch(rows).items()}
        _check_leaks(model, batch, rows)
    if attn_implementation in RUN_ON_CPU:
        _check_equivalence(config, attn_implementation)
    seconds = time.perf_counter() - started
    documents = len(list(_segments(ROWS)))
    return IsolationReport(config.model_type, attn_implementation, documents, seconds)


Rows = tuple[tuple[int, ...], ...]


def packed_batch(rows: Rows = ROWS) -> dict[str, torch.Tensor | int]:
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
    ends = torch.tensor([0, *segments, *[0] * missing], dtype=torch.int32).cumsum(
        0, dtype=torch.int32
    )
    positions = torch.cat([torch.arange(length) for length in segments]).view(shape)
    return {
        "input_ids": input_ids,
        "position_ids": positions,
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": ROW_LENGTH,
        "max_length_k": ROW_LENGTH,
    }


def _segments(rows: Rows) -> Iterator[tuple[int, int, int]]:
    """Yield (row, start, stop) of every segment, tails included."""
    for row, lengths in enumerate(rows):
        start = 0
        for length in lengths:
            yield row, start, start + length
            start += length


def _to(value: torch.Tensor | int, device: torch.device | str) -> torch.Tensor | int:
    return value.to(device) if isinstance(value, torch.Tensor) else value


@torch.no_grad()
def _logits(model: PreTrainedModel, batch: dict[str, torch.Tensor | int]) -> torch.Tensor:
    try:
        return model(**batch).logits
    except ConfigurationError:
        raise
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ConfigurationError(
            f"model type {model.config.model_type!r} does not take packed batches ({error}); "
            "use a model whose layers are all attention"
        ) from error


def _check_leaks(
    model: PreTrainedModel, batch: dict[str, torch.Tensor | int], rows: Rows = ROWS
) -> None:
    """Perturb the first token of each segment in turn: its own later logits change, no others."""
    reference = _logits(model, batch)
    name, attention = model.config.model_type, model.config._attn_implementation
    tokens = batch["input_ids"]
    assert isinstance(tokens, torch.Tensor)
    for row, start, stop in _segments(rows):
        perturbed = tokens.clone()
        perturbed[row, start] = VOCABULARY - 1
        changed = (_logits(model, {**batch, "input_ids": perturbed}) != reference).any(dim=-1)
        if not changed[row, start + 1 : stop].any():
            raise ConfigurationError(
                f"model type {name!r} under --attn_implementation {attention}: a changed token "
                "left the later logits of its own document unchanged, so nothing can be said about "
                "leaks between documents; use --attn_implementation sdpa or eager"
            )
        own = ROW_LENGTH if rows is WHOLE_ROWS else stop
        changed[row, start:own] = False
        if changed.any():
            raise ConfigurationError(_leak_message(model.config, attention))


def _leak_message(config: PretrainedConfig, attention: str) -> str:
    advice = "use a model whose layers are all attention"
    if attention != "packed_varlen" and observe_attention(config) is not None:
        advice = "use --attn_implementation packed_varlen"
        if getattr(config, "use_cache", False):
            advice += ", or set use_cache to false, which keeps the masks from seeing the packing"
    return (
        f"model type {config.model_type!r} under --attn_implementation {attention} lets packed "
        f"documents see each other: perturbing one changed another's logits. To train it, {advice}"
    )


def _check_equivalence(config: PretrainedConfig, attn_implementation: str) -> None:
    """Compare packed logits with those of each document alone under eager attention."""
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(config, name, None):
            setattr(config, name, WINDOW)
    batch = packed_batch()
    packed = _logits(build_probe_model(config, attn_implementation), batch)
    alone = build_probe_model(config, "eager")
    tokens = batch["input_ids"]
    assert isinstance(tokens, torch.Tensor)
    for row, start, stop in _segments(ROWS):
        expected = _logits(alone, {"input_ids": tokens[row : row + 1, start:stop]})[0]
        worst = (packed[row, start:stop] - expected).abs().max() / expected.abs().max()
        if not worst < TOLERANCE:
            other = "sdpa" if attn_implementation == "packed_varlen" else "packed_varlen"
            raise ConfigurationError(
                f"model type {config.model_type!r}: --attn_implementation {attn_implementation} "
                f"computes other logits than eager attention does (by {worst:.1e} of the largest); "
                f"its layers need what this attention leaves out; try --attn_implementation {other}"
            )
