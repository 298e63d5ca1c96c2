"""Preparation of work units (pieces of the sources): read, check, tokenize and write documents."""

import hashlib
import json
import logging
import math
import multiprocessing
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from utils.config.errors import ConfigurationError, LostProcessError, OutOfMemoryError
from utils.config.preparation import TRAIN
from utils.host.machine import memory_kills, set_death_signal
from utils.prepare.messages import unread_keys
from utils.prepare.records import converter, read_records
from utils.prepare.rows import (
    ChatDocument,
    CompletionDocument,
    Document,
    PiecesDocument,
    TextDocument,
    parse_document,
)
from utils.prepare.tokenization import (
    DocumentTokenizer,
    TokenFileWriter,
    TokenizedDocument,
    token_features,
)
from utils.prepare.values import ASSISTANT, EMPTY_VALUES, FILTERED, OVERLONG, REPAIR, BadRow
from utils.prepare.work_plan import VALIDATION, UnitSettings, WorkUnit
from utils.prepare.workspace import EXAMPLES_KEPT, UnitCounts, Workspace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

DOCUMENTS_PER_BATCH = 256
CHARACTERS_PER_BATCH = 1 << 20
WEIGHT_KEY = 1 << 64  # added to the seed: draw extra copies independently of validation
SECONDS_BETWEEN_LINES = 10.0
TRUNCATED_WITHOUT_LOSS = "truncated_without_loss"
SHORTEN = "raise --sequence_length, or choose --on_overlong truncate or drop"
# Bytes that one process tokenizes while a worker process starts.
LEAST_BYTES_A_WORKER = {"gigatoken": 64 << 20, "tokenizers": 4 << 20}


def run_units(
    units: Sequence[WorkUnit], worker: "UnitWorker", num_proc: int, *, only_workers: bool = False
) -> None:
    """Prepare all work units, in up to `num_proc` worker processes if there is enough work.

    only_workers: tokenize only in worker processes. Raises ConfigurationError for unusable rows
    after all units are checked. Exception: a unit in which no row is usable ends the work at once.
    """
    total_bytes = sum(unit.size for unit in units)
    workers = min(num_proc, len(units), total_bytes // LEAST_BYTES_A_WORKER[worker.backend])
    finished = (
        _run_in_processes(units, worker, max(workers, 1))
        if workers > 1 or only_workers
        else ((unit, worker.run(unit)) for unit in units)
    )
    start = last_logged = time.monotonic()
    done_bytes = documents = tokens = 0
    refused: dict[int, UnitCounts] = {}
    for number, (unit, counts) in enumerate(finished, start=1):
        if counts.refused:
            if not refused:
                logger.warning("%s: the other rows are still checked", counts.examples[0])
            refused[unit.index] = counts
            is_useless = not counts.documents and len(counts.examples) == EXAMPLES_KEPT
            if is_useless and number < len(units):
                logger.warning("%s: no row fits: the rest is not checked", unit.parts[0].file.path)
                finished.close()
                break
        done_bytes += unit.size
        documents += counts.documents.total()
        tokens += counts.tokens.total()
        if number == len(units) or time.monotonic() - last_logged >= SECONDS_BETWEEN_LINES:
            last_logged = time.monotonic()
            seconds = max(last_logged - start, 1e-9)
            logger.info(
                f"{done_bytes / total_bytes:.0%} tokenized: {documents:,} documents, {tokens:,} "
                f"tokens in {seconds:.1f} s ({documents / seconds:,.0f} documents/s, "
                f"{tokens / seconds:,.0f} tokens/s)"
            )
    if refused:
        raise _unusable_rows_error(sum((refused[index] for index in sorted(refused)), UnitCounts()))


def _unusable_rows_error(counts: UnitCounts) -> ConfigurationError:
    """Return the error that lists the first unusable rows and the number of all unusable rows.

    Rows of one file with the same fault share a line.
    """
    number, advice = counts.refused.total(), "; or ".join(counts.refused)
    if number == 1:
        return ConfigurationError(f"{counts.examples[0]}; {advice}")
    listed = len(counts.examples)
    first = f" (the first {listed} are above)" if number > listed else ""
    advice = advice.replace("repair it", "repair them")
    rows_by_fault: dict[tuple[str, str], list[str]] = {}
    for example in counts.examples:  # as "FILE:7: fault" and "FILE row 7: fault"
        found = re.fullmatch(r"(.*?)((?<=[: ])\d+|): (.*)", example, re.S)
        assert found, example
        file, row, fault = found.groups()
        rows_by_fault.setdefault((file, fault), []).append(row)
    faults = [f"{file}{', '.join(rows)}: {fault}" for (file, fault), rows in rows_by_fault.items()]
    return ConfigurationError([*faults, f"{number:,} rows cannot be used{first}: {advice}"])


def _run_in_processes(
    units: Sequence[WorkUnit], worker: "UnitWorker", num_proc: int
) -> Generator[tuple[WorkUnit, UnitCounts], None, None]:
    # spawn: a fork would copy the tokenizer's locks while its threads hold them.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(
        num_proc, mp_context=context, initializer=_start_worker, initargs=(worker,)
    )
    kills = memory_kills()
    try:
        # Worker processes inherit this: they ignore Ctrl-C, because this process ends them.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        futures = {executor.submit(_run_unit, unit): unit for unit in units}
        signal.signal(signal.SIGINT, before)
        for future in as_completed(futures):
            found = future.result()
            if not isinstance(found, UnitCounts):
                raise ConfigurationError(found)
            yield futures[future], found
    except BrokenProcessPool as error:
        again = "run the same command again (finished work is kept)"
        if memory_kills() > kills:
            raise OutOfMemoryError(
                "the kernel killed a worker process because this machine's memory ran out: "
                f"{again}, with fewer than --num_proc {num_proc}"
            ) from error
        raise LostProcessError(f"a worker process was killed: {again}") from error
    except KeyboardInterrupt:
        logger.info("Ctrl-C: ending; the same command continues with the finished parts")
        for process in multiprocessing.active_children():
            process.kill()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


