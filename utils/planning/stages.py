"""Stages: a run that starts from the weights of an earlier one, and says whose they were.

`--init_from` names the directory of a run (its final/ counts, else its newest committed
checkpoint), of a checkpoint, or of a model. Weights are read from safetensors alone: they cannot
run anything, and hold whole tensors.
"""

import logging
from pathlib import Path
from typing import Any

from utils.checkpoints import pickles
from utils.checkpoints.directory import DAMAGED, DELETING, INCOMPLETE, numbered_checkpoints
from utils.checkpoints.files import MANIFEST, file_problems
from utils.checkpoints.kept_digests import kept_digests
from utils.checkpoints.manifest import DamagedCheckpointError, read_manifest
from utils.checkpoints.run_record import CONFIG, FINAL, PROVENANCE, known_run_id
from utils.config.errors import ConfigurationError
from utils.config.run_settings import RunSettings

logger = logging.getLogger(__name__)

OPTIMIZER = "optimizer.pt"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
# Strategies whose optimizer every rank has whole, as optimizer.pt holds it.
WHOLE_OPTIMIZERS = ("single", "ddp")


def find_stage(init_from: str) -> Path:
    """Return the directory with the weights that `--init_from` stands for; raises."""
    given = Path(init_from)
    if not given.is_dir():
        raise ConfigurationError(f"--init_from {given}: there is no such directory.")
    directory = _weights_of_run(given) if (given / CONFIG).is_file() else given
    problem = _unfit(directory)
    if problem:
        raise ConfigurationError(f"--init_from {given}: {problem}")
    return directory


def own_checkpoint(output_dir: str | None) -> Path | None:
    """Return the newest committed checkpoint in a run's directory, by its manifest's presence."""
    for _, directory in numbered_checkpoints(Path(str(output_dir))):
        if (directory / MANIFEST).is_file():
            return directory
    return None


def stage_of(settings: RunSettings) -> Path | None:
    """Return where the configuration and the tokenizer of a run with `--init_from` are.

    Once the run has a checkpoint of its own they are there, and the earlier stage may be gone. The
    weights under LoRA's adapters are in no checkpoint, so LoRA needs the stage for good; and so do
    checkpoints sharded by FSDP, which hold no configuration.
    """
    model = settings.model
    if model.init_from is None:
        return None
    own = own_checkpoint(settings.training.output_dir)
    if own is not None and not model.use_peft and (own / "config.json").is_file():
        return own
    return find_stage(model.init_from)


def stage_tokenizer(settings: RunSettings) -> str | None:
    """Return the directory of the stage's tokenizer; None where there is none."""
    stage = stage_of(settings)
    if stage is None or not any((stage / name).is_file() for name in TOKENIZER_FILES):
        return None
    return str(stage)


def weights_origin(
    settings: RunSettings, strategy: str, resume_from: str | None
) -> dict[str, Any] | None:
    """Return whose weights the run starts from, for its provenance; None without `--init_from`.

    None too, said aloud, where that has no part in the run any more. Reads and hashes the weights;
    rank 0 alone calls it. Raises ConfigurationError for those that are not as they were committed,
    and for an optimizer that cannot be taken over.
    """
    model = settings.model
    if model.init_from is None:
        return None
    if resume_from is not None:
        ignored = "init_optimizer" if model.init_optimizer else None
        if not model.use_peft:
            ignored = f"init_from {model.init_from}"
            ignored += " (and init_optimizer)" if model.init_optimizer else ""
        if ignored:
            logger.info("%s is ignored: the run has %s of its own", ignored, resume_from)
        if not model.use_peft:
            return None
    directory = find_stage(model.init_from)
    if model.init_optimizer:
        _check_optimizer(directory, strategy)
    origin = _described(directory)
    logger.info(
        "weights: from %s%s",
        directory,
        f", step {origin['step']:,} of run {origin['run_id']}" if "step" in origin else "",
    )
    return origin


def _weights_of_run(run: Path) -> Path:
    if (run / FINAL).is_dir():
        return run / FINAL
    newest = own_checkpoint(str(run))
    if newest is None:
        raise ConfigurationError(
            f"--init_from {run}: the run has neither {FINAL}/ nor a committed checkpoint: let it "
            "finish, or name a checkpoint or a model."
        )
    return newest


def _unfit(directory: Path) -> str | None:
    """Return why weights cannot be taken from a directory, and what can be done."""
    finished = "name the directory of its run once that is finished, or its final/."
    if directory.name.startswith((INCOMPLETE, DAMAGED, DELETING)):
        return f"{directory.name} was set aside, it is no whole checkpoint: name another one."
    if (directory / "adapter_config.json").is_file():
        return (
            f"{directory.name} holds a LoRA adapter without the weights that it adapts. final/ of "
            f"the run holds both, merged: {finished}"
        )
    if any(directory.glob("*.safetensors")):
        return None
    if any(directory.glob("pytorch_model_fsdp_*")) or any(directory.glob("global_step*")):
        return f"{directory.name} holds the shards of FSDP or DeepSpeed, no whole model: {finished}"
    if any(directory.glob("*.bin")):
        return (
            f"{directory.name} holds its weights as a pickle (*.bin), which is not read: load it "
            "where you trust it, and save_pretrained writes safetensors."
        )
    return f"{directory.name} holds no weights (*.safetensors) and is no run of Stoker."


def _check_optimizer(directory: Path, strategy: str) -> None:
    if strategy not in WHOLE_OPTIMIZERS:
        raise ConfigurationError(
            f"init_optimizer: under {strategy} each rank keeps a part of the optimizer, and none "
            "can be put together from an earlier stage: leave it out, or use multi_gpu.yaml."
        )
    if not (directory / OPTIMIZER).is_file():
        raise ConfigurationError(
            f"init_optimizer: {directory} has no {OPTIMIZER}: let --init_from name a checkpoint-N "
            "that was written on one GPU or with multi_gpu.yaml (a finished model has none)."
        )
    try:
        pickles.check_file(directory / OPTIMIZER)
    except pickles.ForbiddenPickleError as error:
        raise ConfigurationError(f"init_optimizer: {directory / OPTIMIZER} {error}") from error


def _described(directory: Path) -> dict[str, Any]:
    """Return path, run, step and digests of a stage's weights, compared with its manifest."""
    path = str(directory.resolve())
    if (directory / MANIFEST).is_file():
        try:
            manifest = read_manifest(directory)
            problems = file_problems(directory, manifest.files)
        except DamagedCheckpointError as error:
            problems = [str(error)]
        if problems:
            raise ConfigurationError(
                f"--init_from {directory}: it is not as it was committed ({'; '.join(problems)}): "
                "name another checkpoint, and see whether the storage is sound."
            )
        weights = {name: manifest.files[name] for name in manifest.files if _is_weights(name)}
        digests = {name: record.sha256 for name, record in weights.items()}
        return {"path": path, "run_id": manifest.run_id, "step": manifest.step, "sha256": digests}
    run_id = known_run_id(directory.parent / PROVENANCE) if directory.name == FINAL else None
    files = sorted(directory.glob("*.safetensors"))
    return {"path": path, "run_id": run_id, "sha256": kept_digests(files)}


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors")
