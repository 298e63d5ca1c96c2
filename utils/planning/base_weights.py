"""The weights under LoRA's adapters: no checkpoint of the run holds them, so they are known here.

Other ones under the same path, or a branch of the Hub that moved on, would leave the adapters on a
model that they were not trained on, and nothing else would tell.
"""

import logging
from pathlib import Path
from typing import Any

from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from utils.checkpoints.kept_digests import kept_digests
from utils.config.run_settings import RunSettings
from utils.planning.stages import weights_directory

logger = logging.getLogger(__name__)

# What a directory's weights are read from: the first of these that is there.
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def base_weights(settings: RunSettings) -> dict[str, Any] | None:
    """Return what the base weights are, as provenance.json keeps it: JSON values.

    {"sha256": digest of each file by name} of a directory, {"commit": ...} of a model on the Hub;
    None where all weights are in the run's checkpoints. It may read all of them (see
    `kept_digests`), so rank 0 alone calls it. Raises ConfigurationError and OSError.
    """
    model = settings.model
    if not model.use_peft:
        return None
    if model.init_from is not None:
        return _of_directory(weights_directory(settings))
    given = Path(str(model.model_name_or_path))
    if given.is_dir():
        return _of_directory(given)
    return _of_hub(str(model.model_name_or_path), model.model_revision)


def _of_directory(directory: Path) -> dict[str, Any] | None:
    for pattern in WEIGHT_FILES:
        files = sorted(directory.glob(pattern))
        if files:
            return {"sha256": kept_digests(files)}
    return None  # loading says so


def _of_hub(name: str, revision: str | None) -> dict[str, Any] | None:
    commit = extract_commit_hash(cached_file(name, "config.json", revision=revision), None)
    if commit is None:
        logger.warning("%s: its commit is not known; another one would go unnoticed", name)
        return None
    return {"commit": commit}
