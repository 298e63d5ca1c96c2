"""The preparation of token datasets: plan, tokenizer, work units, assembly."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from utils.config.errors import ConfigurationError
from utils.config.preparation import PreparationArguments, check_preparation, shard_of
from utils.data.preparation import assembly
from utils.data.preparation.encoding import choose_backend
from utils.data.preparation.output import is_already_prepared
from utils.data.preparation.plan import plan_preparation
from utils.data.preparation.report import report_lines, source_lines, total_counts
from utils.data.preparation.tokenizer_choice import (
    given_tokenizer,
    save_tokenizer,
    tokenizer_identity,
    trained_tokenizer,
)
from utils.data.preparation.unit import UnitCounts
from utils.data.preparation.unit_pool import UnitJob, run_units
from utils.data.preparation.workspace import Workspace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


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