_worker: "UnitWorker | None" = None


def _start_worker(worker: "UnitWorker") -> None:
    global _worker  # noqa: PLW0603 - the tasks of this worker process read it
    set_death_signal(signal.SIGKILL)  # without its parent, a worker would wait for ever
    # There is one process per core already, so the tokenizer gets no threads.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = worker


def _run_unit(unit: WorkUnit) -> UnitCounts | list[str]:
    """Prepare a unit in a worker process. Return its counts, or an error's messages."""
    assert _worker is not None
    try:
        return _worker.run(unit)
    except ConfigurationError as error:
        return error.problems  # unlike the error, a list can be pickled


@dataclass
class UnitWorker:
    """Worker that tokenizes work units and writes them into the workspace."""

    tokenizer: "PreTrainedTokenizerBase"
    backend: str
    settings: UnitSettings
    workspace: Workspace

    @cached_property
    def _document_tokenizer(self) -> DocumentTokenizer:
        """The tokenizer, created once per process because gigatoken becomes faster with use."""
        return DocumentTokenizer(self.tokenizer, self.backend, self.settings.template_date)

    def run(self, unit: WorkUnit) -> UnitCounts:
        """Write a unit's documents, one Arrow file per split, and return their counts.

        Writes at most unit.max_tokens tokens. Marks the unit as finished, unless unusable rows stop
        the preparation (`refused` in the counts).
        """
        counts = UnitCounts()
        features = token_features(self._document_tokenizer.id_type, self.settings.document_format)
        limit = math.inf if unit.max_tokens is None else unit.max_tokens
        writers: dict[str, TokenFileWriter] = {}
        for split, document, whole in self._tokenized_documents(unit, counts):
            room = limit - counts.tokens.total()
            is_first_text = not counts.documents and isinstance(document, TextDocument)
            if len(whole.ids) > room and not is_first_text:
                break
            tokenized = whole.truncated(int(min(room, len(whole.ids))))
            if split not in writers:
                writers[split] = TokenFileWriter(
                    self.workspace.unit_file(unit.index, split), features
                )
            writers[split].append(tokenized, document.location)
            counts.documents[split] += 1
            counts.tokens[split] += len(tokenized.ids)
            counts.loss_tokens[split] += tokenized.loss_tokens
            text_bytes = sum(len(text.encode()) for text in texts_of(document))
            written = len(tokenized.ids) / len(whole.ids)
            counts.text_bytes[split] += round(text_bytes * written)
            counts.notes.update(tokenized.notes)
            counts.notes["capped"] += written < 1
            if isinstance(document, ChatDocument):
                last = document.messages[-1]["role"]
                counts.notes["without_last_answer"] += last != ASSISTANT
        for writer in writers.values():
            writer.finish()
        if not counts.refused:
            self.workspace.finish(unit.index, counts)
        return counts

    def _tokenized_documents(
        self, unit: WorkUnit, counts: UnitCounts
    ) -> Iterator[tuple[str, Document, TokenizedDocument]]:
        """Yield (split, document, tokenized document) for every document to write."""
        for batch in _batches(self._documents(unit, counts)):
            found = self._document_tokenizer([document for _, document in batch])
            for (split, document), tokenized in zip(batch, found, strict=True):
                fitted = self._limit_length(document, tokenized, counts)
                if isinstance(fitted, BadRow):
                    self._count_dropped(fitted, counts)
                else:
                    yield split, document, fitted

    def _documents(self, unit: WorkUnit, counts: UnitCounts) -> Iterator[tuple[str, Document]]:
        """Yield (split, document) of each usable record in a unit, once per copy.

        In train, the number of copies is the source's weight. In other splits, there is one copy.
        Unusable records are counted in `counts`.
        """
        whole, fraction = divmod(self.settings.sources[unit.source].weight, 1.0)
        for document in read_documents(unit, self.settings, counts.unread):
            if isinstance(document, BadRow):
                self._count_dropped(document, counts)
                continue
            if isinstance(document, ChatDocument):
                counts.unread.update(unread_keys(document.messages))
            split, copies = unit.split, 1
            if split == TRAIN:
                seed = self.settings.seed
                if _is_sampled(document, self.settings.validation_fraction, seed):
                    split = VALIDATION
                else:
                    copies = int(whole) + _is_sampled(document, fraction, seed + WEIGHT_KEY)
            for _ in range(copies):
                yield split, document

    def _count_dropped(self, row: BadRow, counts: UnitCounts) -> None:
        """Count a dropped row. The row stops the preparation if on_bad_row is "error".

        For rows with too many tokens, on_overlong decides instead. Rows that a filter leaves out,
        and truncated rows without a trained token, never stop the preparation.
        """
        is_long = row.reason == OVERLONG
        setting = self.settings.on_overlong if is_long else self.settings.on_bad_row
        stops = setting == "error" and row.reason not in (FILTERED, TRUNCATED_WITHOUT_LOSS)
        counts.drop(row, (SHORTEN if is_long else REPAIR) if stops else "")

    def _limit_length(
        self, document: Document, tokenized: TokenizedDocument | BadRow, counts: UnitCounts
    ) -> TokenizedDocument | BadRow:
        """Return the tokenized document, or a BadRow if the document is too long or was refused.

        Tokens beyond sequence_length are cut off if on_overlong is "truncate".
        """
        limit = self.settings.sequence_length
        if isinstance(tokenized, BadRow) or limit is None or isinstance(document, TextDocument):
            return tokenized  # training splits a plain text
        length = len(tokenized.ids)
        if length <= limit:
            return tokenized
        too_long = f"{length} tokens, more than the sequence_length of {limit}"
        if self.settings.on_overlong != "truncate":
            return BadRow(OVERLONG, too_long, document.location)
        shortened = tokenized.truncated(limit)
        if not shortened.has_target:
            message = f"{too_long}, and none of its first {limit} is trained on"
            return BadRow(TRUNCATED_WITHOUT_LOSS, message, document.location)
        counts.notes["truncated"] += 1
        return shortened


