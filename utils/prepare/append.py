"""Appending: `prepare_data.py --append` adds new sources to the train split of a finished dataset.

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
from utils.prepare.workspace import SETTINGS_FILE, WORKSPACE

logger = logging.getLogger(__name__)

APPEND = ".append"
_NO_HELD_OUT: dict[str, Any] = {"validation_fraction": 0.0, "eval_sources": []}


def append(arguments: PreparationArguments) -> None:
    """Prepare new sources and add them to the train split of a finished dataset.

    Raises ConfigurationError if output_dir has no finished dataset, if tokenizer, chat template or
    document format differ from the dataset's, if the dataset already has one of the sources, or if
    another append is running or unfinished.
    """
    folder = Path(arguments.output_dir)
    train, addition = folder / TRAIN, folder / APPEND
    description = read_description(train) if train.is_dir() else None
    if description is None or (folder / WORKSPACE).exists():
        raise ConfigurationError(
            f"output_dir: {folder}: --append needs datasets that prepare_data.py finished there "
            "(train/stoker.json): prepare the first sources without --append."
        )
    if any(getattr(arguments, name) != value for name, value in _NO_HELD_OUT.items()):
        logger.info("--append adds to train alone; held-out splits stay as they are")
    held_out = {each.parent.name for each in folder.glob(f"*/{DESCRIPTION_FILE}")} - {TRAIN}
    if held_out:
        logger.warning(
            "the new sources are not compared with %s: a document in both would be trained on",
            ", ".join(sorted(held_out)),
        )
    new_arguments = replace(arguments, output_dir=str(addition), append=False, **_NO_HELD_OUT)
    preparation = begin_preparation(new_arguments)
    workspace = preparation.workspace
    with _append_lock(addition, workspace.digest, shared=new_arguments.shard is not None):
        # Read again: another append may have ended in the meantime.
        description = read_description(train) or description
        if _has_appended(description, workspace.digest):
            _finish_append(train, addition, description)
            logger.info("%s: these sources are appended already", from_here(train))
            return
        if problems := _append_problems(preparation, description):
            raise ConfigurationError([f"{train}: {problem}" for problem in problems])
        if workspace.is_prepared() or finish_preparation(preparation):
            _move_into_train(train, addition)


def _entries(description: Description) -> list[Mapping[str, Any]]:
    """Return stoker.json's entries about preparations: the first preparation, then each append."""
    return [description.preparation, *description.preparation.get("appended", ())]


def _has_appended(description: Description, digest: str) -> bool:
    return any(each.get("settings_sha256") == digest for each in _entries(description)[1:])


def _append_problems(preparation: Preparation, description: Description) -> list[str]:
    """Return error messages if the planned documents cannot be appended to the dataset."""
    problems, plan = [], preparation.plan
    if description.tokenizer.get("sha256") != preparation.tokenizer_sha256:
        problems.append(
            f"was made with another tokenizer than {preparation.tokenizer.name_or_path}: leave out "
            "--tokenizer_name_or_path and --add_tokens, and the dataset's own counts."
        )
    template = preparation.template_sha256 if plan.needs_chat_template else None
    if description.chat_template_sha256 != template:
        problems.append("has chats of another template, or none: prepare these sources apart.")
    settings = description.preparation.get("settings", {})
    old, new = settings.get("sequence_length"), plan.settings.sequence_length
    if old != new:
        logger.warning("sequence_length: %s for the first documents, %s for these", old, new)
    old_format, new_format = settings.get("document_format"), plan.settings.document_format
    if old_format != new_format:
        problems.append(
            f"holds documents of the kind {old_format}, and these are {new_format}: "
            "prepare them apart; a run mixes several --train_data."
        )
    sources = [each.get("sources") or {} for each in _entries(description)]
    known_digests = {digest for each in sources for digest in each.get("digests", ())}
    if "digests" not in sources[0]:
        logger.warning(
            "an older Stoker prepared this dataset: sources that it holds already are not noticed"
        )
    repeated = [file.name for file in plan.sources[TRAIN] if file.digest() in known_digests]
    names = {name for each in sources for name in each.get("first_files", ())}
    if changed := [each.name for each in plan.sources[TRAIN] if each.name in names - {*repeated}]:
        logger.warning(
            "%s had other contents when it was prepared before: rows that it still has come into "
            "train twice. Give new rows in a file of their own.", ", ".join(changed[:5]),
        )  # fmt: skip
    if repeated:
        problems.append(f"holds {', '.join(repeated[:5])} already: leave that out of the sources.")
    return problems


@contextmanager
def _append_lock(addition: Path, digest: str, *, shared: bool) -> Iterator[None]:
    """Hold a lock on OUT/.append, so that no other append runs at the same time.

    addition: the folder OUT/.append. digest: the hash of the new sources and their settings.
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
        workspace, earlier_digest = addition / WORKSPACE, None
        if any(workspace.glob("unit-*.json")):  # finished work units
            earlier_digest = read_object(workspace / SETTINGS_FILE).get("digest")
        if (prepared := read_description(addition / TRAIN)) is not None:
            earlier_digest = prepared.preparation.get("settings_sha256")
        if earlier_digest not in (None, digest):
            raise ConfigurationError(
                f"{addition}: holds an unfinished append of other sources or settings: finish it "
                "with its command, or remove this folder."
            )
        yield
    finally:
        with suppress(OSError):  # the folder has files, or does not exist
            addition.rmdir()
        os.close(lock)


def _move_into_train(train: Path, addition: Path) -> None:
    """Move the new Arrow files to OUT/train. Write a stoker.json for old and new documents."""
    old = open_token_dataset(train).description  # refuses damaged files
    added = read_description(addition / TRAIN)
    assert added is not None, "finish_preparation has written it"
    files = [train / name for name in old.files]
    for number, name in enumerate(added.files):
        files.append(train / f"data-append{len(old.earlier) + 1:03d}-{number:05d}.arrow")
        if (addition / TRAIN / name).exists():
            (addition / TRAIN / name).replace(files[-1])
    old_state = {"statistics": asdict(old.statistics), "fingerprint": old.fingerprint}
    appended = [*_entries(old)[1:], added.preparation]
    dataset = describe_split(
        train,
        files,
        tokenizer=old.tokenizer,
        chat_template_sha256=old.chat_template_sha256,
        preparation={**old.preparation, "appended": appended},
        earlier=[*old.earlier, {**old_state, "files": len(old.files)}],
    )
    _finish_append(train, addition, dataset.description)
    total, new = dataset.description.statistics, added.statistics
    logger.info(
        f"{from_here(train)}: {new.documents:,} documents and {new.tokens:,} tokens appended, now "
        f"{total.documents:,} and {total.tokens:,}. Runs that began before keep their documents."
    )


def _finish_append(train: Path, addition: Path, description: Description) -> None:
    """List all Arrow files in state.json, which `datasets` reads. Delete OUT/.append."""
    if [file.name for file in data_files(train)] != list(description.files):
        state = read_object(train / STATE_FILE)
        state["_data_files"] = [{"filename": name} for name in description.files]
        state["_fingerprint"] = hashlib.sha256(description.fingerprint.encode()).hexdigest()[:16]
        replace_text(train / STATE_FILE, json.dumps(state, indent=2))
    finished = addition.with_name(f"{APPEND}.finished")
    if addition.exists():
        shutil.rmtree(finished, ignore_errors=True)
        addition.replace(finished)
    shutil.rmtree(finished, ignore_errors=True)
