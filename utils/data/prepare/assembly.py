"""The report of a preparation: what came out, as numbers to store and as lines to read."""

import hashlib
import logging
import os
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from utils.config.errors import ConfigurationError
from utils.data.prepare.chats import end_of_turn_id, masks_from
from utils.data.prepare.plan import PreparationPlan
from utils.data.prepare.sources import WorkUnit
from utils.data.prepare.tokenization import MASK_COLUMNS
from utils.data.prepare.unit import EXAMPLES_KEPT, TRAIN, SplitCounts, UnitCounts, write_layout
from utils.data.prepare.workspace import Workspace
from utils.data.token_dataset import TokenDataset, describe_split
from utils.data.tokenizers import chat_template_sha256, id_type, tokenizer_sha256, vocabulary_size

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


# Assembly: the finished units of all shards become one dataset per split.

logger = logging.getLogger(__name__)

SOURCES_LISTED = 100


def finished_counts(
    units: Sequence[WorkUnit], workspace: Workspace, shards: int
) -> dict[int, UnitCounts]:
    """Return the counts of every unit; raises ConfigurationError naming incomplete shards."""
    counts: dict[int, UnitCounts] = {}
    missing: defaultdict[int, int] = defaultdict(int)
    for unit in units:
        found = workspace.counts_of(unit.index)
        if found is None:
            missing[unit.index % shards] += 1
        else:
            counts[unit.index] = found
    if missing:
        raise ConfigurationError(
            [
                f"shard {shard}/{shards} is incomplete, {number} of its work units are missing: "
                f"run it (again) with --shard {shard}/{shards}"
                for shard, number in sorted(missing.items())
            ]
        )
    return counts


def check_every_split_has_documents(
    splits: Sequence[str], counts: Mapping[int, UnitCounts]
) -> None:
    """Raise ConfigurationError naming each split for which no document is left."""
    problems = [
        f"{split}: no document is left for this split; give more documents, another "
        "--validation_fraction, or see above what was dropped"
        for split in splits
        if not any(split in unit.splits for unit in counts.values())
    ]
    if problems:
        raise ConfigurationError(problems)


def move_files(
    split: str, output_dir: Path, workspace: Workspace, counts: Mapping[int, UnitCounts]
) -> list[Path]:
    """Move the Arrow files of a split to where they belong, in the order of the units.

    Safe to repeat: a file that an interrupted run has moved already stays. Raises
    ConfigurationError when a file is missing or not as long as it was written.
    """
    units = [unit for unit in sorted(counts) if split in counts[unit].splits]
    directory = output_dir / split
    directory.mkdir(parents=True, exist_ok=True)
    moved = []
    for number, unit in enumerate(units):
        target = directory / f"data-{number:05d}-of-{len(units):05d}.arrow"
        source = workspace.unit_file(unit, split)
        found = source if source.exists() else target
        expected = counts[unit].splits[split].file_bytes
        actual = found.stat().st_size if found.exists() else 0
        if actual != expected:
            raise ConfigurationError(
                f"{found}: has {actual:,} bytes where {expected:,} were written: remove "
                f"{workspace.root} and {directory} and prepare again"
            )
        if source.exists():
            source.replace(target)
        moved.append(target)
    return moved


def place_tokenizer(workspace: Workspace, output_dir: Path) -> None:
    """Move the tokenizer beside the splits, unless an interrupted run has done so."""
    target = output_dir / "tokenizer"
    if workspace.tokenizer.exists() and not target.exists():
        os.replace(workspace.tokenizer, target)  # noqa: PTH105 - folders, on one file system


def describe(
    plan: PreparationPlan,
    digest: str,
    split: str,
    files: Sequence[Path],
    counts: Mapping[int, UnitCounts],
    tokenizer: "PreTrainedTokenizerBase",
) -> None:
    """Make the files of a split a dataset: layout, statistics and stoker.json; show an example.

    digest: what stands for the preparation as a whole. Raises ConfigurationError when the files
    do not hold what was counted while they were written.
    """
    directory = files[0].parent
    mask_column = MASK_COLUMNS[plan.settings.document_format]
    # Each split has a fingerprint of its own: `datasets` keys its caches by it.
    fingerprint = hashlib.sha256(f"{digest} {split}".encode()).hexdigest()
    write_layout(
        directory, [file.name for file in files], id_type(tokenizer), mask_column, fingerprint
    )
    ids, bears_loss = read_example(files[0], mask_column)
    if split == TRAIN:
        shown = decoded_example(tokenizer, ids, bears_loss, example_marks())
        logger.info("an example, with marks around what bears loss:\n%s", shown)
    counted = total_counts(counts.values()).splits[split]
    preparation = {
        "settings_sha256": digest,
        "settings": asdict(plan.settings),
        "sources": _sources_of(plan, split, counts),
        **split_figures(counted),
        "example": decoded_example(tokenizer, ids, bears_loss),
        "loss_masks": masks_from(tokenizer) if plan.needs_chat_template else None,
        "end_of_turn_token_id": end_of_turn_id(tokenizer) if plan.needs_chat_template else None,
    }
    dataset = describe_split(
        directory,
        tokenizer={
            "path": "../tokenizer",
            "sha256": tokenizer_sha256(tokenizer),
            "vocabulary_size": vocabulary_size(tokenizer),
        },
        chat_template_sha256=chat_template_sha256(tokenizer) if plan.needs_chat_template else None,
        preparation=preparation,
    )
    _check_against_counts(dataset, counted)


def _check_against_counts(dataset: TokenDataset, counted: SplitCounts) -> None:
    """Hold a measured split against what its shards counted; say that it fits, or raise."""
    found = dataset.statistics
    if (found.documents, found.tokens) != (counted.documents, counted.tokens):
        raise ConfigurationError(
            f"{dataset.path}: holds {found.documents:,} documents and {found.tokens:,} tokens, but "
            f"{counted.documents:,} and {counted.tokens:,} were counted as they were written: the "
            "storage changed or lost data; remove the folder and prepare again"
        )
    logger.info(
        "%s: %s documents, %s tokens, as counted while tokenizing; fingerprint %s",
        *(dataset.path.name, f"{found.documents:,}", f"{found.tokens:,}"),
        dataset.fingerprint[:16],
    )


def _sources_of(
    plan: PreparationPlan, split: str, counts: Mapping[int, UnitCounts]
) -> dict[str, Any]:
    """Return where the documents of a split come from and what was left out on the way.

    The validation split shares the sources of the training split.
    """
    origin = split if split in plan.sources else TRAIN
    files = plan.sources[origin]
    total = total_counts(counts[unit.index] for unit in plan.units if unit.split == origin)
    return {
        "files": len(files),
        "bytes": sum(file.size for file in files),
        "first_files": {file.path: file.size for file in files[:SOURCES_LISTED]},
        "dropped": total.dropped,
        "dropped_examples": total.examples,
        "truncated": total.truncated,
        "continued": total.continued,
        "without_earlier_thinking": total.without_earlier_thinking,
    }
