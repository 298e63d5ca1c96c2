"""Keeps the loader's position and the logged epoch with the optimizer step."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from utils.data.loader import TrainLoader


class DataPosition(TrainerCallback):
    """Start the loader at the run's step, and say the epoch of the data.

    The order of samples is a pure function of the step (utils/data/order.py), so going on after a
    checkpoint is one assignment: no batch is skipped by reading it. Trainer sees one long epoch;
    the epoch it logs is put right after every step.
    """

    def on_train_begin(
        self,
        args: TrainingArguments,  # noqa: ARG002 - the hook's signature
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        train_dataloader: TrainLoader,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Move the loader to the step that the checkpoint ended with (0 for a fresh start)."""
        train_dataloader.resume_at(state.global_step)

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002 - the hook's signature
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        train_dataloader: TrainLoader,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Replace the share of the run that Trainer calls epoch by the epochs of the data."""
        state.epoch = train_dataloader.batch_sampler.epoch_at(state.global_step)
