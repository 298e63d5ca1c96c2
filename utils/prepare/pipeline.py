"""The preparation of token datasets: plan, tokenizer, work units and their assembly."""

import hashlib
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from utils.config.errors import ConfigurationError
from utils.config.preparation import TRAIN, PreparationArguments, check_preparation, shard_of
from utils.data.columns import TOKENS, ListColumn, loss_mask_among, open_columns
from utils.data.token_dataset import describe_split, warn_of_small_split
from utils.data.tokenizers import chat_template_sha256, id_type, tokenizer_sha256, vocabulary_size
from utils.prepare.encoding import choose_backend
from utils.prepare.tokenizer import end_of_turn_id, given_tokenizer, masks_from, save_tokenizer
from utils.prepare.units import UnitWorker, content_digest, read_documents, run_units
from utils.prepare.values import BadRow
from utils.prepare.work_plan import plan_preparation
from utils.prepare.workspace import (
    NOTES,
    TRAINED_WRONGLY,
    UnitCounts,
    Workspace,
    list_unread,
    token_features,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

SOURCES_LISTED = 100
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
EXAMPLE_TOKENS = 256
DOCUMENTS_TRIED = 1000


class Preparation:
    """One preparation into one output directory; every step can be repeated.

    The constructor reads the first records and the tokenizer, and writes nothing. It raises
    ConfigurationError for settings, sources, a tokenizer, a chat template or an output directory
    that cannot be used.
    """

    def __init__(self, arguments: PreparationArguments):
        check_preparation(arguments)
        self.arguments = arguments
        self.output_dir = Path(arguments.output_dir)
        self.plan = plan_preparation(arguments)
        self.tokenizer = given_tokenizer(arguments, self.plan)
        identity = {
            "sha256": tokenizer_sha256(self.tokenizer),
            "chat_template_sha256": chat_template_sha256(self.tokenizer),
        }
        self.digest = self.plan.digest(identity)
        self.workspace = Workspace(self.output_dir, self.digest, self.plan.commits)
        self._is_finished = self.workspace.is_prepared()

    def run(self) -> None:
        """Prepare the unfinished work units of this shard, then assemble the datasets.

        Raises ConfigurationError at the first record that cannot be used, unless bad rows are
        skipped.
        """
        if self._is_finished:
            logger.info("%s: already prepared with these settings", self.output_dir)
            return
        self.workspace.open(may_discard=not self.arguments.shard and not self.arguments.merge)
        if self.arguments.merge is None:
            self._tokenize()
        if self.arguments.shard and not self._is_last_shard():
            return
        self._assemble()
        save_tokenizer(self.tokenizer, self.output_dir / "tokenizer")
        self.workspace.remove()
        logger.info("written: %s", ", ".join(map(str, sorted(self.output_dir.iterdir()))))

    def _tokenize(self) -> None:
        """Prepare the work units of this shard that are not finished yet."""
        # The tokenizer's threads in this process. Worker processes use one thread each.
        os.environ.setdefault("RAYON_NUM_THREADS", str(self.arguments.num_proc))
        index, shards = shard_of(self.arguments)
        own = [unit for unit in self.plan.units if unit.index % shards == index]
        left = [unit for unit in own if self.workspace.counts_of(unit.index) is None]
        if len(left) < len(own):
            logger.info("%d of %d work units are finished already", len(own) - len(left), len(own))
        settings, wanted = self.plan.settings, self.arguments.tokenizer_backend
        backend = choose_backend(wanted, self.tokenizer, settings.document_format)
        worker = UnitWorker(self.tokenizer, backend, settings, self.workspace)
        run_units(left, worker, self.arguments.num_proc)

    def _is_last_shard(self) -> bool:
        """Tell whether this shard is the last of a job array, so that it assembles the datasets."""
        index, shards = shard_of(self.arguments)
        logger.info("shard %d/%d is complete", index, shards)
        if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
            return self.workspace.is_last_of_array(array, index, shards)
        logger.info("when all are, run the same settings with --merge %d, not --shard", shards)
        return False

    def _assemble(self) -> None:
        """Log the counts and make the datasets from the finished units.

        Raises ConfigurationError that names incomplete shards, or splits without documents.
        """
        shards = self.arguments.merge or shard_of(self.arguments)[1]
        found = {unit.index: self.workspace.counts_of(unit.index) for unit in self.plan.units}
        counts = {index: count for index, count in found.items() if count is not None}
        missing = Counter(index % shards for index in found.keys() - counts.keys())
        if missing:
            raise ConfigurationError(
                [
                    f"shard {shard}/{shards} is incomplete, {number} of its work units are "
                    f"missing: run it (again) with --shard {shard}/{shards}"
                    for shard, number in sorted(missing.items())
                ]
            )
        total = sum(counts.values(), UnitCounts())
        self._report(counts, total)
        empty = [split for split in self.plan.splits if not total.documents[split]]
        if empty:
            raise ConfigurationError(
                f"{', '.join(empty)}: no document is left for this split; give more documents"
                f"{self._fraction_hint()}, or see above what was dropped"
            )
        for split in self.plan.splits:
            self._assemble_split(split, counts, total)

    def _fraction_hint(self) -> str:
        """Return advice: a validation_fraction that holds out at least one document and not all.

        Return "" if none is found. Only the first documents are read: reading all of a large corpus
        again takes too long.
        """
        settings = self.plan.settings
        own = [unit for unit in self.plan.units if unit.split == TRAIN]
        read = (one for unit in own for one in read_documents(unit, settings, Counter()))
        digests = {
            content_digest(one, settings.seed) / 2**64
            for one in islice(read, DOCUMENTS_TRIED)
            if not isinstance(one, BadRow)
        }
        if not settings.validation_fraction or len(digests) < 2:
            return ""
        least, largest = min(digests), max(digests)
        for digits in range(1, 18):
            fraction = math.ceil(least * 10**digits) / 10**digits
            if least < fraction < largest:
                return f", or try --validation_fraction {fraction:.{digits}f}"
        return ""

    def _report(self, counts: Mapping[int, UnitCounts], total: UnitCounts) -> None:
        """Log the documents and tokens of each source, and the rows and columns left out."""
        sources = [list(units) for _, units in groupby(self.plan.units, lambda unit: unit.source)]
        template = self.tokenizer.get_chat_template() if self.plan.needs_chat_template else ""
        for units in sources:
            own = sum((counts[unit.index] for unit in units), UnitCounts())
            if unread := list_unread(own.unread, template):
                logger.info("from %s: not read: %s", units[0].parts[0].file.path, unread)
            if len(sources) == 1:
                break
            written = "; ".join(
                f"{split} {number:,} documents, {own.tokens[split]:,} tokens"
                for split, number in own.documents.items()
            )
            logger.info("from %s: %s", units[0].parts[0].file.path, written or "nothing")
        dropped = ", ".join(f"{n:,} {reason}" for reason, n in sorted(total.dropped.items()))
        logger.info("dropped: %s", dropped or "none")
        for example in total.examples:
            logger.info("  dropped %s", example)
        for name, number in total.notes.items():
            level = logging.WARNING if name in TRAINED_WRONGLY else logging.INFO
            logger.log(level, f"{number:,} {NOTES[name]}")

    def _assemble_split(
        self, split: str, counts: Mapping[int, UnitCounts], total: UnitCounts
    ) -> None:
        """Make the dataset of a split from the files of its units, and write its stoker.json."""
        folder, tokenizer = self.output_dir / split, self.tokenizer
        features = token_features(id_type(tokenizer), self.plan.settings.document_format)
        units = [index for index in counts if counts[index].documents[split]]
        self._assemble_files(folder, units, features)
        columns = open_columns(folder)
        figures = split_figures(split, total, np.diff(columns[TOKENS].offsets))
        example = decoded_example(columns, tokenizer)
        if split == TRAIN:
            logger.info("an example, with [[ ]] around what is trained on:\n%s", example)
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
                "sources": self._sources_of(split, counts),
                **figures,
                "example": example,
                "loss_masks": masks_from(tokenizer) if is_chat else None,
                "end_of_turn_token_id": end_of_turn_id(tokenizer) if is_chat else None,
            },
        )
        found, documents, tokens = dataset.statistics, figures["documents"], figures["tokens"]
        if (found.documents, found.tokens) != (documents, tokens):
            raise ConfigurationError(
                f"{folder}: holds {found.documents:,} documents and {found.tokens:,} tokens, but "
                f"{documents:,} and {tokens:,} were counted as they were written: "
                "the storage changed or lost data; remove the folder and prepare again"
            )
        if split != TRAIN:
            warn_of_small_split(split, dataset)
        lengths = figures["length_percentiles_tokens"]
        logger.info(
            f"{split}: {documents:,} documents, {tokens:,} tokens, as counted while tokenizing; "
            f"fingerprint {dataset.fingerprint[:16]}; {figures['loss_token_share']:.1%} loss "
            f"tokens, {figures['bytes_per_token']:.2f} bytes/token; tokens a document: p1 "
            f"{lengths['p1']:,}, p50 {lengths['p50']:,}, p99 {lengths['p99']:,}, max "
            f"{lengths['max']:,}"
        )

    def _assemble_files(self, folder: Path, units: Sequence[int], features: dict[str, Any]) -> None:
        """Move the Arrow files of a split to its folder, and add the JSON files of `datasets`.

        This can be repeated: files that an interrupted run has moved stay. Each split has its own
        fingerprint, the key of the caches of `datasets`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        names = [f"data-{number:05d}-of-{len(units):05d}.arrow" for number in range(len(units))]
        for unit, name in zip(units, names, strict=True):
            source = self.workspace.unit_file(unit, folder.name)
            if source.exists():
                source.replace(folder / name)
        fingerprint = hashlib.sha256(f"{self.digest} {folder.name}".encode()).hexdigest()
        info = {"citation": "", "description": "", "features": features}
        info |= {"homepage": "", "license": ""}
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in names],
            "_fingerprint": fingerprint[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        for name, content in (("dataset_info.json", info), ("state.json", state)):
            (folder / name).write_text(json.dumps(content, indent=2), encoding="utf-8")

    def _sources_of(self, split: str, counts: Mapping[int, UnitCounts]) -> dict[str, Any]:
        """Return the files and counts of a split's sources; validation has the sources of train."""
        origin = split if split in self.plan.sources else TRAIN
        files = self.plan.sources[origin]
        own = (counts[unit.index] for unit in self.plan.units if unit.split == origin)
        total = sum(own, UnitCounts())
        return {
            "files": len(files),
            "bytes": sum(file.size for file in files),
            "first_files": {file.name: file.size for file in files[:SOURCES_LISTED]},
            **({"hub": dict(self.plan.commits)} if self.plan.commits else {}),
            "dropped": dict(total.dropped),
            "dropped_examples": total.examples,
            **{note: total.notes[note] for note in NOTES},
        }


