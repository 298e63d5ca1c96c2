"""The output directory and its workspace OUT/.shards: finished work units, not assembled yet.

A unit is done once its record exists. Records and files get their names by renaming, so that a
preparation may be killed at any moment and shards may write side by side.
"""

import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from utils.config.errors import ConfigurationError
from utils.data.description import DESCRIPTION_FILE
from utils.data.prepare.documents import FILTERED
from utils.data.prepare.plan import TRAIN
from utils.data.prepare.records import BadRow
from utils.support.files import replace_text
from utils.support.host import host_name

logger = logging.getLogger(__name__)

WORKSPACE = ".shards"
EXAMPLES_KEPT = 5


@dataclass
class SplitCounts:
    """What one unit, or several, put into a split; `lengths`: documents by length in tokens."""

    documents: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    text_bytes: int = 0
    lengths: Counter[int] = field(default_factory=Counter)


@dataclass
class UnitCounts:
    """What became of the records of a unit; `dropped` by reason, with the first few messages."""

    splits: dict[str, SplitCounts] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    truncated: int = 0
    continued: int = 0
    without_earlier_thinking: int = 0

    def drop(self, row: BadRow) -> None:
        """Count a record that is left out."""
        self.dropped[row.reason] += 1
        if row.reason != FILTERED and len(self.examples) < EXAMPLES_KEPT:
            self.examples.append(str(row))

    def add(self, other: "UnitCounts") -> None:
        """Add the counts of another unit."""
        for name, split in other.splits.items():
            _add(self.splits.setdefault(name, SplitCounts()), split)
        _add(self, other)
        del self.examples[EXAMPLES_KEPT:]

    @classmethod
    def total(cls, counts: Iterable["UnitCounts"]) -> "UnitCounts":
        """Add up the counts of units."""
        total = cls()
        for unit in counts:
            total.add(unit)
        return total

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "UnitCounts":
        """Rebuild the counts from the JSON form of their fields; keys of older versions pass."""
        splits = {}
        for name, split in content["splits"].items():
            known = {each.name: split[each.name] for each in fields(SplitCounts)}
            lengths = {int(length): documents for length, documents in split["lengths"].items()}
            splits[name] = SplitCounts(**{**known, "lengths": Counter(lengths)})
        return cls(**{**content, "splits": splits, "dropped": Counter(content["dropped"])})


def _add(total: Any, counts: Any) -> None:
    """Add the numbers, counters and lists of one dataclass to another's."""
    for name in (each.name for each in fields(total) if each.name != "splits"):
        setattr(total, name, getattr(total, name) + getattr(counts, name))


