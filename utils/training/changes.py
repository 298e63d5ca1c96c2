"""What changed in the settings of a run since it was started, and what of it makes another run."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.config.reading.strict_yaml import load_mapping

logger = logging.getLogger(__name__)

CONFIG = "config.yaml"
PROVENANCE = "provenance.json"

# What a run is: another value of one of these is another run, not the same one going on.
IDENTITY = (
    "train_data",
    "sequence_length",
    "packing",
    "on_overlong",
    "global_batch_size",
    "seed",
    "model_name_or_path",
    "model_revision",
    "model_config",
    "tokenizer_name_or_path",
    "dtype",
    "use_peft",
    "lora_r",
    "lora_alpha",
    "lora_target_modules",
)


def other_run(output_dir: Path, now: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Return why the directory belongs to another run; say aloud what changed harmlessly."""
    saved, _ = load_mapping((output_dir / CONFIG).read_text(encoding="utf-8"))
    before = {key: value for key, (value, _) in saved.items()}
    last = json.loads((output_dir / PROVENANCE).read_text(encoding="utf-8"))["starts"][-1]
    if last["script"] != facts["script"]:
        return [f"{output_dir} holds a run of {last['script']}: name another --output_dir."]
    changed = {key: value for key, value in now.items() if before.get(key) != value}
    problems = [
        f"{output_dir} holds another run: its {key} is {before.get(key)}, now it is "
        f"{value}. Name another --output_dir, or give the old value to go on."
        for key, value in changed.items()
        if key in IDENTITY
    ]
    if last["data"]["train"] != facts["data"]["train"]:
        problems.append(
            f"the training data changed since {output_dir} was started (its content fingerprint "
            "differs): name another --output_dir, or put the old data back."
        )
    for key in sorted(changed.keys() - set(IDENTITY)):
        logger.warning("%s was %s in this run, now it is %s", key, before.get(key), changed[key])
    return problems