# --- the report


def split_figures(split: str, counts: UnitCounts, lengths: np.ndarray) -> dict[str, Any]:
    """Return the statistics of a split; lengths: tokens per document, (documents,)."""
    tokens, loss_tokens = counts.tokens[split], counts.loss_tokens[split]
    found = np.percentile(lengths, PERCENTILES, method="inverted_cdf").tolist()
    percentiles = {f"p{p}": int(length) for p, length in zip(PERCENTILES, found, strict=True)}
    return {
        "documents": counts.documents[split],
        "tokens": tokens,
        "loss_tokens": loss_tokens,
        "loss_token_share": loss_tokens / tokens,
        "text_bytes": counts.text_bytes[split],
        "bytes_per_token": counts.text_bytes[split] / tokens,
        "length_percentiles_tokens": {**percentiles, "max": int(lengths.max())},
    }


def decoded_example(columns: Mapping[str, ListColumn], tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the first document of a split, with [[ ]] around the text that is trained on."""
    mask_column = loss_mask_among(columns)
    ids = columns[TOKENS].documents(0, 0, 1)
    mask = columns[mask_column].documents(0, 0, 1) if mask_column else np.ones(len(ids), np.int8)
    # Leave out the beginning of a long prompt, so that the trained text is shown.
    start = max(0, int(np.argmax(mask)) - EXAMPLE_TOKENS // 2)
    ids, mask = ids[start:][:EXAMPLE_TOKENS].tolist(), mask[start:].tolist()
    parts = ["... "] if start else []
    for trained, group in groupby(zip(ids, mask, strict=False), key=lambda pair: pair[1]):
        text = str(tokenizer.decode([token for token, _ in group]))
        # Escape characters that a terminal would execute.
        text = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
        parts.append(f"[[{text}]]" if trained else text)
    return "".join(parts)
