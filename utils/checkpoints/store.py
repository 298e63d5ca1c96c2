"""The checkpoints of a run: room before a save, the commit after it, then rotation.

Trainer writes its files as it always does. Then all ranks meet, each brings its own files to
stable storage and hashes them, and rank 0 writes the manifest last. No directory is renamed: in the
designs that upstream took back twice, ranks raced for one name (transformers #28364, #36112).
"""

import datetime
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.checkpoints.discovery import checkpoint_problems
from utils.checkpoints.files import MANIFEST, FileRecord, flush_and_record, list_files, owner
from utils.checkpoints.manifest import Manifest, write_manifest
from utils.checkpoints.rotation import make_room, rotate
from utils.cluster.decisions import on_every_rank, on_rank_0
from utils.cluster.host import host_name
from utils.config.errors import StorageError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFacts:
    """What every manifest of a start says of the run, see `Manifest`."""

    run_id: str
    world_size: int
    strategy: str
    global_batch_size: int
    fingerprints: Mapping[str, Any]
    versions: Mapping[str, str | None]


class Checkpoints:
    """Commits and keeps the checkpoints of a run; every method is collective over ranks.

    `keep` newest ones stay (None: all) and the best; `estimated_bytes` is what one takes, until one
    is there to go by.
    """

    def __init__(
        self,
        output_dir: Path,
        facts: RunFacts,
        rank: int,
        *,
        keep: int | None,
        estimated_bytes: int,
    ):
        self.output_dir, self.facts, self.rank = output_dir, facts, rank
        self.keep, self.estimated_bytes = keep, estimated_bytes

    def directory(self, step: int) -> Path:
        """Return where the checkpoint of a step belongs."""
        return self.output_dir / f"checkpoint-{step}"

    def is_committed(self, step: int) -> bool:
        """Whether this step has a checkpoint already: then it holds just what a new one would."""
        return on_rank_0((self.directory(step) / MANIFEST).is_file)

    def prepare(self, best: Path | None) -> None:
        """See that the next checkpoint has room; raises StorageError on all ranks."""
        on_rank_0(
            lambda: make_room(
                self.output_dir, self.facts.run_id, self.keep, best, self.estimated_bytes
            )
        )

    def commit(self, step: int, *, tokens: int, best: Path | None) -> None:
        """Make what was written for this step a checkpoint, then rotate; raises StorageError."""
        begun = time.monotonic()
        directory = self.directory(step)
        records: dict[str, FileRecord] = {}
        for own in on_every_rank(lambda: self._own_records(directory)):
            records |= own
        on_rank_0(lambda: self._commit(directory, self._manifest(step, tokens, records)))
        if self.rank == 0:
            rotate(self.output_dir, self.facts.run_id, self.keep, best)
        size_gib = sum(record.size_bytes for record in records.values()) / 2**30
        logger.info(
            "%s committed (%.3f GiB, %.1f s)", directory, size_gib, time.monotonic() - begun
        )

    def check(self, directory: Path) -> None:
        """See that a committed checkpoint is still whole; raises StorageError on all ranks."""

        def check() -> None:
            step = int(directory.name.rpartition("-")[2])
            problems = checkpoint_problems(directory, step, self.facts.run_id)
            if problems:
                raise StorageError(
                    f"{host_name()}: {directory} is damaged ({'; '.join(problems)}): see whether "
                    "the storage is sound."
                )

        on_rank_0(check)

    def _own_records(self, directory: Path) -> dict[str, FileRecord]:
        own = [name for name in list_files(directory) if owner(name) == self.rank]
        return flush_and_record(directory, own)

    def _commit(self, directory: Path, manifest: Manifest) -> None:
        unknown = set(list_files(directory)) - set(manifest.files)
        if unknown:
            raise StorageError(
                f"{host_name()}: {directory} has files that no rank wrote "
                f"({', '.join(sorted(unknown))}) and was not committed: does another job write "
                "there?"
            )
        write_manifest(directory, manifest)

    def _manifest(self, step: int, tokens: int, records: Mapping[str, FileRecord]) -> Manifest:
        facts = self.facts
        return Manifest(
            **vars(facts),
            step=step,
            samples=step * facts.global_batch_size,
            tokens=tokens,
            time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            files=records,
        )
