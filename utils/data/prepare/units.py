"""Unit preparation: one work unit read, checked, tokenized and written to its Arrow files."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from utils.config.errors import ConfigurationError
from utils.data.prepare.documents import (
    FILTERED,
    Document,
    TextDocument,
    content_digest,
    parse_documents,
    texts_of,
)
from utils.data.prepare.plan import TRAIN, VALIDATION, UnitSettings, WorkUnit
from utils.data.prepare.records import BadRow, read_records
from utils.data.prepare.tokenization import MASK_COLUMNS, DocumentTokenizer, TokenizedDocument

DOCUMENTS_PER_BATCH = 256
CHARACTERS_PER_BATCH = 1 << 20
# Tokens per record batch. Few large batches keep the reader's table of chunks short; the batch is
# what a writer holds in memory (2 to 4 bytes a token, and 1 for its mask).
TOKENS_PER_BATCH = 1 << 20
EXAMPLES_KEPT = 5
WEIGHT_KEY = 1 << 64  # apart from the key that holds documents out

# Called with (documents, tokens) after each batch.
Progress = Callable[[int, int], None]


@dataclass
class SplitCounts:
    """What a unit put into one split; `lengths` maps tokens to the number of documents."""

    documents: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    text_bytes: int = 0
    file_bytes: int = 0
    lengths: dict[int, int] = field(default_factory=dict)

    def count(self, document: TokenizedDocument, text_bytes: int) -> None:
        """Count one document."""
        self.documents += 1
        self.tokens += len(document.ids)
        self.loss_tokens += document.loss_tokens
        self.text_bytes += text_bytes
        _add_counts(self.lengths, {len(document.ids): 1})

    def add(self, other: "SplitCounts") -> None:
        """Add the counts of another unit."""
        self.documents += other.documents
        self.tokens += other.tokens
        self.loss_tokens += other.loss_tokens
        self.text_bytes += other.text_bytes
        self.file_bytes += other.file_bytes
        _add_counts(self.lengths, other.lengths)


@dataclass
class UnitCounts:
    """What happened to the records of a unit; `dropped` by reason, with the first few messages."""

    splits: dict[str, SplitCounts] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    truncated: int = 0
    continued: int = 0
    without_earlier_thinking: int = 0

    def drop(self, row: BadRow) -> None:
        """Count a record that is left out."""
        _add_counts(self.dropped, {row.reason: 1})
        if row.reason != FILTERED and len(self.examples) < EXAMPLES_KEPT:
            self.examples.append(str(row))

    @classmethod
    def total(cls, counts: Iterable["UnitCounts"]) -> "UnitCounts":
        """Add up the counts of units."""
        total = cls()
        for unit in counts:
            for split, added in unit.splits.items():
                total.splits.setdefault(split, SplitCounts()).add(added)
            _add_counts(total.dropped, unit.dropped)
            total.examples = [*total.examples, *unit.examples][:EXAMPLES_KEPT]
            total.truncated += unit.truncated
            total.continued += unit.continued
            total.without_earlier_thinking += unit.without_earlier_thinking
        return total

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "UnitCounts":
        """Rebuild the counts from what `asdict` made of them."""
        splits = {}
        for name, split in content["splits"].items():
            lengths = {int(length): documents for length, documents in split["lengths"].items()}
            splits[name] = SplitCounts(**{**split, "lengths": lengths})
        return cls(**{**content, "splits": splits})


def _add_counts(total: dict[Any, int], added: Mapping[Any, int]) -> None:
    for key, number in added.items():
        total[key] = total.get(key, 0) + number


class UnitPreparation:
    """Prepares units with one tokenizer and one set of settings."""

    def __init__(self, tokenizer: DocumentTokenizer, settings: UnitSettings):
        self.tokenizer = tokenizer
        self.settings = settings

    def __call__(self, unit: WorkUnit, files: dict[str, Path], progress: Progress) -> UnitCounts:
        """Write the documents of a unit to `files` (split name -> path) and count them.

        Raises ConfigurationError at a bad row (on_bad_row "error"), at an over-long document
        (on_overlong "error") and when a source file is damaged.
        """
        counts = UnitCounts({split: SplitCounts() for split in files})
        schema = token_schema(self.tokenizer.id_type, MASK_COLUMNS[self.settings.document_format])
        with ExitStack() as stack:
            writers = {
                split: stack.enter_context(TokenFileWriter(path, schema))
                for split, path in files.items()
            }
            for batch in _batches(self._documents(unit, counts)):
                if not self._prepare_batch(unit, batch, writers, counts, progress):
                    break
        for split, path in files.items():
            counts.splits[split].file_bytes = path.stat().st_size
        return counts

    def _documents(self, unit: WorkUnit, counts: UnitCounts) -> Iterator[tuple[str, Document]]:
        """Yield (split, document) for every usable record, as often as its weight says."""
        split, copies = unit.split, 1
        weight = self.settings.sources[unit.source].weight
        for document in read_documents(unit, self.settings):
            if isinstance(document, BadRow):
                self._refuse(document, counts)
                continue
            if isinstance(document, TextDocument) and document.part:
                # Stays with its beginning, so that no document is in two splits.
                counts.continued += copies
            else:
                split, copies = unit.split, 1
                if split == TRAIN and is_held_out(document, self.settings):
                    split = VALIDATION
                if split == TRAIN:
                    copies = _copies_of(document, weight, self.settings.seed)
            for _ in range(copies):
                yield split, document

    def _refuse(self, row: BadRow, counts: UnitCounts) -> None:
        refuse_bad_row(row, self.settings)
        counts.drop(row)

    def _prepare_batch(
        self,
        unit: WorkUnit,
        batch: Sequence[tuple[str, Document]],
        writers: dict[str, "TokenFileWriter"],
        counts: UnitCounts,
        progress: Progress,
    ) -> bool:
        """Write a batch; False when the unit has the tokens that it may have."""
        documents = [document for _, document in batch]
        before = total = sum(split.tokens for split in counts.splits.values())
        limit = math.inf if unit.max_tokens is None else unit.max_tokens
        for (split, document), tokenized in zip(batch, self.tokenizer(documents), strict=True):
            if isinstance(tokenized, BadRow):
                self._refuse(tokenized, counts)
                continue
            fitted = self._fitted(document, tokenized, counts)
            if fitted is None:
                continue
            length = len(fitted.ids)
            if total + length > limit:
                return False
            total += length
            writers[split].append(fitted)
            counts.without_earlier_thinking += fitted.drops_thinking
            text_bytes = sum(len(text.encode()) for text in texts_of(document))
            counts.splits[split].count(fitted, text_bytes)
        progress(len(batch), total - before)
        return True

    def _fitted(
        self, document: Document, tokenized: TokenizedDocument, counts: UnitCounts
    ) -> TokenizedDocument | None:
        """Apply on_overlong; texts are kept whole, because training splits them."""
        limit, length = self.settings.sequence_length, len(tokenized.ids)
        if limit is None or length <= limit or isinstance(document, TextDocument):
            return tokenized
        too_long = f"{length} tokens, more than the sequence_length of {limit}"
        if self.settings.on_overlong == "error":
            raise ConfigurationError(
                f"{document.location}: {too_long}: raise --sequence_length, or choose "
                "--on_overlong truncate or drop"
            )
        if self.settings.on_overlong == "drop":
            counts.drop(BadRow("overlong", too_long, document.location))
            return None
        shortened = tokenized.truncated(limit)
        if not shortened.has_target:
            message = f"{too_long}, and none of its first {limit} is trained on"
            counts.drop(BadRow("truncated_without_loss", message, document.location))
            return None
        counts.truncated += 1
        return shortened


def read_documents(unit: WorkUnit, settings: UnitSettings) -> Iterator[Document | BadRow]:
    """Yield every document of a unit in order, or what is wrong with its record."""
    rows = settings.sources[unit.source]
    for part in unit.parts:
        for record in read_records(part, rows.read_columns):
            if isinstance(record, BadRow):
                yield record
            else:
                yield from parse_documents(record, rows)


def refuse_bad_row(row: BadRow, settings: UnitSettings) -> None:
    """Raise ConfigurationError at a bad row, unless such rows are skipped."""
    if settings.on_bad_row == "error" and row.reason != FILTERED:
        raise ConfigurationError(f"{row}; repair it, or skip such rows with --on_bad_row skip")


def is_held_out(document: Document, settings: UnitSettings) -> bool:
    """Tell whether a document goes to the validation split.

    Depends on its content and the seed alone: not on order, shard or process count, and equal
    documents always fall on the same side.
    """
    return _is_drawn(document, settings.validation_fraction, settings.seed)


def _copies_of(document: Document, weight: float, seed: int) -> int:
    """Return how often a document is written: the fraction of a weight is drawn by its content."""
    whole, fraction = divmod(weight, 1.0)
    return int(whole) + _is_drawn(document, fraction, seed + WEIGHT_KEY)


def _is_drawn(document: Document, fraction: float, key: int) -> bool:
    return fraction > 0 and content_digest(document, key) < fraction * 2.0**64


def _batches(documents: Iterator[tuple[str, Document]]) -> Iterator[list[tuple[str, Document]]]:
    """Group documents for the tokenizer, bounded in number and in characters."""
    batch: list[tuple[str, Document]] = []
    characters = 0
    for item in documents:
        batch.append(item)
        characters += sum(len(text) for text in texts_of(item[1]))
        if len(batch) == DOCUMENTS_PER_BATCH or characters >= CHARACTERS_PER_BATCH:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class TokenFileWriter:
    """Writes tokenized documents to one Arrow stream; a context manager that closes the file.

    The bytes depend on the documents alone.
    """

    def __init__(self, path: Path, schema: pa.Schema):
        self._documents: list[TokenizedDocument] = []
        self._tokens = 0
        self._schema = schema
        self._file = path.open("wb")
        self._stream = pa.ipc.new_stream(self._file, schema)

    def append(self, document: TokenizedDocument) -> None:
        """Add one document behind those before it."""
        self._documents.append(document)
        self._tokens += len(document.ids)
        if self._tokens >= TOKENS_PER_BATCH:
            self._flush()

    def _flush(self) -> None:
        if not self._documents:
            return
        lengths = [len(document.ids) for document in self._documents]
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        values = [[document.ids for document in self._documents]]
        if len(self._schema) == 2:
            values.append([d.loss_mask for d in self._documents if d.loss_mask is not None])
        columns = [
            pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(column))) for column in values
        ]
        self._stream.write_batch(pa.record_batch(columns, schema=self._schema))
        self._documents, self._tokens = [], 0

    def __enter__(self) -> "TokenFileWriter":
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error_type is None:
            self._flush()
            self._stream.close()
            self._file.flush()
            # The file counts as done once it is renamed: its content must be on disk by then.
            os.fsync(self._file.fileno())
        self._file.close()


def token_schema(id_type: np.dtype, mask_column: str | None) -> pa.Schema:
    """Return the Arrow schema of a split, with the features that `datasets` reads from it."""
    fields = [pa.field("input_ids", pa.list_(pa.from_numpy_dtype(id_type)))]
    if mask_column:
        fields.append(pa.field(mask_column, pa.list_(pa.int8())))
    info = {"info": {"features": token_features(id_type, mask_column)}}
    return pa.schema(fields, metadata={"huggingface": json.dumps(info)})


def token_features(id_type: np.dtype, mask_column: str | None) -> dict[str, Any]:
    """Return the features of a split as `datasets` writes them; mask_column None: no mask."""
    types = {"input_ids": id_type.name} | ({mask_column: "int8"} if mask_column else {})
    return {
        name: {"feature": {"dtype": dtype, "_type": "Value"}, "_type": "List"}
        for name, dtype in types.items()
    }