class Workspace:
    """Files of one preparation; `digest` identifies its sources and settings."""

    def __init__(self, output_dir: Path, digest: str):
        self.output_dir = output_dir
        self.root = output_dir / WORKSPACE
        self.tokenizer = self.root / "tokenizer"
        self.digest = digest

    def open(self, *, may_discard: bool) -> None:
        """Create the workspace, or resume the one that is there.

        Units of other settings or sources are discarded, if `may_discard` and their assembly has
        not begun; else ConfigurationError is raised.
        """
        settings = self.root / "settings.json"
        if settings.exists():
            if _read(settings).get("digest") == self.digest:
                return
            units = len(list(self.root.glob("unit-*.json")))
            if units and (not may_discard or (self.output_dir / TRAIN).exists()):
                raise ConfigurationError(
                    f"{self.root}: holds unfinished work of other settings, or of sources that "
                    "have changed: finish it with its settings, or remove it, or choose another "
                    "--output_dir"
                )
            if units:
                logger.warning(f"{self.root}: {units:,} units of other settings are discarded")
            shutil.rmtree(self.root)
        self.root.mkdir(parents=True, exist_ok=True)
        replace_text(settings, json.dumps({"digest": self.digest}, indent=1))

    def unit_file(self, unit: int, split: str) -> Path:
        """Return the file of the documents of a unit that belong to a split."""
        return self.root / f"unit-{unit:06d}-{split}.arrow"

    def finish(self, unit: int, files: Mapping[str, Path], counts: UnitCounts) -> None:
        """Give the files of a unit (split -> draft) their names, then its record: it is done."""
        for split, draft in files.items():
            if counts.splits[split].documents:
                draft.replace(self.unit_file(unit, split))
            else:
                del counts.splits[split]
        record = {"digest": self.digest, "counts": counts}
        replace_text(self._record(unit), json.dumps(record, indent=1, default=vars))

    def counts_of(self, unit: int) -> UnitCounts | None:
        """Return the counts of a finished unit, None when it is still to be done."""
        try:
            record = _read(self._record(unit))
        except FileNotFoundError:
            return None
        return UnitCounts.from_json(record["counts"]) if record["digest"] == self.digest else None

    def is_last_of_array(self, array: str, shard: int, shards: int) -> bool:
        """Note that a shard of a job array is done; return whether its task is to merge them all.

        Of two tasks that end at once the later one sees both, and one of them makes the claim; a
        requeued task finds its own again. The files carry the array's name, so that a task that
        died never blocks a later array.
        """
        done = f"array-{array}-finished-"
        claim = self.root / f"array-{array}-merged-by"
        try:
            (self.root / f"{done}{shard}").touch()
            # Listing asks the server; NFS may answer for a single file from a stale cache.
            present = set(os.listdir(self.root))  # noqa: PTH208 - names are compared
            missing = sum(f"{done}{other}" not in present for other in range(shards))
            if missing:
                logger.info("%d of %d shards are left; the last one merges", missing, shards)
                return False
            claim.symlink_to(str(shard))  # atomic, also on network file systems
        except FileNotFoundError:
            logger.info("another task has merged the shards meanwhile")
            return False
        except FileExistsError:
            if str(claim.readlink()) != str(shard):
                logger.info("all %d shards are complete; another task merges them", shards)
                return False
        logger.info("all %d shards are complete: merging", shards)
        return True

    def remove(self) -> None:
        """Delete the workspace: its files have been moved to where they belong."""
        # Renamed first: a workspace that is half deleted must not look like unfinished work.
        finished = self.root.with_name(f"{self.root.name}.finished")
        if self.root.exists():
            self.root.replace(finished)
        shutil.rmtree(finished, ignore_errors=True)

    def _record(self, unit: int) -> Path:
        return self.root / f"unit-{unit:06d}.json"


def is_already_prepared(workspace: Workspace, used_tokenizer: str | None) -> bool:
    """Return whether the output directory holds the finished result of this very preparation.

    False for an empty directory and for unfinished work. Raises ConfigurationError when anything
    else is in it: nothing is overwritten. `used_tokenizer`: a tokenizer that lies in the output
    directory may stay if it is the one in use.
    """
    output_dir = workspace.output_dir
    if output_dir.exists() and not output_dir.is_dir():
        raise ConfigurationError(f"output_dir: {output_dir}: is a file, not a folder")
    if workspace.root.exists() or not output_dir.exists():
        return False
    try:
        content = json.loads((output_dir / TRAIN / DESCRIPTION_FILE).read_text(encoding="utf-8"))
        if content["preparation"]["settings_sha256"] == workspace.digest:
            return True
    except (OSError, ValueError, KeyError, TypeError):
        pass
    tokenizer = Path(used_tokenizer or "").resolve()
    entries = sorted(output_dir.iterdir())
    others = [e.name for e in entries if e.name != "tokenizer" or e.resolve() != tokenizer]
    if not others:
        return False
    raise ConfigurationError(
        f"output_dir: {output_dir}: holds {', '.join(others[:5])}, which was not made by these "
        "settings from these sources. Nothing is overwritten: choose another --output_dir, or "
        "remove it first"
    )


def partial_name(path: Path) -> Path:
    """Return a name beside `path` that no other process uses."""
    return path.with_name(f".{path.name}.{host_name()}.{os.getpid()}.partial")


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path}: is damaged ({error}): remove it") from error
