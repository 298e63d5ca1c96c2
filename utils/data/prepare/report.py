"""The report of a preparation: what came out, as numbers to store and as lines to read."""

import unicodedata
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from utils.data.prepare.plan import WorkUnit
from utils.data.prepare.units import SplitCounts, UnitCounts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
EXAMPLE_TOKENS = 256


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
    ranks = {p: max(1, -(-p * int(reached[-1]) // 100)) for p in PERCENTILES}
    found = {f"p{p}": int(values[np.searchsorted(reached, rank)]) for p, rank in ranks.items()}
    return {**found, "max": int(values[-1])}


def report_lines(counts: UnitCounts, splits: Sequence[str]) -> list[str]:
    """Return the table of splits and what was dropped, truncated and cut."""
    names = [*(f"p{p}" for p in PERCENTILES), "max"]
    header = ("documents", "tokens", "loss tokens", "bytes/token", *names)
    lines = [f"{'split':<12}" + "".join(f"{name:>15}" for name in header[:4]) + _cells(names)]
    for split in splits:
        figures = split_figures(counts.splits.get(split, SplitCounts()))
        percentiles = figures["length_percentiles_tokens"]
        lines.append(
            f"{split:<12}{figures['documents']:>15,}{figures['tokens']:>15,}"
            f"{figures['loss_token_share']:>15.1%}{figures['bytes_per_token']:>15.2f}"
            + _cells([f"{percentiles.get(name, 0):,}" for name in names])
        )
    dropped = ", ".join(f"{n:,} {reason}" for reason, n in sorted(counts.dropped.items()))
    lines.append("(p1 to max: tokens of a document)")
    lines.append(f"dropped: {dropped or 'none'}; truncated: {counts.truncated:,}")
    if counts.continued:
        lines.append(f"very long texts were cut into {counts.continued:,} further documents")
    if counts.without_earlier_thinking:
        lines.append(
            f"thinking of earlier turns: left out by the chat template in "
            f"{counts.without_earlier_thinking:,} chats, as it is when the model is used; to train "
            "on all of it, give each of these chats once for every turn"
        )
    return [*lines, *(f"  dropped {example}" for example in counts.examples)]


def _cells(texts: Sequence[str]) -> str:
    return "".join(f"{text:>10}" for text in texts)


def source_lines(units: Sequence[WorkUnit], counts: Mapping[int, UnitCounts]) -> list[str]:
    """Return what came of each source, where there are several."""
    lines = []
    for _, group in groupby(units, key=lambda unit: unit.source):
        own = list(group)
        splits = UnitCounts.total(counts[unit.index] for unit in own).splits
        written = "; ".join(
            f"{name} {split.documents:,} documents, {split.tokens:,} tokens"
            for name, split in splits.items()
        )
        lines.append(f"from {own[0].parts[0].file.path}: {written or 'nothing'}")
    return lines if len(lines) > 1 else []


def read_example(file: Path, mask_column: str | None) -> tuple[list[int], list[bool]]:
    """Return the first tokens of an Arrow file's first document, and which are trained on."""
    with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
        batch = stream.read_next_batch()
        ids = batch.column("input_ids")[0].values[:EXAMPLE_TOKENS].to_pylist()
        if mask_column is None:
            return ids, [True] * len(ids)
        return ids, batch.column(mask_column)[0].values[:EXAMPLE_TOKENS].to_pylist()


def decoded_example(
    tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int], is_trained: Sequence[bool]
) -> str:
    """Decode ids with [[ ]] around the text that is trained on; control characters are escaped."""
    parts = []
    for trained, group in groupby(zip(ids, is_trained, strict=True), key=lambda pair: pair[1]):
        text = _visible(str(tokenizer.decode([token for token, _ in group])))
        parts.append(f"[[{text}]]" if trained else text)
    return "".join(parts)


def _visible(text: str) -> str:
    """Escape what could steer a terminal; line ends stay."""
    return "".join(
        character
        if character == "\n" or unicodedata.category(character) not in ("Cc", "Cf")
        else character.encode("unicode_escape").decode()
        for character in text
    )
