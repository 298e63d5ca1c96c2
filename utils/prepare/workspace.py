"""The workspace OUT/.shards: the Arrow files and counts of finished work units.

OUT is output_dir. A work unit is a piece of a source that one worker tokenizes. A unit is finished
when its JSON file with counts exists. Files are written under temporary names and renamed when they
are complete. Therefore a preparation may be killed at any time, and several shards may write at the
same time.
"""

import json
import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from utils.config.errors import ConfigurationError
from utils.config.preparation import TRAIN
from utils.data.description import read_description
from utils.host.atomic_files import replace_text
from utils.host.machine import host_name
from utils.host.run_lock import run_owners
from utils.prepare.values import FILTERED, BadRow

logger = logging.getLogger(__name__)

WORKSPACE = ".shards"
_OWN_FILES = re.compile(
    r"\w+/(data-[\w-]+\.arrow|(stoker|state|dataset_info)\.json)|tokenizer/.*|\.shards.*"
    r"|.*\.partial(/.*)?|\w+/\..*\.json\..*\.tmp|\.append.*"
)
SETTINGS_FILE = "settings.json"
EXAMPLES_KEPT = 10
# Counts of unusual documents: the name of each count and its line in the log.
NOTE_TEXTS = {
    "truncated": "documents were cut to sequence_length",
    "capped": "texts were cut to max_tokens of their source",
    "prompt_words_in_completions": "completions begin in the middle of a token, which is trained "
    "on with the end of the prompt that is in it: end such prompts with a line end, or begin the "
    "completions with a blank",
    "prompt_blanks_in_completions": "prompts end with a blank that the first token of their "
    "completion takes in, and it is trained on: ask the model without that blank",
    "unknown_tokens": "tokens stand for text that the tokenizer has no token for",
    "empty_thoughts": "answers train an empty thought, which teaches the model not to think. For a "
    "model that answers at once set chat_template_kwargs: {enable_thinking: false}. For one that "
    "thinks give answers with thoughts (docs/data.md, Thoughts)",
    "answers_without_empty_thought": "answers have no empty thought, because the chat template "
    "prints one before the last answer only. They teach the model not to think. To keep its "
    "thinking give such a chat once for every answer, each time up to that answer and with "
    "weight: 0 in the answers before it",
    "thoughts_after_closed_prompts": "answers think although their prompts say not to "
    "(chat_template_kwargs: enable_thinking false): give these chats a source of their own with "
    "{enable_thinking: true}, or that as their column chat_template_kwargs",
    "special_tokens_in_answers": "answers hold special tokens as text, such as an end of a turn, "
    "which are trained on as these tokens: remove those that the chat template prints itself",
    "odd_characters_in_answers": "answers have line ends of Windows (\\r), control or zero-width "
    "characters, or remains of wrong decoding or of HTML (&amp;), which the model learns to write: "
    "remove them unless they are meant",
    "without_last_answer": "chats end with a message that is not the assistant's; that "
    "message is not trained on",
    "without_earlier_thinking": "chats train earlier answers without their thoughts, which the "
    "chat template prints in the last turn only: set the variable with which the template prints "
    "all (docs/data.md, Thoughts), or give such a chat once for every answer, each time up to that "
    "answer and with weight: 0 in the answers before it",
}
# Notes that are logged as warnings: thoughts in the wrong answers, or answers without thoughts.
TRAINED_WRONGLY = {"thoughts_after_closed_prompts", "without_earlier_thinking"}


@dataclass
class UnitCounts:
    """Counts over the records of one or more work units.

    documents, tokens, loss_tokens, text_bytes: {split: count}. notes: {name in NOTE_TEXTS: count}.
    dropped: {reason: records}. refused: {advice to the user: records that stop the preparation}.
    unread: {label: records} of columns, message keys and roles that are not read. examples:
    messages about the first refused records, or about the first dropped records if none is refused.
    """

    documents: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    loss_tokens: Counter[str] = field(default_factory=Counter)
    text_bytes: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def drop(self, row: BadRow, advice: str = "") -> None:
        """Count a dropped record.

        advice: what the user can do about a record that stops the preparation. "" means that the
        record does not stop it.
        """
        self.dropped[row.reason] += 1
        if advice and not self.refused:
            self.examples.clear()
        if advice:
            self.refused[advice] += 1
        is_example = row.reason != FILTERED and bool(advice) == bool(self.refused)
        if is_example and len(self.examples) < EXAMPLES_KEPT:
            self.examples.append(str(row))

    def __add__(self, other: "UnitCounts") -> "UnitCounts":
        total = {name: counts + getattr(other, name) for name, counts in vars(self).items()}
        return UnitCounts(**total | {"examples": total["examples"][:EXAMPLES_KEPT]})


