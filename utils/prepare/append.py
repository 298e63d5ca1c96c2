"""`prepare_data.py --append`: adds new sources to the train split of a finished dataset.

OUT is output_dir. The new sources are prepared in OUT/.append, like any dataset. Then their Arrow
files move to OUT/train under new names. A new stoker.json adds the new documents to the dataset.
Then state.json is replaced. A reader of stoker.json or of state.json sees all new documents or
none. The files of the old documents do not change. stoker.json also keeps the old fingerprint, so
a resumed run recognizes its data. If the append is killed, the same command finishes the append.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from utils.config.errors import ConfigurationError
from utils.config.preparation import TRAIN, PreparationArguments
from utils.data.arrow_columns import STATE_FILE, data_files
from utils.data.description import DESCRIPTION_FILE, Description, read_description
from utils.data.token_dataset import describe_split, open_token_dataset
from utils.host.atomic_files import from_here, replace_text
from utils.host.foreign import read_object
from utils.prepare.pipeline import Preparation, begin_preparation, finish_preparation
from utils.prepare.workspace import SETTINGS, WORKSPACE

logger = logging.getLogger(__name__)

APPEND = ".append"
_HELD_OUT: dict[str, Any] = {"validation_fraction": 0.0, "eval_sources": []}


def append(arguments: PreparationArguments) -> None:
    """Prepare new sources and add them to the train split of a finished dataset.

    Raises ConfigurationError if output_dir has no finished dataset, if tokenizer, chat template or
    document format differ from the dataset's, if the dataset already has one of the sources, or if
    another append is running or unfinished.
    """
    folder = Path(arguments.output_dir)
    train, addition = folder / TRAIN, folder / APPEND
    described = read_description(train) if train.is_dir() else None
    if described is None or (folder / WORKSPACE).exists():
        raise ConfigurationError(
            f"output_dir: {folder}: --append needs datasets that prepare_data.py finished there "
            "(train/stoker.json): prepare the first sources without --append."
        )
    if any(getattr(arguments, name) != value for name, value in _HELD_OUT.items()):
        logger.info("--append adds to train alone; held-out splits stay as they are")
    held_out = {each.parent.name for each in folder.glob(f"*/{DESCRIPTION_FILE}")} - {TRAIN}
    if held_out:
        logger.warning(
            "the new sources are not compared with %s: a document in both would be trained on",
            ", ".join(sorted(held_out)),
        )
    given = replace(arguments, output_dir=str(addition), append=False, **_HELD_OUT)
    planned = begin_preparation(given)
    workspace = planned.workspace
    with _sole_append(addition, workspace.digest, shared=given.shard is not None):
        # Read again: another append may have ended in the meantime.
        described = read_description(train) or described
        if _has_appended(described, workspace.digest):
            _finish(train, addition, described)
            logger.info("%s: these sources are appended already", from_here(train))
            return
        if problems := _problems(planned, described):
            raise ConfigurationError([f"{train}: {problem}" for problem in problems])
        if workspace.is_prepared() or finish_preparation(planned):
            _join(train, addition)


def _parts(described: Description) -> list[Mapping[str, Any]]:
    """Return stoker.json's entries about preparations: the first preparation, then each append."""
    return [described.preparation, *described.preparation.get("appended", ())]


def _has_appended(described: Description, digest: str) -> bool:
    return any(each.get("settings_sha256") == digest for each in _parts(described)[1:])


def _problems(planned: Preparation, described: Description) -> list[str]:
    """Return error messages if the planned documents cannot be appended to the dataset."""
    problems, plan = [], planned.plan
    if described.tokenizer.get("sha256") != planned.tokenizer_sha256:
        problems.append(
            f"was made with another tokenizer than {planned.tokenizer.name_or_path}: leave out "
            "--tokenizer_name_or_path and --add_tokens, and the dataset's own counts."
        )
    template = planned.template_sha256 if plan.needs_chat_template else None
    if described.chat_template_sha256 != template:
        problems.append("has chats of another template, or none: prepare these sources apart.")
    settings = described.preparation.get("settings", {})
    first, now = settings.get("sequence_length"), plan.settings.sequence_length
    if first != now:
        logger.warning("sequence_length: %s for the first documents, %s for these", first, now)
    kind = settings.get("document_format")
    if kind != plan.settings.document_format:
        problems.append(
            f"holds documents of the kind {kind}, and these are {plan.settings.document_format}: "
            "prepare them apart; a run mixes several --train_data."
        )
    sources = [each.get("sources") or {} for each in _parts(described)]
    known = {digest for each in sources for digest in each.get("digests", ())}
    if "digests" not in sources[0]:
        logger.warning(
            "an older Stoker prepared this dataset: sources that it holds already are not noticed"
        )
    files = [file.name for file in plan.sources[TRAIN] if file.digest() in known]
    named = {name for each in sources for name in each.get("first_files", ())}
    if grown := [each.name for each in plan.sources[TRAIN] if each.name in named - {*files}]:
        logger.warning(
            "%s had other contents when it was prepared before: rows that it still has come into "
            "train twice. Give new rows in a file of their own.", ", ".join(grown[:5]),
        )  # fmt: skip
    if files:
        problems.append(f"holds {', '.join(files[:5])} already: leave that out of the sources.")
    return problems


