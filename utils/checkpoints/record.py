"""The record of a run: config.yaml and provenance.json, and the copies of both in checkpoints.

A start is one execution of the training script, and a resume is another start. config.yaml has the
settings of the first start and never changes. provenance.json has a list `starts`. Each start
appends an entry with versions, changed settings and the Slurm job. Each checkpoint has copies of
both files in its folder `run`, and the manifest has digests of the copies. A file is damaged if it
is missing or unreadable, or contradicts the copy. Stoker then reads the copy, and the next start or
save of the run replaces the damaged file by the copy.
"""

import contextlib
import datetime
import json
import logging
import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from utils.checkpoints.discovery import DAMAGED, numbered_checkpoints, set_aside
from utils.checkpoints.files import (
    CONFIG,
    FINAL,
    PROVENANCE,
    RECORD,
    RUN_ID,
    DamagedCheckpointError,
    file_digests,
    read_manifest,
)
from utils.config.errors import ConfigurationError
from utils.config.recipes import load_mapping
from utils.host.atomic_files import replace_text
from utils.host.journal_file import FILE_NAME as JOURNAL
from utils.host.journal_file import LATEST

logger = logging.getLogger(__name__)

# Errors that parsing a damaged file raises.
FAULTS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
DAMAGE_REASONS = {
    CONFIG: "is not as the first start wrote it",
    PROVENANCE: "is not as earlier starts wrote it",
}


def _is_name(value: Any) -> bool:
    """Return whether a value is a string of 1 to 99 letters, digits and "_", safe in a path."""
    return isinstance(value, str) and re.fullmatch(r"\w{1,99}", value) is not None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, str) and value.isdecimal())


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_time(value: Any) -> bool:
    if isinstance(value, str):
        value = datetime.datetime.fromisoformat(value).timestamp()
    return 0 <= value <= LATEST


# The fields that Stoker reads from a start in provenance.json: the type, or a function that checks
# the value. Every field may be null.
START: dict[str, Any] = {
    "time": _is_time, "script": str, "argv": _are_texts, "python": str, "resumed_from": str,
    "git": {"commit": str}, "weights_from": {"path": str},
    "launch": {
        "strategy": str, "world_size": _is_count, "hosts": _are_texts, "devices": _are_texts,
        "launcher": str, "gpus": list, "cpu": str,
    },
    "slurm": {
        "job_id": _is_name, "array_job_id": _is_name, "array_task_id": _is_name,
        "job_name": str, "partition": str, "command": str, "nodes": _is_count,
        "restart_count": _is_count, "restart_in_job": _is_count,
        "submit_time": _is_time, "start_time": _is_time,
    },
    "versions": {}, "given": {}, "changed": {}, "data": {}, "model_config": {}, "base_weights": {},
    "altered": _are_texts,
    "skip_documents": {},
}  # fmt: skip


