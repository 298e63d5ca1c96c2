"""The preparation of token datasets: plan, tokenizer, work units, and their assembly."""

import hashlib
import json
import logging
import os
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from utils.config.errors import ConfigurationError
from utils.config.preparation import PreparationArguments, check_preparation, shard_of
from utils.data.columns import TOKENS, open_columns
from utils.data.prepare.plan import TRAIN, WorkUnit, plan_preparation
from utils.data.prepare.tokenization import MASK_COLUMNS, choose_backend
from utils.data.prepare.tokenizer import (
    end_of_turn_id,
    given_tokenizer,
    masks_from,
    save_tokenizer,
    tokenizer_identity,
    trained_tokenizer,
)
from utils.data.prepare.units import UnitWorker, run_units, token_features
from utils.data.prepare.workspace import SplitCounts, UnitCounts, Workspace, is_already_prepared
from utils.data.token_dataset import describe_split
from utils.data.tokenizers import chat_template_sha256, id_type, tokenizer_sha256, vocabulary_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

SOURCES_LISTED = 100
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
EXAMPLE_TOKENS = 256


class Preparation:
    """One preparation into one output directory; every step may be repeated.

    Constructing it does no work, and raises ConfigurationError for settings, sources, tokenizer,
    chat template or an output directory that cannot be used. `is_finished`: the result of this
    very preparation is already there.
    """

    def __init__(self, arguments: PreparationArguments):
        check_preparation(arguments)
        self.arguments = arguments
        self.output_dir = Path(arguments.output_dir)
        self.plan = plan_preparation(arguments)
        self._given = given_tokenizer(arguments, self.plan)
        self.digest = self.plan.digest(tokenizer_identity(self._given, arguments))
        self.workspace = Workspace(self.output_dir, self.digest)
        self.is_finished = is_already_prepared(self.workspace, arguments.tokenizer_name_or_path)
        if arguments.merge and not self.is_finished and not self.workspace.root.exists():
            raise ConfigurationError(
                f"merge: {self.output_dir}: no shard has been run into this folder"
            )

    def provide_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Write the tokenizer into the workspace, training it if asked to, and return it."""
        # Threads of the tokenizer in this process; worker processes use one each.
        os.environ.setdefault("RAYON_NUM_THREADS", str(self.arguments.num_proc))
        self.workspace.open(may_discard=not self.arguments.shard and not self.arguments.merge)
        folder, final = self.workspace.tokenizer, self.output_dir / "tokenizer"
        # An assembly that was interrupted may have moved it already.
        is_moved = final.exists() and not folder.exists()
        if self._given is None:
            return trained_tokenizer(self.plan, self.arguments, final if is_moved else folder)
        if not is_moved and not folder.exists():
            save_tokenizer(self._given, folder)
        return self._given

    def finish_with_tokenizer(self) -> None:
        """End here: move the tokenizer to OUT/tokenizer."""
        self._move_tokenizer()
        self.workspace.remove()
        logger.info("the tokenizer is in %s", self.output_dir / "tokenizer")

    def tokenize(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Prepare those work units of this shard that are not finished yet.

        Raises ConfigurationError at the first record that cannot be used, unless they are skipped.
        """
        index, shards = shard_of(self.arguments)
        own = [unit for unit in self.plan.units if unit.index % shards == index]
        left = [unit for unit in own if self.workspace.counts_of(unit.index) is None]
        if len(left) < len(own):
            logger.info("%d of %d work units are finished already", len(own) - len(left), len(own))
        settings = self.plan.settings
        backend = choose_backend(
            self.arguments.tokenizer_backend, tokenizer, settings.document_format
        )
        worker = UnitWorker(tokenizer, backend, settings, self.workspace)
        run_units(left, worker, self.arguments.num_proc)
        if shards > 1:
            done = [self.workspace.counts_of(unit.index) for unit in own]
            self._report(UnitCounts.total(counts for counts in done if counts is not None))
            logger.info("shard %d/%d is complete", index, shards)

    def is_last(self) -> bool:
        """Return whether this process has to assemble: it is no shard, or the last of an array."""
        if self.arguments.shard is None:
            return True
        index, shards = shard_of(self.arguments)
        if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
            return self.workspace.is_last_of_array(array, index, shards)
        logger.info(
            "when every shard is complete, run the same settings with --merge %d in place of "
            "--shard",
            shards,
        )
        return False

    def assemble(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Make the datasets out of the finished units, and report.

        Raises ConfigurationError naming the shards that are incomplete, or a split that is left
        without documents.
        """
        counts = self._finished_counts()
        self._report(UnitCounts.total(counts.values()))
        for line in source_lines(self.plan.units, counts):
            logger.info("%s", line)
        filled = {split for unit in counts.values() for split in unit.splits}
        empty = [split for split in self.plan.splits if split not in filled]
        if empty:
            raise ConfigurationError(
                f"{', '.join(empty)}: no document is left for this split; give more documents, "
                "another --validation_fraction, or see above what was dropped"
            )
        for split in self.plan.splits:
            self._assemble_split(split, counts, tokenizer)
        self._move_tokenizer()
        self.workspace.remove()
        logger.info("written: %s", ", ".join(str(self.output_dir / s) for s in self.plan.splits))

    def _report(self, counts: UnitCounts) -> None:
        for line in report_lines(counts, self.plan.splits):
            logger.info("%s", line)

    def _finished_counts(self) -> dict[int, UnitCounts]:
        shards = self.arguments.merge or shard_of(self.arguments)[1]
        counts = {unit.index: self.workspace.counts_of(unit.index) for unit in self.plan.units}
        missing = Counter(index % shards for index, found in counts.items() if found is None)
        if missing:
            raise ConfigurationError(
                [
                    f"shard {shard}/{shards} is incomplete, {number} of its work units are "
                    f"missing: run it (again) with --shard {shard}/{shards}"
                    for shard, number in sorted(missing.items())
                ]
            )
        return {index: found for index, found in counts.items() if found is not None}

    def _assemble_split(
        self, split: str, counts: Mapping[int, UnitCounts], tokenizer: "PreTrainedTokenizerBase"
    ) -> None:
        """Make a dataset of the files of a split: layout, statistics and stoker.json."""
        folder = self.output_dir / split
        mask_column = MASK_COLUMNS[self.plan.settings.document_format]
        files = self._move_files(split, counts)
        self._write_layout(folder, files, token_features(id_type(tokenizer), mask_column))
        example = read_example(folder, mask_column, tokenizer)
        if split == TRAIN:
            logger.info("an example, with [[ ]] around what is trained on:\n%s", example)
        counted = UnitCounts.total(counts.values()).splits[split]
        is_chat = self.plan.needs_chat_template
        dataset = describe_split(
            folder,
            tokenizer={
                "path": "../tokenizer",
                "sha256": tokenizer_sha256(tokenizer),
                "vocabulary_size": vocabulary_size(tokenizer),
            },
            chat_template_sha256=chat_template_sha256(tokenizer) if is_chat else None,
            preparation={
                "settings_sha256": self.digest,
                "settings": asdict(self.plan.settings),
                "sources": self._origin(split, counts),
                **split_figures(counted),
                "example": example,
                "loss_masks": masks_from(tokenizer) if is_chat else None,
                "end_of_turn_token_id": end_of_turn_id(tokenizer) if is_chat else None,
            },
        )
        found = dataset.statistics
        if (found.documents, found.tokens) != (counted.documents, counted.tokens):
            raise ConfigurationError(
                f"{folder}: holds {found.documents:,} documents and {found.tokens:,} tokens, but "
                f"{counted.documents:,} and {counted.tokens:,} were counted as they were written: "
                "the storage changed or lost data; remove the folder and prepare again"
            )
        logger.info(
            f"{split}: {found.documents:,} documents, {found.tokens:,} tokens, as counted while "
            f"tokenizing; fingerprint {dataset.fingerprint[:16]}"
        )

    def _move_files(self, split: str, counts: Mapping[int, UnitCounts]) -> list[str]:
        """Move the Arrow files of a split to its folder, in the order of the units.

        Safe to repeat: a file that an interrupted run has moved already stays.
        """
        units = [unit for unit in sorted(counts) if split in counts[unit].splits]
        folder = self.output_dir / split
        folder.mkdir(parents=True, exist_ok=True)
        names = [f"data-{number:05d}-of-{len(units):05d}.arrow" for number in range(len(units))]
        for unit, name in zip(units, names, strict=True):
            source = self.workspace.unit_file(unit, split)
            if source.exists():
                source.replace(folder / name)
        return names

    def _write_layout(self, folder: Path, files: list[str], features: dict[str, Any]) -> None:
        """Write dataset_info.json and state.json, which make the Arrow files a `datasets` folder.

        Each split has a fingerprint of its own: `datasets` keys its caches by it.
        """
        info = {
            **{"citation": "", "description": "", "features": features},
            **{"homepage": "", "license": ""},
        }
        fingerprint = hashlib.sha256(f"{self.digest} {folder.name}".encode()).hexdigest()[:16]
        state: dict[str, object] = {
            "_data_files": [{"filename": file} for file in files],
            "_fingerprint": fingerprint,
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        (folder / "dataset_info.json").write_text(json.dumps(info, indent=2), encoding="utf-8")
        (folder / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")

    def _move_tokenizer(self) -> None:
        """Move the tokenizer beside the splits, unless an interrupted run has done so."""
        target = self.output_dir / "tokenizer"
        if self.workspace.tokenizer.exists() and not target.exists():
            self.workspace.tokenizer.replace(target)

    def _origin(self, split: str, counts: Mapping[int, UnitCounts]) -> dict[str, Any]:
        """Return where the documents of a split come from and what was left out on the way.

        The validation split shares the sources of the training split.
        """
        origin = split if split in self.plan.sources else TRAIN
        files = self.plan.sources[origin]
        total = UnitCounts.total(counts[u.index] for u in self.plan.units if u.split == origin)
        return {
            "files": len(files),
            "bytes": sum(file.size for file in files),
            "first_files": {file.path: file.size for file in files[:SOURCES_LISTED]},
            "dropped": dict(total.dropped),
            "dropped_examples": total.examples,
            "truncated": total.truncated,
            "continued": total.continued,
            "without_earlier_thinking": total.without_earlier_thinking,
        }


# --- the report: what came out, as numbers to store and as lines to read


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
    names = ["p1", "p50", "p99", "max"]
    header = ("documents", "tokens", "loss tokens", "bytes/token", *(f"{n} tokens" for n in names))
    lines = [f"{'split':<12}" + "".join(f"{name:>13}" for name in header)]
    for split in splits:
        figures = split_figures(counts.splits.get(split, SplitCounts()))
        percentiles = figures["length_percentiles_tokens"]
        lines.append(
            f"{split:<12}{figures['documents']:>13,}{figures['tokens']:>13,}"
            f"{figures['loss_token_share']:>13.1%}{figures['bytes_per_token']:>13.2f}"
            + "".join(f"{percentiles.get(name, 0):>13,}" for name in names)
        )
    dropped = ", ".join(f"{n:,} {reason}" for reason, n in sorted(counts.dropped.items()))
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


def read_example(
    folder: Path, mask_column: str | None, tokenizer: "PreTrainedTokenizerBase"
) -> str:
    """Decode the first document of a split, with [[ ]] around the text that is trained on."""
    columns = open_columns(folder)
    ids = columns[TOKENS].documents(0, 0, 1)[:EXAMPLE_TOKENS].tolist()
    mask = [1] * len(ids) if mask_column is None else columns[mask_column].documents(0, 0, 1)
    parts = []
    for trained, group in groupby(zip(ids, mask, strict=False), key=lambda pair: pair[1]):
        # What could steer a terminal is escaped; line ends stay.
        text = "".join(
            c.encode("unicode_escape").decode()
            if c != "\n" and unicodedata.category(c) in ("Cc", "Cf")
            else c
            for c in str(tokenizer.decode([token for token, _ in group]))
        )
        parts.append(f"[[{text}]]" if trained else text)
    return "".join(parts)
