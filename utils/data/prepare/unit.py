"""Token files: Arrow streams of token lists in the layout of `datasets`' save_to_disk."""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa

from utils.config.errors import ConfigurationError
from utils.data.prepare.documents import (
    Document,
    TextDocument,
    content_digest,
    parse_documents,
    texts_of,
)
from utils.data.prepare.records import BadRow, Record, read_records
from utils.data.prepare.rows import RowSettings, UnusableRowError
from utils.data.prepare.sources import WorkUnit
from utils.data.prepare.tokenization import MASK_COLUMNS, DocumentTokenizer, TokenizedDocument

# Tokens per record batch. Few large batches keep the reader's table of chunks short; the batch is
# what a writer holds in memory (2 to 4 bytes a token, and 1 for its mask).
TOKENS_PER_BATCH = 1 << 20


class TokenFileWriter:
    """Writes tokenized documents to one Arrow stream; a context manager that closes the file.

    The bytes depend on the documents alone. `mask_column` None: the dataset has no mask.
    """

    def __init__(self, path: Path, id_type: np.dtype, mask_column: str | None):
        self._documents: list[TokenizedDocument] = []
        self._tokens = 0
        self._mask_column = mask_column
        self._schema = token_schema(id_type, mask_column)
        self._file = path.open("wb")
        self._stream = pa.ipc.new_stream(self._file, self._schema)

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
        columns = [_lists(offsets, [document.ids for document in self._documents])]
        if self._mask_column:
            masks = [d.loss_mask for d in self._documents if d.loss_mask is not None]
            columns.append(_lists(offsets, masks))
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
    info = {"info": {"features": _features(id_type, mask_column)}}
    return pa.schema(fields, metadata={"huggingface": json.dumps(info)})