@contextmanager
def _sole_append(addition: Path, digest: str, *, shared: bool) -> Iterator[None]:
    """Hold a lock on OUT/.append, so that no other append runs at the same time.

    addition: the folder OUT/.append. digest: the hash of the sources and settings to append.
    shared: the processes of a sharded append hold the lock together. Raises ConfigurationError if
    another append holds the lock or has left unfinished work in the folder.
    """
    addition.mkdir(exist_ok=True)
    lock = os.open(addition, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # the file system has no locks
            try:
                fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigurationError(
                    f"{addition}: another process is appending: wait for its end."
                ) from None
        if not (addition.exists() and os.path.samestat(os.fstat(lock), addition.stat())):
            raise ConfigurationError(
                f"{addition}: another append has just ended: repeat the command."
            )
        begun, other = addition / WORKSPACE, None
        if any(begun.glob("unit-*.json")):  # finished work units
            other = read_object(begun / SETTINGS).get("digest")
        if (prepared := read_description(addition / TRAIN)) is not None:
            other = prepared.preparation.get("settings_sha256")
        if other not in (None, digest):
            raise ConfigurationError(
                f"{addition}: holds an unfinished append of other sources or settings: finish it "
                "with its command, or remove this folder."
            )
        yield
    finally:
        with suppress(OSError):  # the folder has files, or does not exist
            addition.rmdir()
        os.close(lock)


def _join(train: Path, addition: Path) -> None:
    """Move the new Arrow files to OUT/train. Write a stoker.json for old and new documents."""
    old = open_token_dataset(train).description  # refuses damaged files
    added = read_description(addition / TRAIN)
    assert added is not None, "finish_preparation has written it"
    files = [train / name for name in old.files]
    for number, name in enumerate(added.files):
        files.append(train / f"data-append{len(old.earlier) + 1:03d}-{number:05d}.arrow")
        if (addition / TRAIN / name).exists():
            (addition / TRAIN / name).replace(files[-1])
    former = {"statistics": asdict(old.statistics), "fingerprint": old.fingerprint}
    appended = [*_parts(old)[1:], added.preparation]
    dataset = describe_split(
        train,
        files,
        tokenizer=old.tokenizer,
        chat_template_sha256=old.chat_template_sha256,
        preparation={**old.preparation, "appended": appended},
        earlier=[*old.earlier, {**former, "files": len(old.files)}],
    )
    _finish(train, addition, dataset.description)
    found, new = dataset.description.statistics, added.statistics
    logger.info(
        f"{from_here(train)}: {new.documents:,} documents and {new.tokens:,} tokens appended, now "
        f"{found.documents:,} and {found.tokens:,}. Runs that began before keep their documents."
    )


def _finish(train: Path, addition: Path, described: Description) -> None:
    """List all Arrow files in state.json, which `datasets` reads. Delete OUT/.append."""
    if [file.name for file in data_files(train)] != list(described.files):
        state = read_object(train / STATE_FILE)
        state["_data_files"] = [{"filename": name} for name in described.files]
        state["_fingerprint"] = hashlib.sha256(described.fingerprint.encode()).hexdigest()[:16]
        replace_text(train / STATE_FILE, json.dumps(state, indent=2))
    finished = addition.with_name(f"{APPEND}.finished")
    if addition.exists():
        shutil.rmtree(finished, ignore_errors=True)
        addition.replace(finished)
    shutil.rmtree(finished, ignore_errors=True)
