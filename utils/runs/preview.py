"""What a start would refuse, for a dry run, which reads the run directory and writes nothing.

`start_run` (utils/runs/start.py) decides; what is asked here is asked there, of the same functions.
Not looked at are the other nodes, and whether all bytes of a checkpoint are as they were committed.
"""

import copy
import logging
import os
from collections.abc import Callable
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
from utils.runs.preflight import StorageNeeds, check_room, is_finished, known_files, refuse_finished

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

    Raises ConfigurationError (StorageError where that is all) with every problem found.
    """
    looks: list[Callable[[], None]] = [
        lambda: _check_directory(settings, plan, launch),
        lambda: _check_run(settings, data, plan, launch, script),
        lambda: _check_weights(settings, config),
    ]
    refusals = []
    for look in looks:
        try:
            look()
        except ConfigurationError as error:
            refusals.append(error)
    if refusals:
        problems = [problem for error in refusals for problem in error.problems]
        kinds = {type(error) for error in refusals}
        raise (kinds.pop() if len(kinds) == 1 else ConfigurationError)(problems)
    return 0


def _output_dir(settings: RunSettings) -> Path:
    return Path(str(settings.training.output_dir))


def _check_directory(settings: RunSettings, plan: RunPlan, launch: LaunchFacts) -> None:
    """Refuse a file of that name, a place that cannot be written to, and one without room."""
    output_dir = _output_dir(settings)
    if output_dir.exists() and not output_dir.is_dir():
        raise ConfigurationError(f"--output_dir {output_dir} is a file: name a directory.")
    there = next(path for path in (output_dir, *output_dir.absolute().parents) if path.is_dir())
    if not os.access(there, os.W_OK | os.X_OK):
        raise StorageError(
            f"--output_dir {output_dir} cannot be written to ({there}: permission denied): name a "
            "directory where you may write."
        )
    needs = StorageNeeds(
        plan.checkpoint_bytes,
        saves_of(settings, plan.total_steps),
        plan.total_steps,
    )
    try:
        check_room(there, needs)
    except StorageError as error:
        if request_from(os.environ) is None and on_a_login_node(settings, launch):
            logger.warning("%s", error.problems[0])  # another machine's storage, perhaps
        else:
            raise


def _check_run(
    settings: RunSettings, data: RunData, plan: RunPlan, launch: LaunchFacts, script: str
) -> None:
    """Refuse a directory that holds something else, or a run that cannot resume with this."""
    output_dir = _output_dir(settings)
    known = output_dir.is_dir() and known_files(output_dir)
    resume_from = None
    if known:
        settings = _as_it_resumes(settings, output_dir)
        accepted_changes(output_dir, settings, {"script": script, **identity_facts(settings, data)})
        run_id = known_run_id(output_dir / PROVENANCE)
        found = None if run_id is None else resume_point(output_dir, run_id, dry_run=True)
        if found is not None:
            _check_checkpoint(found, settings, launch)
            resume_from = str(found)
        if is_finished(output_dir, resume_from, plan.total_steps):
            logger.info("%s is finished: a start would have nothing to do", output_dir)
        elif resume_from is not None:
            logger.info("a start would resume from %s", resume_from)
    refuse_finished(output_dir, resume_from)
    origin_directory(settings, launch.strategy, resume_from)


def _check_checkpoint(found: Path, settings: RunSettings, launch: LaunchFacts) -> None:
    """Refuse a checkpoint of another strategy, where the launch is known, or one with code."""
    try:
        check_layout(found, launch.strategy)
    except ConfigurationError as error:
        if "WORLD_SIZE" in os.environ or not on_a_login_node(settings, launch):
            raise
        logger.warning("this dry run stands for one process: %s", error.problems[0])
    refuse_code(found)


def _as_it_resumes(settings: RunSettings, output_dir: Path) -> RunSettings:
    """Return the settings with what they leave open as the run has it already."""
    starts = earlier_starts(output_dir / PROVENANCE)
    if not starts or own_checkpoint(str(output_dir)) is None:
        return settings
    before = in_force(output_dir, starts).settings
    open_ones = [name for name in LEFT_OPEN if settings.values.rank(name) == 0 and name in before]
    return replace(
        settings, resolved=settings.resolved | {name: before[name] for name in open_ones}
    )


def _check_weights(settings: RunSettings, config: PreTrainedConfig) -> None:
    """Refuse weights that `load_model` would refuse, by the names and shapes of their tensors.

    Jobs start without a network: for them a model of the Hub has to be in the cache.
    """
    model = settings.model
    if model.init_from is None and model.model_config is not None:
        return  # random ones
    if model.init_from is not None:
        if not model.use_peft and own_checkpoint(settings.training.output_dir) is not None:
            return  # it has weights of its own
        path = str(weights_directory(settings))
    else:
        path = str(model.model_name_or_path)
    if not Path(path).is_dir() and not _is_cached(path, model.model_revision):
        if request_from(os.environ) is not None or is_offline_mode():
            raise ConfigurationError(
                f"--model_name_or_path {path}: its weights are not in the cache of the Hub here, "
                f"and jobs are offline: `hf download {path}` where there is a network, with the "
                "HF_HOME that the job has (slurm/cluster.env)."
            )
        logger.info("weights: %s is not in the cache here, a start downloads it", path)
        return
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