def write_layout(
    directory: Path, files: Sequence[str], id_type: np.dtype, mask_column: str | None, digest: str
) -> None:
    """Write dataset_info.json and state.json, which make the Arrow files a `datasets` folder.

    `digest` becomes the fingerprint under which `datasets` caches what is derived from the split.
    """
    info = {
        "citation": "",
        "description": "",
        "features": _features(id_type, mask_column),
        "homepage": "",
        "license": "",
    }
    state: dict[str, object] = {
        "_data_files": [{"filename": name} for name in files],
        "_fingerprint": digest[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (directory / "dataset_info.json").write_text(json.dumps(info, indent=2), encoding="utf-8")
    (directory / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")


def _lists(offsets: pa.Array, values: Sequence[np.ndarray]) -> pa.ListArray:
    return pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(values)))


def _features(id_type: np.dtype, mask_column: str | None) -> dict[str, object]:
    def list_of(dtype: str) -> dict[str, object]:
        return {"feature": {"dtype": dtype, "_type": "Value"}, "_type": "List"}

    features: dict[str, object] = {"input_ids": list_of(id_type.name)}
    if mask_column:
        features[mask_column] = list_of("int8")
    return features


# Unit preparation: one work unit read, checked, tokenized and written to its Arrow files.

TRAIN, VALIDATION = "train", "validation"
DOCUMENTS_PER_BATCH = 256
CHARACTERS_PER_BATCH = 1 << 20
EXAMPLES_KEPT = 5
FILTERED = "filtered"  # left out because the recipe says so: no fault
WEIGHT_KEY = 1 << 64  # apart from the key that holds documents out

# Called with (documents, tokens) after each batch.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class UnitSettings:
    """What decides the output of a unit, besides the tokenizer and the files.

    `sources` says how the rows of each are read; a unit knows the number of its own.
    """

    document_format: str
    sources: tuple[RowSettings, ...]
    on_bad_row: str
    on_overlong: str
    sequence_length: int | None
    validation_fraction: float
    seed: int
    template_date: str | None = None  # what a chat template prints for today's date


@dataclass
class SplitCounts:
    """What a unit put into one split; `lengths` maps tokens to the number of documents."""

    documents: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    text_bytes: int = 0
    file_bytes: int = 0
    lengths: dict[int, int] = field(default_factory=dict)

    def add(self, document: TokenizedDocument, text_bytes: int) -> None:
        """Count one document."""
        self.documents += 1
        self.tokens += len(document.ids)
        self.loss_tokens += document.loss_tokens
        self.text_bytes += text_bytes
        length = len(document.ids)
        self.lengths[length] = self.lengths.get(length, 0) + 1


@dataclass
class UnitCounts:
    """What happened to the records of a unit; `dropped` by reason, with the first few told."""

    splits: dict[str, SplitCounts] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    truncated: int = 0
    continued: int = 0
    without_earlier_thinking: int = 0

    def drop(self, row: BadRow) -> None:
        """Count a record that is left out."""
        self.dropped[row.reason] = self.dropped.get(row.reason, 0) + 1
        if row.reason != FILTERED and len(self.examples) < EXAMPLES_KEPT:
            self.examples.append(str(row))


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
        mask_column = MASK_COLUMNS[self.settings.document_format]
        documents = self._documents(unit, counts)
        with ExitStack() as stack:
            writers = {
                split: stack.enter_context(
                    TokenFileWriter(path, self.tokenizer.id_type, mask_column)
                )
                for split, path in files.items()
            }
            for batch in _batches(documents):
                if not self._prepare_batch(unit, batch, writers, counts, progress):
                    break
        for split, path in files.items():
            counts.splits[split].file_bytes = path.stat().st_size
        return counts

    def _documents(self, unit: WorkUnit, counts: UnitCounts) -> Iterator[tuple[str, Document]]:
        """Yield (split, document) for every usable record, as often as its weight says."""
        split, copies = unit.split, 1
        for document in read_documents(unit, self.settings):
            if isinstance(document, BadRow):
                self._refuse(document, counts)
                continue
            if isinstance(document, TextDocument) and document.part:
                # Stays with its beginning, so that no document is in two splits.
                counts.continued += copies
            else:
                split = self._split_of(unit, document)
                copies = self._copies_of(unit, document) if split == TRAIN else 1
            for _ in range(copies):
                yield split, document

    def _copies_of(self, unit: WorkUnit, document: Document) -> int:
        """Return how often a document is written: its source's weight, the fraction by a hash."""
        whole, fraction = divmod(self.settings.sources[unit.source].weight, 1.0)
        return int(whole) + is_held_out(document, fraction, self.settings.seed + WEIGHT_KEY)

    def _split_of(self, unit: WorkUnit, document: Document) -> str:
        fraction = self.settings.validation_fraction
        if unit.split == TRAIN and is_held_out(document, fraction, self.settings.seed):
            return VALIDATION
        return unit.split

    def _refuse(self, row: BadRow, counts: UnitCounts) -> None:
        refuse_bad_row(row, self.settings)
        counts.drop(row)

    def _prepare_batch(
        self,
        unit: WorkUnit,
        batch: Sequence[tuple[str, Document]],
        writers: dict[str, TokenFileWriter],
        counts: UnitCounts,
        progress: Progress,
    ) -> bool:
        """Write a batch; False when the unit has the tokens that it may have."""
        documents = [document for _, document in batch]
        tokens, before = 0, sum(split.tokens for split in counts.splits.values())
        cap = math.inf if unit.max_tokens is None else unit.max_tokens
        for (split, document), tokenized in zip(batch, self.tokenizer(documents), strict=True):
            if isinstance(tokenized, BadRow):
                self._refuse(tokenized, counts)
                continue
            kept = self._fitted(document, tokenized, counts)
            if kept is not None:
                if before + tokens + len(kept.ids) > cap:
                    return False
                writers[split].append(kept)
                counts.without_earlier_thinking += kept.drops_thinking
                counts.splits[split].add(kept, sum(len(t.encode()) for t in texts_of(document)))
                tokens += len(kept.ids)
        progress(len(batch), tokens)
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
                f"{document.place}: {too_long}: raise --sequence_length, or choose "
                "--on_overlong truncate or drop"
            )
        if self.settings.on_overlong == "drop":
            counts.drop(BadRow("overlong", too_long, document.place))
            return None
        shortened = tokenized.truncated(limit)
        if not shortened.has_target:
            message = f"{too_long}, and its first {limit} bear no loss"
            counts.drop(BadRow("truncated_without_loss", message, document.place))
            return None
        counts.truncated += 1
        return shortened


def read_documents(unit: WorkUnit, settings: UnitSettings) -> Iterator[Document | BadRow]:
    """Yield every document of a unit in order, or what is wrong with its record."""
    rows = settings.sources[unit.source]
    for piece in unit.pieces:
        for record in read_records(piece, rows.read_columns):
            yield from [record] if isinstance(record, BadRow) else _parsed(record, rows)


def _parsed(record: Record, rows: RowSettings) -> Iterator[Document | BadRow]:
    try:
        if rows.keeps(record.fields):
            found = Record(rows.renamed(record.fields), record.place, record.part)
            yield from parse_documents(found, rows.row_format)
        else:
            yield BadRow(FILTERED, "not among what the filter keeps", record.place)
    except UnusableRowError as error:
        yield BadRow(error.reason, str(error), record.place)


def refuse_bad_row(row: BadRow, settings: UnitSettings) -> None:
    """Raise ConfigurationError at a bad row, unless such rows are skipped."""
    if settings.on_bad_row == "error" and row.reason != FILTERED:
        raise ConfigurationError(f"{row}; repair it, or skip such rows with --on_bad_row skip")


def is_held_out(document: Document, fraction: float, seed: int) -> bool:
    """Tell whether a document goes to the validation split.

    Depends on its content and the seed alone: not on order, shard or process count, and equal
    documents always fall on the same side.
    """
    return fraction > 0 and content_digest(document, seed) < fraction * 2.0**64


def _batches(
    documents: Iterator[tuple[str, Document]],
) -> Iterator[list[tuple[str, Document]]]:
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