class RunRecord:
    """A run's config.yaml and provenance.json. Each file is read once, at the first use.

    A damaged file is lost if no checkpoint has an intact copy. Properties that need a lost file
    raise ConfigurationError. With `lenient` they return an empty value. Programs that only show a
    run use `lenient`.
    """

    def __init__(self, directory: Path, *, lenient: bool = False):
        self.directory, self.lenient = directory, lenient

    @property
    def exists(self) -> bool:
        """Whether the directory has a provenance.json, or a checkpoint has intact copies of it."""
        return (self.directory / PROVENANCE).exists() or self._copies is not None

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The list `starts` of provenance.json, oldest first, or [] for a new run."""
        starts: list[dict[str, Any]] = self._provenance[0]["starts"]
        return starts

    @property
    def training_data(self) -> list[str]:
        """The fingerprints of the datasets that the last start trained on. [] for a new run."""
        data = self.starts[-1].get("data") if self.starts else None
        return list((data or {}).get("train") or [])

    @property
    def run_id(self) -> str | None:
        """The id of the run, or None for a new run."""
        run_id: str | None = self._provenance[0].get("run_id")
        return run_id

    @property
    def settings(self) -> dict[str, Any]:
        """The first start's settings, {name: value}. With `lenient`, {} if config.yaml is lost."""
        return {name: value for name, (value, _) in load_mapping(self.config or "{}").items()}

    @property
    def config(self) -> str | None:
        """The text of config.yaml. With `lenient`, None if the file is lost."""
        return self._config[0]

    @cached_property
    def damage(self) -> dict[str, str]:
        """The problems of damaged and lost files, {file name: text}. Raises no error."""
        found = {}
        for name, read in ((CONFIG, lambda: self._config), (PROVENANCE, lambda: self._provenance)):
            path = self.directory / name
            if not path.exists() and self._copies is None:
                continue  # a new run
            try:
                _, problem = read()
            except ConfigurationError as error:
                problem = error.problems[0].removeprefix(f"{path} ")
            if problem:
                found[name] = problem
        return found

    def restore(self) -> None:
        """Rename damaged files to damaged.NAME; restore them from the copies in a checkpoint.

        Only rank 0 calls this, after rank 0 has locked the run directory. Raises ConfigurationError
        if a damaged file has no intact copy.
        """
        for name, problem in self.damage.items():
            path = self.directory / name
            content = self.config or ""
            if name == PROVENANCE:
                content = json.dumps(self._provenance[0], indent=2) + "\n"
            kept = f" (the damaged one is {set_aside(path, DAMAGED)})" if path.exists() else ""
            replace_text(path, content)
            logger.warning("%s %s. It is restored%s", path, problem, kept)

    @cached_property
    def _copies(self) -> Path | None:
        """The path of the folder `run` in the newest checkpoint with intact copies, or None."""
        names = [f"{RECORD}/{name}" for name in (CONFIG, PROVENANCE)]
        for _, checkpoint in numbered_checkpoints(self.directory):
            try:
                files = read_manifest(checkpoint).files
                digests = file_digests(checkpoint / name for name in names)
                whole = digests == [files[name].sha256 for name in names]
                _parse_config((checkpoint / RECORD / CONFIG).read_text(encoding="utf-8"))
                _parse_provenance((checkpoint / RECORD / PROVENANCE).read_text(encoding="utf-8"))
            except (DamagedCheckpointError, ConfigurationError, OSError, *FAULTS):
                continue  # a resume reports the damage of this checkpoint
            if whole:
                return checkpoint / RECORD
        return None

    @cached_property
    def _provenance(self) -> tuple[dict[str, Any], str]:
        """The content of provenance.json (of its copy if damaged), and the problem (text or "")."""
        own, problem = self._read(PROVENANCE, _parse_provenance)
        if self._copies is None:
            lost = own is None and (self.directory / PROVENANCE).exists()
            return own or {"starts": []}, self._report_lost(PROVENANCE, problem) if lost else ""
        copy = _parse_provenance((self._copies / PROVENANCE).read_text(encoding="utf-8"))
        count = len(copy["starts"])
        if own is not None:
            same_run = own.get("run_id") == copy.get("run_id")
            if same_run and own["starts"][:count] == copy["starts"]:
                return own, ""
            if not same_run and own["starts"][:1] != copy["starts"][:1]:
                return own, ""  # the checkpoint is another run's; training refuses it later
            copy["starts"] += own["starts"][count:]
        return copy, f"{problem}: {self._copies / PROVENANCE} is used instead"

    @cached_property
    def _config(self) -> tuple[str | None, str]:
        """The text of config.yaml (of its copy if damaged), and the problem (text or "")."""
        own, problem = self._read(CONFIG, _parse_config)
        if self._copies is None:
            return own, self._report_lost(CONFIG, problem) if own is None else ""
        copy = (self._copies / CONFIG).read_text(encoding="utf-8")
        of_another_run = self.run_id != RunRecord(self._copies).run_id
        if own is not None and (own == copy or of_another_run):
            return own, ""
        return copy, f"{problem}: {self._copies / CONFIG} is used instead"

    def _read(self, name: str, parse: Callable[[str], Any]) -> tuple[Any, str]:
        """Return (parsed content of a file, problem as text).

        If the file cannot be read or parsed, the content is `None`. Otherwise the text says that
        the file was changed. The caller uses this text only if the file and its copy differ.
        """
        try:
            return parse((self.directory / name).read_text(encoding="utf-8")), DAMAGE_REASONS[name]
        except OSError as error:
            return None, f"cannot be read ({error.strerror})"
        except FAULTS as error:
            return None, f"{DAMAGE_REASONS[name]} ({error})"

    def _report_lost(self, name: str, problem: str) -> str:
        """Raise ConfigurationError for a lost file. If `lenient`, return the error text instead.

        problem: the beginning of the error text. Advice for the user follows.
        """
        run, weights = self.directory, None
        for _, checkpoint in reversed(numbered_checkpoints(run)):
            with contextlib.suppress(DamagedCheckpointError, ConfigurationError, OSError):
                read_manifest(checkpoint)
                weights = checkpoint
        if (run / FINAL).is_dir():
            weights = run / FINAL
        then = f"`mv {shlex.quote(str(run))} {shlex.quote(f'{run}.damaged')}` and start again"
        if weights is not None:
            then = f"start a new run from its weights: --init_from {weights} with another"
            then += " --output_dir"
        problem += f", and no checkpoint here has a whole copy: put a backup of it back, or {then}."
        if self.lenient:
            return problem
        raise ConfigurationError(f"{run / name} {problem}")


