"""Work units: read, checked, tokenized and written to Arrow files, by one process or several."""

import logging
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path
from typing import TYPE_CHECKING

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
from utils.data.prepare.workspace import (
    SplitCounts,
    TokenFileWriter,
    UnitCounts,
    Workspace,
    token_schema,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

DOCUMENTS_PER_BATCH = 256
CHARACTERS_PER_BATCH = 1 << 20
WEIGHT_KEY = 1 << 64  # apart from the key that holds documents out

# Called with (documents, tokens) after each batch.
Progress = Callable[[int, int], None]


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


# --- many units, in this process or in several

SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_BETWEEN_LINES = 10.0
# What one process does in the seconds that a worker takes to start.
LEAST_BYTES_A_WORKER = {"gigatoken": 64 << 20, "tokenizers": 4 << 20}


@dataclass(frozen=True)
class UnitJob:
    """What a worker needs: the very tokenizer object, the settings and where results go."""

    tokenizer: "PreTrainedTokenizerBase"
    backend: str
    settings: UnitSettings
    workspace: Workspace

    def run(self, unit: WorkUnit, progress: Progress) -> None:
        """Prepare one unit into the workspace."""
        preparation = UnitPreparation(self._document_tokenizer, self.settings)
        splits = [unit.split]
        if unit.split == TRAIN and self.settings.validation_fraction > 0:
            splits.append(VALIDATION)

        def prepare(unit: WorkUnit, files: dict[str, Path]) -> UnitCounts:
            return preparation(unit, files, progress)

        self.workspace.prepare(unit, splits, prepare)

    @cached_property
    def _document_tokenizer(self) -> DocumentTokenizer:
        """Made once a process: gigatoken grows quicker with what it has seen."""
        return DocumentTokenizer(self.tokenizer, self.backend, self.settings.template_date)


def run_units(units: Sequence[WorkUnit], job: UnitJob, num_proc: int) -> None:
    """Prepare all units, in at most `num_proc` workers; the result does not depend on it.

    Little work is done in this process, by as many threads of the tokenizer. Raises
    ConfigurationError with the first fault of the sources, or when a worker was killed. Units that
    were finished by then stay finished.
    """
    if not units:
        return
    progress = _ProgressLines(sum(unit.size for unit in units))
    workers = min(num_proc, len(units), progress.total_bytes // LEAST_BYTES_A_WORKER[job.backend])
    if workers < 2:
        for unit in units:
            job.run(unit, progress.advance)
            progress.done_bytes += unit.size
    else:
        _run_in_processes(units, job, workers, progress)
    progress.log()


class _ProgressLines:
    """Logs a line every ten seconds. total_bytes: size of the sources still to be read."""

    def __init__(self, total_bytes: int):
        self.total_bytes = total_bytes
        self.documents = self.tokens = self.done_bytes = 0
        self._start = self._shown = time.monotonic()

    def advance(self, documents: int, tokens: int) -> None:
        self.documents += documents
        self.tokens += tokens
        if time.monotonic() - self._shown >= SECONDS_BETWEEN_LINES:
            self.log()

    def log(self) -> None:
        self._shown = time.monotonic()
        seconds = max(self._shown - self._start, 1e-9)
        logger.info(
            f"{self.done_bytes / 2**20:,.1f} of {self.total_bytes / 2**20:,.1f} MiB, "
            f"{self.documents:,} documents, {self.tokens:,} tokens "
            f"({self.documents / seconds:,.0f} documents/s, {self.tokens / seconds:,.0f} tokens/s, "
            f"{seconds:.0f} s)"
        )


def _run_in_processes(
    units: Sequence[WorkUnit], job: UnitJob, num_proc: int, progress: _ProgressLines
) -> None:
    # spawn: nothing of this process (threads, locks of the tokenizer) is copied half-way.
    context = multiprocessing.get_context("spawn")
    totals = context.Array("q", 2)
    executor = ProcessPoolExecutor(
        num_proc, mp_context=context, initializer=_start_worker, initargs=(job, totals)
    )
    try:
        futures = {executor.submit(_run_unit, unit): unit for unit in units}
        pending: set[Future[list[str]]] = set(futures)
        while pending:
            done, pending = wait(pending, SECONDS_BETWEEN_LOOKS, return_when=FIRST_EXCEPTION)
            for future in sorted(done, key=lambda f: futures[f].index):
                if problems := future.result():
                    raise ConfigurationError(problems)
                progress.done_bytes += futures[future].size
            progress.advance(totals[0] - progress.documents, totals[1] - progress.tokens)
    except BrokenProcessPool as error:
        raise ConfigurationError(
            "a worker process was killed, most likely because the machine ran out of memory: run "
            f"the same command again with fewer than --num_proc {num_proc} (finished work is kept)"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


_worker: tuple[UnitJob, "SynchronizedArray[int]"] | None = None


def _start_worker(job: UnitJob, totals: "SynchronizedArray[int]") -> None:
    global _worker  # noqa: PLW0603 - what a pool's initializer leaves for its tasks
    # One process per core already: threads inside the tokenizer would fight over them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = (job, totals)


def _run_unit(unit: WorkUnit) -> list[str]:
    """Prepare a unit in a worker; returns the problems, because a list survives pickling."""
    assert _worker is not None
    job, totals = _worker

    def advance(documents: int, tokens: int) -> None:
        with totals.get_lock():
            totals[0] += documents
            totals[1] += tokens

    try:
        job.run(unit, advance)
    except ConfigurationError as error:
        return error.problems
    return []
