"""Assembly: the finished units of all shards become one dataset per split."""

import hashlib
import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.config.errors import ConfigurationError
from utils.data.preparation.chats import end_of_turn_id, masks_from
from utils.data.preparation.plan import PreparationPlan
from utils.data.preparation.report import (
    decoded_example,
    example_marks,
    read_example,
    split_figures,
    total_counts,
)
from utils.data.preparation.token_files import write_layout
from utils.data.preparation.tokenization import MASK_COLUMNS
from utils.data.preparation.unit import TRAIN, SplitCounts, UnitCounts
from utils.data.preparation.work_units import WorkUnit
from utils.data.preparation.workspace import Workspace
from utils.data.token_dataset import TokenDataset, describe_split
from utils.data.tokenizers import chat_template_sha256, id_type, tokenizer_sha256, vocabulary_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
