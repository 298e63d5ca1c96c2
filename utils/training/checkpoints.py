"""Which checkpoint a run starts from."""

import json
import logging
import re
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME

logger = logging.getLogger(__name__)

CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")


def resume_point(output_dir: str | Path) -> str | None:
    """Return the newest complete checkpoint of the run in ``output_dir``; None: start afresh.

    Trainer writes ``trainer_state.json`` last, so a checkpoint without a readable one was cut off
    while it was written: it is passed over, aloud, and left where it is.
    """
    for step, directory in _numbered_checkpoints(Path(output_dir)):
        if _is_complete(directory, step):
            logger.info("resuming from %s", directory)
            return str(directory)
        logger.warning(
            "%s is incomplete (the run ended while it was written): passing it over", directory
        )
    return None


def _numbered_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """Return (step, directory) of everything named like a checkpoint, newest step first."""
    found = []
    for directory in output_dir.glob("checkpoint-*"):
        match = CHECKPOINT_NAME.fullmatch(directory.name)
        if match and directory.is_dir():
            found.append((int(match.group(1)), directory))
    return sorted(found, reverse=True)


def _is_complete(directory: Path, step: int) -> bool:
    try:
        state = json.loads((directory / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError):
        return False
    return isinstance(state, dict) and state.get("global_step") == step
