"""The pool that prepares work units, in this process or in several."""

import logging
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path
from typing import TYPE_CHECKING

from utils.config.errors import ConfigurationError
from utils.data.prepare.plan import TRAIN, VALIDATION, UnitSettings, WorkUnit
from utils.data.prepare.tokenization import DocumentTokenizer
from utils.data.prepare.units import Progress, UnitCounts, UnitPreparation
from utils.data.prepare.workspace import Workspace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

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