def is_run(directory: Path) -> bool:
    """Return whether a directory is the output_dir of a run; False for an unreadable directory."""
    try:
        files = any((directory / name).exists() for name in (CONFIG, JOURNAL))
        return files or RunRecord(directory).exists
    except OSError:
        return False


def copy_record(output_dir: Path, checkpoint: Path) -> None:
    """Copy config.yaml and provenance.json from output_dir into a new checkpoint.

    If a file is damaged, first restore the file from an older checkpoint, or else log a warning.
    """
    try:
        RunRecord(output_dir).restore()
    except ConfigurationError as error:
        logger.warning("%s", error.problems[0])  # training has to continue
    (checkpoint / RECORD).mkdir(exist_ok=True)
    for name in (CONFIG, PROVENANCE):
        if (output_dir / name).is_file():
            shutil.copyfile(output_dir / name, checkpoint / RECORD / name)


def settings_in_force(run_dir: Path, starts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return {name: value}: the settings of config.yaml with the changes by `starts`.

    starts: entries of the list `starts` in provenance.json, oldest first. Each entry has the
    settings that this start changed.
    """
    settings = RunRecord(run_dir).settings
    for start in starts:
        settings |= start.get("changed") or {}
    return settings


def _parse_config(text: str) -> str:
    load_mapping(text)
    return text


def _parse_provenance(text: str) -> dict[str, Any]:
    """Parse the text of provenance.json and return the content.

    Raises an error in FAULTS, such as ValueError, if the text is damaged.
    """
    content: dict[str, Any] = json.loads(text)
    starts, run_id = content["starts"], content.get("run_id")
    if run_id is not None and not RUN_ID.fullmatch(run_id):
        raise ValueError("its run_id is no name of a file")
    if not isinstance(starts, list):
        raise ValueError("its starts are no list")
    if not all(isinstance(start, dict) and _fits(start, START) for start in starts):
        raise ValueError("a start has fields of other types")
    return content


def _fits(value: Any, shape: Any) -> bool:
    """Return whether a value has the form `shape`. None fits every shape.

    shape: a type, a function that checks the value, or a dict {field: shape}.
    """
    if value is None:
        return True
    if isinstance(shape, type):
        return isinstance(value, shape)
    if callable(shape):
        return bool(shape(value))
    fields = shape.items()
    return isinstance(value, dict) and all(_fits(value.get(name), each) for name, each in fields)
