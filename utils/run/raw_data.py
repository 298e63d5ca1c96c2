"""Tokenization of raw training data by the run itself, as prepare_data.py does.

The tokens are written to OUTPUT_DIR/data once. Later starts read them.
"""

import logging
import os
import sys
from dataclasses import fields

import torch

from utils.checkpoints.record import RunRecord
from utils.config.errors import Answer, ConfigurationError
from utils.config.preparation import PreparationArguments, RawDataArguments, prepare_command
from utils.config.raw_data import RawData
from utils.config.settings import RunSettings
from utils.config.strategy import SUBMITTING
from utils.host.collectives import cpu_group, on_rank_0
from utils.host.run_lock import take_run_lock

logger = logging.getLogger(__name__)

LARGEST_RAW_BYTES = 10**9
LONGEST_PREPARATION_S = 24 * 3600


def prepare_raw_data(settings: RunSettings) -> None:
    """Tokenize the raw files of train_data and eval_data, unless this is already done.

    All ranks must call this. Rank 0 starts worker processes, so that their memory is free before
    training. The other ranks wait over gloo, at most a day. A dry run raises Answer with the
    command that tokenizes the files. Raises ConfigurationError if the files are larger than 1 GB
    (LARGEST_RAW_BYTES), if this is a Slurm batch job or its submission, or if the files changed
    since the run began.
    """
    if (raw := settings.raw) is None:
        return
    group = cpu_group(LONGEST_PREPARATION_S)  # None in a dry run
    on_rank_0(lambda: _prepare_once(settings, raw), group)
    if group is not None:
        torch.distributed.destroy_process_group(group)


def _prepare_once(settings: RunSettings, raw: RawData) -> None:
    from utils.prepare.fetch import fetch
    from utils.prepare.pipeline import begin_preparation, finish_preparation
    from utils.run.preflight import has_run_files

    output_dir = settings.output_dir
    arguments = _preparation_arguments(settings, raw)
    names, command = " ".join(raw.sources), prepare_command(arguments)
    has_run_files(output_dir)
    fetch(arguments)
    has_begun = RunRecord(output_dir).exists
    earlier = f"--train_data {raw.prepared_data} resumes it with the data of then."
    try:
        planned = begin_preparation(arguments)
    except ConfigurationError as error:
        advice = [f"The run in {output_dir} has begun. {earlier}"] if has_begun else []
        raise ConfigurationError([*error.problems, *advice]) from error
    workspace = planned.workspace
    if workspace.replaced and has_begun:
        raise ConfigurationError(
            f"train_data {names}: the files or their settings have changed since the run in "
            f"{output_dir} began. {earlier} For the new data name another --output_dir."
        )
    is_dry_replacement = settings.run.dry_run and workspace.replaced is not None
    if workspace.is_prepared() and not is_dry_replacement:  # `publish` would change the disk
        logger.info("train_data: %s is prepared in %s", names, workspace.publish())
        return
    size, refusal = sum(file.size for files in planned.plan.sources.values() for file in files), ""
    if size > LARGEST_RAW_BYTES:
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
    line = "train_data: preparing %s, as this command does (it continues after an interruption): %s"
    logger.info(line, names, command)
    finish_preparation(planned, only_workers=True)


def _preparation_arguments(settings: RunSettings, raw: RawData) -> PreparationArguments:
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
