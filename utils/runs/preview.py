"""What a start would refuse, for a dry run, which reads the run directory and writes nothing.

`start_run` (utils/runs/start.py) decides; what is asked here is asked there, of the same functions.
Not looked at are the other nodes, and whether all bytes of a checkpoint are as they were committed.
"""

import copy
import logging
import os
from dataclasses import replace
from pathlib import Path

from huggingface_hub import is_offline_mode, try_to_load_from_cache
from transformers import PreTrainedConfig
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from utils.checkpoints.discovery import resume_point
from utils.checkpoints.files import PROVENANCE, check_layout, earlier_starts, known_run_id
from utils.checkpoints.pickles import refuse_code
from utils.config.errors import ConfigurationError, StorageError
from utils.config.settings import RunSettings
from utils.launch.processes import LaunchFacts
from utils.launch.slurm import request_from
from utils.model.stages import origin_directory, own_checkpoint, weights_directory
from utils.model.weights import check_without_loading, weights_dtype
from utils.planning.job import saves_of
from utils.planning.plan import RunPlan, on_a_login_node
from utils.planning.run_data import RunData
from utils.runs.changes import accepted_changes, identity_facts, in_force
from utils.runs.preflight import check_place, is_finished, known_files, refuse_finished

logger = logging.getLogger(__name__)

# What a machine or a launch decides where the settings leave it open: this one may not be theirs.
LEFT_OPEN = ("bf16", "fp16", "use_cpu", "global_batch_size", "per_device_train_batch_size")


def check_start(
    settings: RunSettings,
    plan: RunPlan,
    data: RunData,
    config: PreTrainedConfig,
    launch: LaunchFacts,
    *,
    script: str,
) -> int:
    """Refuse what the start of these settings would refuse; return 0, the dry run's exit code.

    Raises ConfigurationError.
    """
    output_dir = Path(str(settings.training.output_dir))
    _check_directory(output_dir, settings, plan, launch)
    resume_from = None
    if output_dir.is_dir() and known_files(output_dir):
        resume_from = _check_run(output_dir, settings, data, launch, script)
    if is_finished(output_dir, resume_from, plan.total_steps):
        logger.info("%s is finished: a start would have nothing to do", output_dir)
    elif resume_from is not None:
        logger.info("a start would resume from %s", resume_from)
    refuse_finished(output_dir, resume_from)
    origin_directory(settings, launch.strategy, resume_from)
    _check_weights(settings, config)
    return 0


def _check_directory(
    output_dir: Path, settings: RunSettings, plan: RunPlan, launch: LaunchFacts
) -> None:
    """Refuse a file of that name, a place that cannot be written to, and one without room."""
    try:
        check_place(output_dir, plan, saves_of(settings, plan.total_steps))
    except StorageError as error:
        if request_from(os.environ) is not None or not on_a_login_node(settings, launch):
            raise
        logger.warning("%s", error.problems[0])  # another machine's storage, perhaps


def _check_run(
    output_dir: Path, settings: RunSettings, data: RunData, launch: LaunchFacts, script: str
) -> str | None:
    """Refuse a run that cannot resume with this; return the checkpoint that it would resume from.

    What the settings leave open counts as the run has it already.
    """
    starts = earlier_starts(output_dir / PROVENANCE)
    if starts and own_checkpoint(str(output_dir)) is not None:
        before = in_force(output_dir, starts)
        names = [one for one in LEFT_OPEN if settings.values.rank(one) == 0 and one in before]
        resolved = settings.resolved | {name: before[name] for name in names}
        settings = replace(settings, resolved=resolved)
    accepted_changes(output_dir, settings, {"script": script, **identity_facts(settings, data)})
    run_id = known_run_id(output_dir / PROVENANCE)
    found = None if run_id is None else resume_point(output_dir, run_id, dry_run=True)
    if found is None:
        return None
    try:
        check_layout(found, launch.strategy)
    except ConfigurationError as error:
        if "WORLD_SIZE" in os.environ or not on_a_login_node(settings, launch):
            raise
        logger.warning("this dry run stands for one process: %s", error.problems[0])
    refuse_code(found)
    return str(found)


def _check_weights(settings: RunSettings, config: PreTrainedConfig) -> None:
    """Refuse weights that `load_model` would refuse, by the names and shapes of their tensors.

    Jobs start without a network: for them a model of the Hub has to be in the cache.
    """
    model = settings.model
    if model.init_from is None and model.model_config is not None:
        return  # random ones
    path = str(model.model_name_or_path)
    if model.init_from is not None:
        if not model.use_peft and own_checkpoint(settings.training.output_dir) is not None:
            return  # it has weights of its own
        path = str(weights_directory(settings))
    if not Path(path).is_dir() and not _is_cached(path, model.model_revision):
        if request_from(os.environ) is None and not is_offline_mode():
            logger.info("weights: %s is not in the cache here, a start downloads it", path)
            return
        raise ConfigurationError(
            f"--model_name_or_path {path}: its weights are not in the cache of the Hub here, and "
            f"jobs are offline: `hf download {path}` where there is a network, with the HF_HOME "
            "that the job has (slurm/cluster.env)."
        )
    check_without_loading(
        path,
        exact=model.init_from is not None,
        revision=model.model_revision,
        config=copy.deepcopy(config),
        dtype=weights_dtype(model, config),
        local_files_only=True,
    )


def _is_cached(name: str, revision: str | None) -> bool:
    files = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
    found = (try_to_load_from_cache(name, file, revision=revision) for file in files)
    return any(isinstance(path, str) for path in found)
