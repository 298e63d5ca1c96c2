"""The record of a run: config.yaml and provenance.json, with the copies that checkpoints hold.

config.yaml has the settings of the first start and never changes. provenance.json has an entry for
each start and only grows. Each checkpoint holds a copy of both in its folder `run`, and its
manifest has their digests. So a file that is missing, unreadable or other than its copy is damaged:
it is read from the newest checkpoint with whole copies, and a start writes it again.
"""

import contextlib
import datetime
import json
import logging
import re
import shlex
import shutil
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
from utils.support.files import replace_text
from utils.support.journal_file import FILE_NAME as JOURNAL
from utils.support.journal_file import LATEST

logger = logging.getLogger(__name__)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_name(value: Any) -> bool:
    """Whether the value can be a part of a file's name: job ids are."""
    return isinstance(value, str) and re.fullmatch(r"\w{1,99}", value) is not None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, str) and value.isdecimal())


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_time(value: Any) -> bool:
    """Whether the value is unix seconds, or an ISO time."""
    try:
        if isinstance(value, str):
            value = datetime.datetime.fromisoformat(value).timestamp()
        return 0 <= value <= LATEST
    except (TypeError, ValueError, OverflowError):
        return False


# What fields of an entry of provenance.json hold that are read again; null fits everywhere.
_START: dict[str, Any] = {
    "time": _is_time, "script": _is_text, "argv": _are_texts, "python": _is_text,
    "resumed_from": _is_text, "git": {"commit": _is_text}, "weights_from": {"path": _is_text},
    "launch": {
        "strategy": _is_text, "world_size": _is_count, "hosts": _are_texts, "devices": _are_texts,
    },
    "slurm": {
        "job_id": _is_name, "array_job_id": _is_name, "array_task_id": _is_name,
        "job_name": _is_text, "nodes": _is_count, "restart_count": _is_count,
        "submit_time": _is_time, "start_time": _is_time,
    },
    "versions": {}, "given": {}, "changed": {}, "data": {}, "model_config": {}, "base_weights": {},
}  # fmt: skip


class _DamagedError(Exception):
    """A file of the record that cannot be read, or is not as it was written; the text says how."""


