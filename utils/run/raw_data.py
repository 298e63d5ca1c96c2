"""Raw training data: prepared once, in OUTPUT_DIR/data, with the checks of prepare_data.py."""

import logging
import multiprocessing
import os
import signal
import sys
from dataclasses import fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from utils.checkpoints.record import RunRecord
from utils.config.errors import Answer, ConfigurationError, LostProcessError
from utils.config.preparation import PreparationArguments, RawDataArguments, prepare_command
from utils.config.strategy import SUBMITTING
from utils.host.collectives import answers_of, attempt, cpu_group, on_rank_0
from utils.host.machine import set_death_signal
from utils.host.run_lock import take_run_lock
from utils.launch.script import configure_logging

if TYPE_CHECKING:  # the process that tokenizes imports this module, and starts soon
    from utils.config.raw_data import RawData
    from utils.config.settings import RunSettings

logger = logging.getLogger(__name__)

LARGEST_BYTES = 10**9
LONGEST_PREPARATION_S = 24 * 3600


def prepare_raw_data(settings: "RunSettings") -> None:
    """Prepare the raw files of train_data and eval_data, unless that is done; all ranks call this.

    A separate process tokenizes. The other ranks wait over gloo, which has a limit of a day. A dry
    run checks the files, and ends with Answer if they are not prepared. Raises ConfigurationError
    for more than LARGEST_BYTES, in a job, and for files that changed after the run began.
    """
    if (raw := settings.raw) is None:
        return
    group = cpu_group(LONGEST_PREPARATION_S)  # None in a dry run
    on_rank_0(lambda: _prepare_once(settings, raw), group)
    if group is not None:
        torch.distributed.destroy_process_group(group)


def _prepare_once(settings: "RunSettings", raw: "RawData") -> None:
    from utils.prepare.fetch import fetch
    from utils.prepare.pipeline import begin_preparation
    from utils.run.preflight import known_files

    output_dir = Path(str(settings.training.output_dir))
    arguments = _arguments(settings, raw)
    names, command = " ".join(raw.sources), prepare_command(arguments)
    known_files(output_dir)
    fetch(arguments)
    plan, tokenizer, workspace = begin_preparation(arguments)
    if workspace.replaced and RunRecord(output_dir).exists:
        raise ConfigurationError(
            f"train_data {names}: the files or their settings have changed since the run in "
            f"{output_dir} began. --train_data {raw.instead} resumes it with the data of then. For "
            "the new data name another --output_dir."
        )
    is_dry_replacement = settings.run.dry_run and workspace.replaced is not None
    if workspace.is_prepared() and not is_dry_replacement:  # `publish` would change the disk
        logger.info("train_data: %s is prepared in %s", names, workspace.publish())
        return
    size, refusal = sum(file.size for files in plan.sources.values() for file in files), ""
    if size > LARGEST_BYTES:
        refusal = f"{size / 1e9:,.1f} GB are more than the 1 GB that a run prepares itself"
    elif SUBMITTING in os.environ or ("SLURM_JOB_ID" in os.environ and not sys.stdin.isatty()):
        refusal = "it is not tokenized, and the GPUs of a job would wait for that"
    if refusal:
        raise ConfigurationError(
            f"train_data {names}: {refusal}. Run this on the login node, then give the same "
            f"command again: {command}"
        )
    if settings.run.dry_run:
        raise Answer(
            f"A start would first prepare {names} ({size / 1e6:,.1f} MB) in {raw.folder}; a dry "
            "run does not, so it does not know sequences, steps and memory. After this command it "
            f"does:\n{command}\n"
        )
    if workspace.replaced:
        logger.warning("train_data: the files or their settings have changed: prepared again")
    output_dir.mkdir(parents=True, exist_ok=True)
    take_run_lock(output_dir)  # no second job prepares there
    logger.info("train_data: preparing %s, as this command does: %s", names, command)
    _prepare_apart(arguments, plan, tokenizer, workspace)


def _prepare_apart(*work: Any) -> None:
    """Call `finish_preparation` in a separate process, which ends when this process ends."""
    spawn = multiprocessing.get_context("spawn")
    answer, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_prepare, args=(sender, os.getpid(), *work))
    process.start()
    sender.close()  # only the process has it now, so its end is seen here
    try:
        answers_of([answer.recv()])
    except EOFError:
        raise LostProcessError(
            "the process that prepared train_data was killed: the same command continues its work"
        ) from None


def _prepare(sender: Connection, parent: int, *work: Any) -> None:
    from utils.prepare.pipeline import finish_preparation

    signal.signal(signal.SIGINT, _end_once)  # slurm/launch_node.sh lets ranks ignore Ctrl-C
    set_death_signal(signal.SIGINT)
    configure_logging()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # this process only tokenizes
    try:
        if os.getppid() == parent:
            sender.send(attempt(lambda: finish_preparation(*work)))
    except KeyboardInterrupt:  # also if the parent has died
        return
    os._exit(0)  # the libraries' teardown takes seconds


def _end_once(*_: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also ends the parent: a second signal
    raise KeyboardInterrupt


def _arguments(settings: "RunSettings", raw: "RawData") -> PreparationArguments:
    from utils.model.stages import stage_tokenizer

    tokenizer = raw.tokenizer or settings.model.model_name_or_path or stage_tokenizer(settings)
    if not tokenizer:
        raise ConfigurationError(
            f"train_data {' '.join(raw.sources)} is not tokenized, and a model from scratch has no "
            "tokenizer: give --tokenizer_name_or_path."
        )
    return PreparationArguments(
        **{each.name: getattr(settings.data, each.name) for each in fields(RawDataArguments)},
        sources=[*raw.sources],
        eval_sources=[*raw.eval_sources],
        tokenizer_name_or_path=str(tokenizer),
        output_dir=raw.folder,
        num_proc=len(os.sched_getaffinity(0)),
        overwrite=True,
    )