def read_documents(
    unit: WorkUnit, settings: UnitSettings, unread: Counter[str]
) -> Iterator[Document | BadRow]:
    """Yield the documents of a work unit in order, and a BadRow for each unusable record.

    unread: {label: number of records} of columns that are not read. This function updates these
    numbers. Empty values of a loaded column are not counted.
    """
    rows = settings.sources[unit.source]
    read_columns, convert = set(rows.read_columns), converter(rows.own_format)
    for part in unit.parts:
        for row in read_records(part, None if rows.own_format else rows.read_columns):
            record = row if isinstance(row, BadRow) else convert(row)
            if isinstance(record, BadRow):
                yield record
                continue
            filled = (name for name, value in record.fields.items() if value not in EMPTY_VALUES)
            unread.update(f"column {name}" for name in {*filled, *record.left_out} - read_columns)
            yield parse_document(record, rows)


def _batches(documents: Iterator[tuple[str, Document]]) -> Iterator[list[tuple[str, Document]]]:
    """Group (split, document) pairs into lists of limited size to tokenize together."""
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


def _is_sampled(document: Document, fraction: float, key: int) -> bool:
    return fraction > 0 and content_digest(document, key) < fraction * 2.0**64


def content_digest(document: Document, seed: int) -> int:
    """Return a 64-bit hash of a document's content, keyed by `seed`.

    The hash does not depend on the document's file and row.
    """
    if isinstance(document, TextDocument):
        content = document.text
    elif isinstance(document, ChatDocument):
        content = json.dumps([document.messages, document.tools], sort_keys=True, default=str)
    elif isinstance(document, PiecesDocument):
        content = json.dumps(document.pieces)
    else:
        content = json.dumps([document.prompt, document.completion])
    key = seed.to_bytes(16, "little", signed=True)
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8, key=key).digest(), "big")


def texts_of(document: Document) -> list[str]:
    """Return a document's texts in order, including the reasoning and tool calls of messages."""
    if isinstance(document, TextDocument):
        return [document.text]
    if isinstance(document, CompletionDocument):
        return [document.prompt, document.completion]
    if isinstance(document, PiecesDocument):
        return [piece for piece, _ in document.pieces if isinstance(piece, str)]
    texts: list[str] = []
    for message in document.messages:
        texts += [message["content"], message.get("reasoning_content") or ""]
        if calls := message.get("tool_calls"):
            texts.append(json.dumps(calls, ensure_ascii=False))
    return texts
