"""Weights that `--init_from` loads from an earlier run, and the record of their origin.

`--init_from` names the directory of a run, a checkpoint or a model in safetensors. For a run,
Stoker loads final/, or the newest complete checkpoint if there is no final/.
"""

import logging
from pathlib import Path
from typing import Any

from utils.checkpoints.discovery import DAMAGED, DELETING, INCOMPLETE, own_checkpoint, resume_point
from utils.checkpoints.files import (
    CONFIG,
    FINAL,
    MANIFEST,
    DamagedCheckpointError,
    cached_digests,
    file_problems,
    read_manifest,
)
from utils.checkpoints.pickles import forbidden
from utils.checkpoints.record import RunRecord
from utils.config.errors import ConfigurationError, did_you_mean
from utils.config.settings import RunSettings
from utils.host.collectives import on_rank_0

logger = logging.getLogger(__name__)

OPTIMIZER_FILE = "optimizer.pt"


def find_stage(init_from: str) -> Path:
    """Return the weights directory for `--init_from`.

    Raises ConfigurationError if the directory has no weights.
    """
    directory = Path(init_from)
    if (directory / CONFIG).is_file():  # a run's directory
        final = directory / FINAL
        directory = final if final.is_dir() else own_checkpoint(directory) or final
    if problem := _weights_problem(directory):
        raise ConfigurationError(f"--init_from {init_from}: {problem}")
    return directory


def stage_of(settings: RunSettings) -> Path | None:
    """Return the directory from which a run with `--init_from` reads configuration and tokenizer.

    Before its first checkpoint, and always under LoRA, a run reads from the weights directory of
    `--init_from`. Later the run reads from its own newest intact checkpoint, so the user may delete
    the directory of `--init_from`. Returns None without `--init_from`. All ranks must call this.
    Raises ConfigurationError, StorageError.
    """
    if settings.model.init_from is None:
        return None

    def find() -> Path:
        output_dir, checkpoint = Path(str(settings.training.output_dir)), None
        run_id = RunRecord(output_dir).run_id
        if run_id is not None and not settings.model.use_peft:
            checkpoint = resume_point(output_dir, run_id, dry_run=True)
        return checkpoint or weights_directory(settings)

    return on_rank_0(find)


def weights_directory(settings: RunSettings) -> Path:
    """Return the directory or the Hub name from which a new run loads its weights.

    A resumed run uses the directory that it recorded for the same `--init_from`, even if the
    earlier run has newer weights by now. Raises ConfigurationError if the directory has no weights.
    """
    init_from = settings.model.init_from
    if init_from is None:
        return Path(str(settings.model.model_name_or_path))
    starts = RunRecord(Path(str(settings.training.output_dir))).starts
    origins = [start["weights_from"] for start in starts if start.get("weights_from")]
    earlier, current = Path(origins[-1]["init_from"] if origins else ""), Path(init_from)
    if not origins or (earlier != current.absolute() and earlier.resolve() != current.resolve()):
        return find_stage(init_from)
    recorded = Path(origins[-1]["path"])
    if problem := _weights_problem(recorded):
        raise ConfigurationError(
            f"--init_from {init_from}: this run began with the weights in {recorded}, which it "
            f"still needs: {problem} Put them back, let --init_from name where they are now, or "
            "name another --output_dir."
        )
    return recorded


def stage_tokenizer(settings: RunSettings) -> str | None:
    """Return the directory of `stage_of` as text, or None if the directory has no tokenizer."""
    stage, files = stage_of(settings), ("tokenizer.json", "tokenizer_config.json")
    found = stage is not None and any((stage / name).is_file() for name in files)
    return str(stage) if found else None


def origin_directory(settings: RunSettings, strategy: str, resume_from: str | None) -> Path | None:
    """Return the weights directory of `--init_from`, or None if it is not to be loaded.

    resume_from: the checkpoint to resume from, or None for a new run. A resumed run loads the
    weights of `--init_from` only under LoRA. Raises ConfigurationError if the directory has no
    weights, or if --init_optimizer is not possible.
    """
    model = settings.model
    if model.init_from is None:
        return None
    if resume_from is not None and not model.use_peft:
        logger.info(f"init_from {model.init_from} is ignored: the run has {resume_from} of its own")
        return None
    directory = weights_directory(settings)
    if model.init_optimizer and resume_from is None:
        path = directory / OPTIMIZER_FILE
        # Other strategies split the optimizer over ranks. A finished model has no optimizer.
        if strategy not in ("single", "ddp") or not path.is_file():
            has = "has" if path.is_file() else "has no"
            raise ConfigurationError(
                f"init_optimizer: {directory} {has} {OPTIMIZER_FILE}, and this run is {strategy}. "
                "Take the optimizer of a checkpoint-N that was written on one GPU or with "
                "multi_gpu.yaml, and train in the same way."
            )
        if reason := forbidden(path):
            raise ConfigurationError(f"init_optimizer: {path} {reason}")
    return directory


def weights_origin(
    settings: RunSettings, strategy: str, resume_from: str | None
) -> dict[str, Any] | None:
    """Return {path, run_id, step, sha256, ...} of the weights of `--init_from`, to be recorded.

    Returns None if these weights are not to be loaded (see `origin_directory`). Raises
    ConfigurationError if the files differ from the checkpoint's manifest.
    """
    directory = origin_directory(settings, strategy, resume_from)
    if directory is None:
        return None
    origin: dict[str, Any] = {
        "init_from": str(Path(str(settings.model.init_from)).absolute()),
        "path": str(directory.resolve()),
    }
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
        names = [name for name in manifest.files if name.endswith(".safetensors")]
        digests = {name: manifest.files[name].sha256 for name in names}
        origin |= {"run_id": manifest.run_id, "step": manifest.step, "sha256": digests}
    else:
        run_id = RunRecord(directory.parent).run_id if directory.name == FINAL else None
        files = sorted(directory.glob("*.safetensors"))
        origin |= {"run_id": run_id, "sha256": cached_digests(files)}
    stays = ", which have to stay: checkpoints will hold adapters alone"
    logger.info("weights: from %s%s", directory, stays if settings.model.use_peft else "")
    return origin


def _weights_problem(directory: Path) -> str | None:
    if not directory.is_dir():
        return f"there is no such directory: {directory}{did_you_mean(directory)}."
    unfinished = directory.name.startswith((INCOMPLETE, DAMAGED, DELETING))
    adapter = (directory / "adapter_config.json").is_file()
    if not unfinished and not adapter and any(directory.glob("*.safetensors")):
        return None
    return (
        f"{directory.name} holds no whole model in safetensors: name the final/ of a finished run "
        "(LoRA's is merged), a committed checkpoint of one GPU or of DDP, or a model that "
        "save_pretrained wrote."
    )
