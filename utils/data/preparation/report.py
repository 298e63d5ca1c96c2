"""The report of a preparation: what came out, as numbers to store and as lines to read."""

import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from utils.data.preparation.unit import EXAMPLES_KEPT, SplitCounts, UnitCounts
from utils.data.preparation.work_units import WorkUnit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
EXAMPLE_TOKENS = 256
LOSS_OPENS, LOSS_CLOSES = "[[", "]]"
GREEN, RESET = "\033[32m", "\033[0m"


def total_counts(counts: Iterable[UnitCounts]) -> UnitCounts:
    """Add up the counts of units."""
    total = UnitCounts()
    for unit in counts:
        for split, added in unit.splits.items():
            _add(total.splits.setdefault(split, SplitCounts()), added)
        for reason, number in unit.dropped.items():
            total.dropped[reason] = total.dropped.get(reason, 0) + number
        total.examples = [*total.examples, *unit.examples][:EXAMPLES_KEPT]
        total.truncated += unit.truncated
        total.continued += unit.continued
        total.without_earlier_thinking += unit.without_earlier_thinking
    return total


def _add(total: SplitCounts, added: SplitCounts) -> None:
    total.documents += added.documents
    total.tokens += added.tokens
    total.loss_tokens += added.loss_tokens
    total.text_bytes += added.text_bytes
    total.file_bytes += added.file_bytes
    for length, documents in added.lengths.items():
        total.lengths[length] = total.lengths.get(length, 0) + documents


def split_figures(counts: SplitCounts) -> dict[str, Any]:
    """Return the figures of a split under names that carry their units."""
    return {
        "documents": counts.documents,
        "tokens": counts.tokens,
        "loss_tokens": counts.loss_tokens,
        "loss_token_share": counts.loss_tokens / max(counts.tokens, 1),
        "text_bytes": counts.text_bytes,
        "bytes_per_token": counts.text_bytes / max(counts.tokens, 1),
        "length_percentiles_tokens": length_percentiles(counts.lengths),
    }


def length_percentiles(lengths: Mapping[int, int]) -> dict[str, int]:
    """Return percentiles of document lengths in tokens, by nearest rank, from a histogram."""
    if not lengths:
        return {}
    values = np.array(sorted(lengths), dtype=np.int64)
    reached = np.cumsum([lengths[int(value)] for value in values])
    ranks = [max(1, -(-p * int(reached[-1]) // 100)) for p in PERCENTILES]
    found = {
        f"p{p}": int(values[np.searchsorted(reached, rank)])
        for p, rank in zip(PERCENTILES, ranks, strict=True)
    }
    return {**found, "max": int(values[-1])}


def report_lines(counts: UnitCounts, splits: Sequence[str]) -> list[str]:
    """Return the table of splits and what was dropped, truncated and cut."""
    names = [*(f"p{p}" for p in PERCENTILES), "max"]
    header = ("split", "documents", "tokens", "loss-bearing", "bytes/token", *names)
    rows = [header]
    for split in splits:
        figures = split_figures(counts.splits.get(split, SplitCounts()))
        percentiles = figures["length_percentiles_tokens"]
        rows.append(
            (
                split,
                f"{figures['documents']:,}",
                f"{figures['tokens']:,}",
                f"{figures['loss_token_share']:.1%}",
                f"{figures['bytes_per_token']:.2f}",
                *(f"{percentiles.get(name, 0):,}" for name in names),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return [*lines, "(p1 to max: tokens of a document)", *_loss_lines(counts)]


def source_lines(units: Sequence[WorkUnit], counts: Mapping[int, UnitCounts]) -> list[str]:
    """Return what came of each source, where there are several."""
    by_source: dict[int, list[WorkUnit]] = {}
    for unit in units:
        by_source.setdefault(unit.source, []).append(unit)
    if len(by_source) < 2:
        return []
    lines = []
    for own in by_source.values():
        splits = total_counts(counts[unit.index] for unit in own).splits
        written = "; ".join(
            f"{name} {split.documents:,} documents, {split.tokens:,} tokens"
            for name, split in splits.items()
        )
        lines.append(f"from {own[0].pieces[0].file.path}: {written or 'nothing'}")
    return lines


def _loss_lines(counts: UnitCounts) -> list[str]:
    dropped = ", ".join(f"{n:,} {reason}" for reason, n in sorted(counts.dropped.items()))
    lines = [f"dropped: {dropped or 'none'}; truncated: {counts.truncated:,}"]
    if counts.continued:
        lines.append(
            f"cut: very long texts were continued in {counts.continued:,} further documents"
        )
    if counts.without_earlier_thinking:
        lines.append(
            f"thinking of earlier turns: left out by the chat template in "
            f"{counts.without_earlier_thinking:,} chats, as it is when the model is used; to train "
            "on all of it, give each of these chats once for every turn"
        )
    lines.extend(f"  dropped {example}" for example in counts.examples)
    return lines


def read_example(file: Path, mask_column: str | None) -> tuple[list[int], list[bool]]:
    """Return the beginning of the first document of an Arrow file: its ids and what bears loss."""
    with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
        batch = stream.read_next_batch()
        ids = batch.column("input_ids")[0].values[:EXAMPLE_TOKENS].to_pylist()
        if mask_column is None:
            return ids, [True] * len(ids)
        mask = batch.column(mask_column)[0].values[:EXAMPLE_TOKENS].to_pylist()
    return ids, [bool(bears) for bears in mask]


def decoded_example(
    tokenizer: "PreTrainedTokenizerBase",
    ids: Sequence[int],
    bears_loss: Sequence[bool],
    marks: tuple[str, str] = (LOSS_OPENS, LOSS_CLOSES),
) -> str:
    """Decode ids with the loss-bearing text between marks; control characters are escaped."""
    parts = []
    start = 0
    for position in range(1, len(ids) + 1):
        if position == len(ids) or bears_loss[position] != bears_loss[start]:
            text = _visible(str(tokenizer.decode(list(ids[start:position]))))
            parts.append(f"{marks[0]}{text}{marks[1]}" if bears_loss[start] else text)
            start = position
    return "".join(parts)


def example_marks() -> tuple[str, str]:
    """Return colour codes on a terminal and brackets elsewhere."""
    return (GREEN, RESET) if sys.stderr.isatty() else (LOSS_OPENS, LOSS_CLOSES)


def _visible(text: str) -> str:
    """Escape what could steer a terminal; line ends stay."""
    return "".join(
        character
        if character == "\n" or unicodedata.category(character) not in ("Cc", "Cf")
        else character.encode("unicode_escape").decode()
        for character in text
    )