def earlier_starts(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a provenance.json; none where a run has no start yet.

    A damaged file counts as its copy. Raises ConfigurationError if there is no whole copy.
    """
    return _provenance(path)[0]["starts"]


def known_run_id(path: Path) -> str | None:
    """Return the run's id, made at its first start; None before that. See `earlier_starts`."""
    return _provenance(path)[0].get("run_id")


def first_settings(output_dir: Path) -> dict[str, Any]:
    """Return the settings of config.yaml; a damaged file counts as its copy.

    Raises ConfigurationError if there is no whole copy.
    """
    return {name: value for name, (value, _) in load_mapping(_config(output_dir)[0]).items()}


def is_run(directory: Path) -> bool:
    """Whether a start left its marks there; False for a directory that cannot be read."""
    try:
        return has_record(directory) or any(
            (directory / name).exists() for name in (CONFIG, JOURNAL)
        )
    except OSError:
        return False


def has_record(output_dir: Path) -> bool:
    """Whether the directory is a run's: its starts are listed, there or in a checkpoint."""
    return (output_dir / PROVENANCE).exists() or _copies(output_dir) is not None


def damage(output_dir: Path) -> dict[str, str]:
    """Say of each damaged file of the record what is wrong with it; raises nothing."""
    found = {}
    for name, read in ((CONFIG, _config), (PROVENANCE, lambda run: _provenance(run / PROVENANCE))):
        if (output_dir / name).exists() or _copies(output_dir) is not None:
            try:
                found[name] = read(output_dir)[1]
            except ConfigurationError as error:
                found[name] = error.problems[0].removeprefix(f"{output_dir / name} ")
    return {name: text for name, text in found.items() if text}


def restore_record(output_dir: Path) -> None:
    """Write the damaged files of the record again; rank 0 alone calls it and holds the lock.

    A damaged file stays beside the new one, under another name. Raises ConfigurationError for a
    file without a whole copy.
    """
    for name, text in damage(output_dir).items():
        path = output_dir / name
        content = _config(output_dir)[0]
        if name == PROVENANCE:
            content = json.dumps(_provenance(path)[0], indent=2) + "\n"
        kept = f" (the damaged one is {set_aside(path, DAMAGED)})" if path.exists() else ""
        replace_text(path, content)
        logger.warning("%s %s. It is restored%s", path, text, kept)


def keep_record(output_dir: Path, checkpoint: Path) -> None:
    """Copy the record into a checkpoint that is being written; restore it before."""
    try:
        restore_record(output_dir)
    except ConfigurationError as error:
        logger.warning("%s", error.problems[0])  # training has to go on
    (checkpoint / RECORD).mkdir(exist_ok=True)
    for name in (CONFIG, PROVENANCE):
        if (output_dir / name).is_file():
            shutil.copyfile(output_dir / name, checkpoint / RECORD / name)


def _provenance(path: Path) -> tuple[dict[str, Any], str]:
    """Return the content of provenance.json that counts, and what is wrong with the file."""
    own: dict[str, Any] | None = None
    try:
        own = _parsed_provenance(path)
        problem = "is not as earlier starts wrote it"
    except _DamagedError as error:
        problem = str(error)
    copies = _copies(path.parent)
    if copies is None:
        if own is None and path.exists():
            raise _lost(path, problem)
        return own or {"starts": []}, ""
    copy: dict[str, Any] = json.loads((copies / PROVENANCE).read_text(encoding="utf-8"))
    count = len(copy["starts"])
    if own is not None:
        same_run = own.get("run_id") == copy["run_id"]
        if same_run and own["starts"][:count] == copy["starts"]:
            return own, ""
        if not same_run and own["starts"][:1] != copy["starts"][:1]:
            return own, ""  # a checkpoint of another run, which a start refuses
        copy["starts"] += own["starts"][count:]
    return copy, f"{problem}: {copies / PROVENANCE} is used instead"


def _parsed_provenance(path: Path) -> dict[str, Any]:
    """Return what provenance.json holds; raises _DamagedError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        starts, run_id = content["starts"], content.get("run_id")
        fits = isinstance(starts, list) and all(isinstance(each, dict) for each in starts)
        # It becomes part of names of folders.
        fits = fits and (run_id is None or RUN_ID.fullmatch(run_id) is not None)
        fits = fits and all(_fits(each, _START) for each in starts)
        if not fits:
            raise _DamagedError("is not as earlier starts wrote it")
    except OSError as error:
        raise _DamagedError(f"cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _DamagedError(f"is not the JSON that earlier starts wrote ({error})") from error
    return dict(content)


def _fits(value: Any, shape: Any) -> bool:
    if value is None or callable(shape):
        return value is None or shape(value)
    fields = shape.items()
    return isinstance(value, dict) and all(_fits(value.get(name), each) for name, each in fields)


def _config(output_dir: Path) -> tuple[str, str]:
    """Return the text of config.yaml that counts, and what is wrong with the file."""
    path, own, problem = output_dir / CONFIG, None, "is not as the first start wrote it"
    try:
        text = path.read_text(encoding="utf-8")
        load_mapping(text)
        own = text
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except ValueError as error:
        problem += f" ({error})"
    copies = _copies(output_dir)
    if copies is None:
        if own is None:
            raise _lost(path, problem)
        return own, ""
    copy = (copies / CONFIG).read_text(encoding="utf-8")
    of_another = known_run_id(output_dir / PROVENANCE) != known_run_id(copies / PROVENANCE)
    if own is not None and (own == copy or of_another):
        return own, ""
    return copy, f"{problem}: {copies / CONFIG} is used instead"


def _copies(output_dir: Path) -> Path | None:
    """Return the folder with the newest copies that are as they were committed."""
    for _, checkpoint in numbered_checkpoints(output_dir):
        names = [f"{RECORD}/{name}" for name in (CONFIG, PROVENANCE)]
        try:
            manifest = read_manifest(checkpoint)
            digests = file_digests(checkpoint / name for name in names)
        except (DamagedCheckpointError, ConfigurationError, OSError):
            continue  # a resume says what is wrong with it
        if digests == [getattr(manifest.files.get(name), "sha256", None) for name in names]:
            return checkpoint / RECORD
    return None


def _lost(path: Path, problem: str) -> ConfigurationError:
    """Return the error for a damaged file without a whole copy."""
    run, weights = path.parent, None
    for _, checkpoint in numbered_checkpoints(run):
        with contextlib.suppress(DamagedCheckpointError, ConfigurationError, OSError):
            read_manifest(checkpoint)
            weights = weights or checkpoint
    if (run / FINAL).is_dir():
        weights = run / FINAL
    then = f"`mv {shlex.quote(str(run))} {shlex.quote(f'{run}.damaged')}` and start again"
    if weights is not None:
        then = f"start a new run from its weights: --init_from {weights} with another --output_dir"
    return ConfigurationError(
        f"{path} {problem}, and no checkpoint here has a whole copy: put a backup of it back, or "
        f"{then}."
    )
