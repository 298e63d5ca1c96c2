"""What checkpoints carry of ours in trainer_state.json: Trainer's own state has no place for it."""

from typing import Any

from transformers import TrainerState

CARRIED = "stoker"


def carried_state(state: TrainerState) -> dict[str, Any]:
    """Return what the checkpoint carries under our name; empty for one of another origin."""
    kept: Any = state.stateful_callbacks  # a dict, whatever its annotation says
    return kept.get(CARRIED, {})


def carry(state: TrainerState, values: dict[str, Any]) -> None:
    """Let the next checkpoint carry these values; they must be JSON."""
    kept: Any = state.stateful_callbacks
    kept[CARRIED] = values
