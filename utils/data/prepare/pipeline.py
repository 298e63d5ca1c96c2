"""Progress of a preparation: a bar on a terminal, a plain line every ten seconds elsewhere."""

import json
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from tqdm import tqdm

from utils.config.errors import ConfigurationError
from utils.config.preparation import PreparationArguments, check_preparation, shard_of
from utils.data.description import DESCRIPTION_FILE
from utils.data.prepare import assembly
from utils.data.prepare.assembly import report_lines, source_lines, total_counts
from utils.data.prepare.plan import (
    given_tokenizer,
    plan_preparation,
    save_tokenizer,
    tokenizer_identity,
    trained_tokenizer,
)
from utils.data.prepare.sources import WorkUnit
from utils.data.prepare.tokenization import DocumentTokenizer, choose_backend
from utils.data.prepare.unit import TRAIN, VALIDATION, UnitCounts, UnitPreparation, UnitSettings
from utils.data.prepare.workspace import Workspace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 10.0


class PreparationProgress:
    """Shows documents/s and tokens/s; a context manager.

    total_bytes: size of the sources still to be read; `done_bytes` is counted unit by unit.
    """

    def __init__(self, total_bytes: int):
        self.documents = self.tokens = self.done_bytes = 0
        self._total_bytes = total_bytes
        self._start = self._shown = time.monotonic()
        self._bar = (
            tqdm(total=total_bytes, unit="B", unit_scale=True, desc="tokenizing")
            if sys.stderr.isatty()
            else None
        )

    def show(self, documents: int, tokens: int, done_bytes: int) -> None:
        """Take the totals so far and show them, when it is time."""
        moved = done_bytes - self.done_bytes
        self.documents, self.tokens, self.done_bytes = documents, tokens, done_bytes
        if self._bar is not None:
            self._bar.set_postfix_str(self._rates(), refresh=False)
            self._bar.update(moved)
        elif time.monotonic() - self._shown >= SECONDS_BETWEEN_LINES:
            self._shown = time.monotonic()
            logger.info("%s", self._line())

    def __enter__(self) -> "PreparationProgress":
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if error_type is None:
            logger.info("%s", self._line())

    def _rates(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        return f"{self.documents / seconds:,.0f} documents/s, {self.tokens / seconds:,.0f} tokens/s"

    def _line(self) -> str:
        return (
            f"{self.done_bytes / 2**20:,.1f} of {self._total_bytes / 2**20:,.1f} MiB, "
            f"{self.documents:,} documents, {self.tokens:,} tokens "
            f"({self._rates()}, {time.monotonic() - self._start:.0f} s)"
        )


# The pool that prepares work units, in this process or in several.

SECONDS_BETWEEN_LOOKS = 0.5
# What one process does in the seconds that a worker takes to start.
LEAST_BYTES_A_WORKER = {"gigatoken": 64 << 20, "tokenizers": 4 << 20}


@dataclass(frozen=True)
class UnitJob:
    """What a worker needs: the very tokenizer object, the settings and where results go."""

    tokenizer: "PreTrainedTokenizerBase"
    backend: str
    settings: UnitSettings
    workspace: Workspace

    def run(self, unit: WorkUnit, progress: Callable[[int, int], None]) -> UnitCounts:
        """Prepare one unit into the workspace."""
        preparation = UnitPreparation(self._document_tokenizer, self.settings)
        splits = [unit.split]
        if unit.split == TRAIN and self.settings.validation_fraction > 0:
            splits.append(VALIDATION)

        def prepare(unit: WorkUnit, files: dict[str, Path]) -> UnitCounts:
            return preparation(unit, files, progress)

        return self.workspace.prepare(unit, splits, prepare)

    @cached_property
    def _document_tokenizer(self) -> DocumentTokenizer:
        """Made once a process: gigatoken grows quicker with what it has seen."""
        return DocumentTokenizer(self.tokenizer, self.backend, self.settings.template_date)


def run_units(units: Sequence[WorkUnit], job: UnitJob, num_proc: int) -> None:
    """Prepare all units, in at most `num_proc` workers; the result does not depend on it.

    Little work is done in this process, by as many threads of the tokenizer.

    Raises ConfigurationError with the first fault of the sources, or when a worker was killed.
    Units that were finished by then stay finished.
    """
    if not units:
        return
    size = sum(unit.size for unit in units)
    workers = min(num_proc, len(units), size // LEAST_BYTES_A_WORKER[job.backend])
    with PreparationProgress(size) as progress:
        if workers < 2:
            _run_here(units, job, progress)
        else:
            _run_in_processes(units, job, workers, progress)


def _run_here(units: Sequence[WorkUnit], job: UnitJob, progress: PreparationProgress) -> None:
    def advance(documents: int, tokens: int) -> None:
        progress.show(progress.documents + documents, progress.tokens + tokens, progress.done_bytes)

    for unit in units:
        job.run(unit, advance)
        progress.show(progress.documents, progress.tokens, progress.done_bytes + unit.size)


def _run_in_processes(
    units: Sequence[WorkUnit], job: UnitJob, num_proc: int, progress: PreparationProgress
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
        done_bytes = 0
        while pending:
            done, pending = wait(pending, SECONDS_BETWEEN_LOOKS, return_when=FIRST_EXCEPTION)
            for future in sorted(done, key=lambda f: futures[f].index):
                problems = future.result()
                if problems:
                    raise ConfigurationError(problems)
                done_bytes += futures[future].size
            progress.show(totals[0], totals[1], done_bytes)
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


# The output directory of a preparation: whether it is vacant, unfinished or already done.


def is_already_prepared(output_dir: Path, workspace: Workspace, used_tokenizer: str | None) -> bool:
    """Return whether `output_dir` holds the finished result of this very preparation.

    False for a vacant directory and for unfinished work. Raises ConfigurationError when anything
    else is in it: nothing is written over. `used_tokenizer`: a tokenizer that lies in
    `output_dir` may stay if it is the one in use.
    """
    if output_dir.exists() and not output_dir.is_dir():
        raise ConfigurationError(f"output_dir: {output_dir}: is a file, not a folder")
    prepared = _prepared_digest(output_dir)
    if workspace.root.exists():
        return False
    if prepared == workspace.digest:
        return True
    if prepared is not None:
        raise ConfigurationError(
            f"output_dir: {output_dir}: holds a dataset that was prepared with other settings or "
            "from sources that have changed since; nothing is written over: choose another "
            "--output_dir, or remove it first"
        )
    own = {"tokenizer"} if _is_same(used_tokenizer, output_dir / "tokenizer") else set()
    others = sorted(entry.name for entry in _entries(output_dir) if entry.name not in own)
    if others:
        raise ConfigurationError(
            f"output_dir: {output_dir}: holds other files ({', '.join(others[:5])}); nothing is "
            "written over: choose a new or empty folder"
        )
    return False


def _prepared_digest(output_dir: Path) -> str | None:
    try:
        content = json.loads((output_dir / TRAIN / DESCRIPTION_FILE).read_text(encoding="utf-8"))
        return str(content["preparation"]["settings_sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.exists() else []


def _is_same(used: str | None, placed: Path) -> bool:
    return used is not None and Path(used).resolve() == placed.resolve()


# The preparation of token datasets: plan, tokenizer, work units, assembly.


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
        digest = self.plan.digest(tokenizer_identity(self._given, arguments))
        self.workspace = Workspace(self.output_dir, digest)
        self.is_finished = is_already_prepared(
            self.output_dir, self.workspace, arguments.tokenizer_name_or_path
        )
        if (
            arguments.merge is not None
            and not self.is_finished
            and not self.workspace.root.exists()
        ):
            raise ConfigurationError(
                f"merge: {self.output_dir}: no shard has been run into this folder"
            )

    def provide_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Write the tokenizer into the workspace, training it if asked to, and return it."""
        # Threads of the tokenizer in this process; worker processes use one each.
        os.environ.setdefault("RAYON_NUM_THREADS", str(self.arguments.num_proc))
        self.workspace.open()
        folder, placed = self.workspace.tokenizer, self.output_dir / "tokenizer"
        # An assembly that was interrupted may have moved it already.
        is_placed = placed.exists() and not folder.exists()
        if self._given is None:
            return trained_tokenizer(self.plan, self.arguments, placed if is_placed else folder)
        if not is_placed and not folder.exists():
            save_tokenizer(self._given, folder)
        return self._given

    def finish_with_tokenizer(self) -> None:
        """End here: move the tokenizer to OUT/tokenizer."""
        assembly.place_tokenizer(self.workspace, self.output_dir)
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
        backend = choose_backend(
            self.arguments.tokenizer_backend, tokenizer, self.plan.settings.document_format
        )
        job = UnitJob(tokenizer, backend, self.plan.settings, self.workspace)
        run_units(left, job, self.arguments.num_proc)
        if shards > 1:
            done = [self.workspace.counts_of(unit.index) for unit in own]
            self._report(total_counts(counts for counts in done if counts is not None))
            logger.info(
                "shard %d/%d is complete; when every shard is, run the same settings with "
                "--merge %d in place of --shard",
                *(index, shards, shards),
            )

    def assemble(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Make the datasets out of the finished units, and report.

        Raises ConfigurationError naming the shards that are incomplete, or a split that is left
        without documents.
        """
        shards = self.arguments.merge or 1
        counts = assembly.finished_counts(self.plan.units, self.workspace, shards)
        self._report(total_counts(counts.values()))
        for line in source_lines(self.plan.units, counts):
            logger.info("%s", line)
        assembly.check_every_split_has_documents(self.plan.splits, counts)
        for split in self.plan.splits:
            files = assembly.move_files(split, self.output_dir, self.workspace, counts)
            assembly.describe(self.plan, self.workspace.digest, split, files, counts, tokenizer)
        assembly.place_tokenizer(self.workspace, self.output_dir)
        self.workspace.remove()
        written = ", ".join(str(self.output_dir / split) for split in self.plan.splits)
        logger.info("written: %s", written)

    def _report(self, counts: UnitCounts) -> None:
        for line in report_lines(counts, self.plan.splits):
            logger.info("%s", line)
