"""What checkpoints carry of ours in trainer_state.json: Trainer's own state has no place for it."""

import math
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from typing_extensions import override

CARRIED = "stoker"


def carried_state(state: TrainerState) -> dict[str, Any]:
    """Return what the checkpoint carries under our name; empty for one of another origin."""
    kept: Any = state.stateful_callbacks  # a dict, whatever its annotation says
    return kept.get(CARRIED, {})


def carry(state: TrainerState, values: dict[str, Any]) -> None:
    """Let the next checkpoint carry these values; they must be JSON."""
    kept: Any = state.stateful_callbacks
    kept[CARRIED] = values


# Keeps the loader's position, and what Trainer takes for an epoch, with the optimizer step.


class DataPosition(TrainerCallback):
    """Start the loader at the run's step, and count the epochs of the data.

    The order of samples is a pure function of the step (utils/data/order.py), so going on after a
    checkpoint is one assignment: no batch is skipped by reading it. Trainer sees one long epoch;
    the epoch it logs is put right after every step, and what it does at the end of an epoch is
    asked for at the step that ends an epoch of the data.
    """

    @override
    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Move the loader, and its count, to where the checkpoint ended (0 for a fresh start)."""
        loader = kwargs["train_dataloader"]
        loader.resume_at(state.global_step)
        carried = carried_state(state)
        if "tokens" in carried:
            loader.tokens_seen.resume(state.global_step, carried["tokens"])

    @override
    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Count the epochs of the data; act on those that end, but for the run's last step."""
        sampler = kwargs["train_dataloader"].batch_sampler
        before = sampler.epoch_at(state.global_step - 1)
        state.epoch = sampler.epoch_at(state.global_step)
        ended = math.floor(state.epoch) > math.floor(before)
        if ended and state.global_step < state.max_steps:  # Trainer's own epoch ends with the run
            control.should_log |= args.logging_strategy == IntervalStrategy.EPOCH
            control.should_evaluate |= args.eval_strategy == IntervalStrategy.EPOCH
            control.should_save |= args.save_strategy == SaveStrategy.EPOCH