def earlier_hub_commits(output_dir: Path) -> dict[str, str]:
    """Return {NAME@REVISION: commit} of the Hub datasets used by earlier work in output_dir."""
    with suppress(OSError, ValueError):
        settings = json.loads((output_dir / WORKSPACE / SETTINGS_FILE).read_text(encoding="utf-8"))
        return dict(settings.get("hub", {}))
    described = read_description(output_dir / TRAIN)
    return dict(described.preparation.get("sources", {}).get("hub", {})) if described else {}


@dataclass(frozen=True)
class Workspace:
    """Working files of one preparation. digest: the hash of its sources, settings and tokenizer.

    commits: {NAME@REVISION: commit} of the Hub datasets among the sources. replaced: the folder of
    finished datasets that `publish` replaces by output_dir (--overwrite). relative_digest: `digest`
    with paths relative to output_dir, to recognize datasets that were copied with their sources.
    """

    output_dir: Path
    digest: str
    commits: Mapping[str, str] = field(default_factory=dict)
    replaced: Path | None = None
    relative_digest: str = ""

    @property
    def root(self) -> Path:
        """The folder OUT/.shards, which is deleted when the datasets are complete."""
        return self.output_dir / WORKSPACE

    def is_prepared(self) -> bool:
        """Return whether output_dir has finished datasets of exactly these settings and sources.

        Raises ConfigurationError if output_dir has other contents, except unfinished work.
        """
        if self.output_dir.exists() and not self.output_dir.is_dir():
            raise ConfigurationError(f"output_dir: {self.output_dir}: is a file, not a folder")
        if self.root.exists() or not self.output_dir.exists():
            return False
        if self._has_current_datasets():
            return True
        others = sorted(entry.name for entry in self.output_dir.iterdir())
        if others and self.replaced is None:
            raise ConfigurationError(
                f"output_dir: {self.output_dir}: holds {', '.join(others[:5])}, which was not made "
                "by these settings from these sources: choose another --output_dir, or replace "
                "finished datasets with --overwrite"
            )
        return False

    def _has_current_datasets(self) -> bool:
        described = read_description(self.output_dir / TRAIN)
        found = described.preparation if described else {}
        moved = found.get("movable_sha256") == self.relative_digest != ""
        return moved or found.get("settings_sha256") == self.digest

    def overwriting(self) -> "Workspace":
        """Return a workspace in a new folder if output_dir has finished datasets of other settings.

        Otherwise returns this workspace. Changes nothing on disk. Raises ConfigurationError if
        output_dir has files that no preparation wrote, or if a run is using output_dir.
        """
        folder = self.output_dir.resolve()
        old, new = beside(folder, "old"), beside(folder, "new")
        # If a process was killed in `publish`, the finished datasets are still in `old`.
        finished = folder if folder.exists() else old
        if self.root.exists() or not (finished / TRAIN).exists() or self._has_current_datasets():
            return self
        for each in (folder, old, new):
            refuse_foreign_files(each)
        for owner in run_owners(folder.parent):  # the folder may be data/ of a run
            if owner.alive and owner.pid != os.getpid():
                raise ConfigurationError(
                    f"output_dir: {folder}: is in use by {owner}: wait for the end, or choose "
                    "another --output_dir"
                )
        return replace(self, output_dir=new, replaced=folder)

    def publish(self) -> Path:
        """Move the datasets from output_dir to the folder `replaced`, and return that folder.

        The old datasets in `replaced` are deleted. Without `replaced`, return output_dir.
        """
        folder = self.replaced
        if folder is None:
            return self.output_dir
        old = beside(folder, "old")
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.replace(old)
        self.output_dir.replace(folder)
        shutil.rmtree(old, ignore_errors=True)
        logger.info("%s: the datasets of other settings are replaced", folder)
        return folder

    def open(self, *, may_discard: bool) -> None:
        """Create the workspace, or resume an existing one.

        Raises ConfigurationError if the workspace has finished units of other settings or sources.
        Deletes these units instead if `may_discard` is True and their assembly has not begun.
        """
        if self.replaced and not self.root.exists():
            shutil.rmtree(self.output_dir, ignore_errors=True)  # left by a killed --overwrite
        settings = self.root / SETTINGS_FILE
        hub = {"hub": dict(self.commits)} if self.commits else {}
        content = json.dumps({"digest": self.digest, **hub}, indent=1)
        if settings.exists():
            if settings.read_text(encoding="utf-8") == content:
                return
            if any(self.root.glob("unit-*.json")):
                if not may_discard or (self.output_dir / TRAIN).exists():
                    raise ConfigurationError(
                        f"{self.root}: holds unfinished work of other settings, or of sources that "
                        "have changed: finish it with its settings, or remove it, or choose "
                        "another --output_dir"
                    )
                logger.warning(f"{self.root}: units of other settings are discarded")
            shutil.rmtree(self.root)
        self.root.mkdir(parents=True, exist_ok=True)
        replace_text(settings, content)

    def unit_file(self, unit: int, split: str) -> Path:
        """Return the path of the Arrow file for a work unit's documents of one split."""
        return self.root / f"unit-{unit:06d}-{split}.arrow"

    def finish(self, unit: int, counts: UnitCounts) -> None:
        """Write the JSON file with a unit's counts, which marks the unit as finished."""
        record = {"digest": self.digest, "counts": vars(counts)}
        replace_text(self.root / f"unit-{unit:06d}.json", json.dumps(record, indent=1))

    def counts_of(self, unit: int) -> UnitCounts | None:
        """Return a finished unit's counts. None means that the unit must be prepared (again)."""
        try:
            record = json.loads((self.root / f"unit-{unit:06d}.json").read_text(encoding="utf-8"))
            examples = record["counts"].pop("examples")
            counts = {name: Counter(value) for name, value in record["counts"].items()}
            found = UnitCounts(**counts, examples=examples)
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None
        return found if record["digest"] == self.digest else None

    def is_last_of_array(self, array: str, shard: int, shards: int) -> bool:
        """Mark a job array's shard as done. Return whether this Slurm task must merge all shards.

        The last task merges. If two tasks end at once, both may see all shards as done, but only
        one of them can create the link `claim`. A requeued task that finds its own link merges
        again. The link's name contains the array's id, so a dead task does not block later arrays.
        """
        finished, claim = self.root / f"array-{array}", self.root / f"array-{array}-merged-by"
        try:
            finished.mkdir(exist_ok=True)
            (finished / str(shard)).touch()
            # List the folder: NFS may answer for a single file from a stale cache.
            if len(list(finished.iterdir())) < shards:
                return False
            claim.symlink_to(str(shard))  # atomic, also on network file systems
        except FileNotFoundError:  # another task has merged, and removed the folder
            return False
        except FileExistsError:
            return str(claim.readlink()) == str(shard)
        return True

    def remove(self) -> None:
        """Delete the workspace. Its Arrow files must have been moved before."""
        # Rename the folder first: a half-deleted workspace must not look like unfinished work.
        finished = self.root.with_name(f"{self.root.name}.finished")
        if self.root.exists():
            self.root.replace(finished)
        shutil.rmtree(finished, ignore_errors=True)


def beside(folder: str | Path, state: str) -> Path:
    """Return the path .NAME.STATE beside a folder NAME. state: "old" or "new".

    During --overwrite, this path has the folder's old or new datasets.
    """
    resolved = Path(folder).resolve()
    return resolved.with_name(f".{resolved.name}.{state}")


def foreign_files(folder: Path) -> list[str]:
    """Return the names of links, and of files that no preparation wrote, below a folder."""
    found = []
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink() or (path.is_file() and not _OWN_FILES.fullmatch(name)):
            found.append(name)
    return found


def refuse_foreign_files(folder: Path) -> None:
    """Raise ConfigurationError if a folder has links, or files that no preparation wrote."""
    if others := foreign_files(folder):
        raise ConfigurationError(
            f"output_dir: {folder}: holds {', '.join(others[:5])}, which prepare_data.py did not "
            "write: nothing is overwritten; move it away, or choose another --output_dir"
        )


def partial_name(path: Path) -> Path:
    """Return a temporary path beside `path` that no other process uses."""
    return path.with_name(f".{path.name}.{host_name()}.{os.getpid()}.partial")
