"""What follows from evaluations: the run ends when they improve no more."""

import logging
from typing import Any

from transformers import (
    EarlyStoppingCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from typing_extensions import override

UNIMPROVED = "unimproved_evaluations"  # in our part of a checkpoint's trainer_state.json

logger = logging.getLogger(__name__)


class FinishedEarlyError(Exception):
    """Raised on all ranks before a step: the checkpoint is one at which the run has ended."""


class EarlyStopping(TrainerCallback):
    """Ends the run when metric_for_best_model did not improve in `patience` evaluations in a row.

    transformers' callback judges. It is not one of Trainer's: there it would judge splits one by
    one, count evaluations that a stop interrupts and forget its count on resume. The trainer passes
    on the metrics of all splits instead (`take_evaluation`).
    """

    def __init__(self, patience: int, threshold: float):
        self.judge = EarlyStoppingCallback(patience, threshold)

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self.judge.early_stopping_patience_counter >= self.judge.early_stopping_patience

    def resume_from(self, saved: dict[str, Any]) -> None:
        """Take over what the checkpoint holds."""
        self.judge.early_stopping_patience_counter = saved.get(UNIMPROVED, 0)

    def resume_state(self) -> dict[str, Any]:
        """Return what the checkpoint that is about to be written must hold."""
        return {UNIMPROVED: self.judge.early_stopping_patience_counter}

    def take_evaluation(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        metrics: dict[str, float],
    ) -> bool:  # fmt: skip
        """Judge an evaluation, before it may become the best; True: it ends the run."""
        self.judge.on_evaluate(args, state, control, metrics)
        if self.ended and state.is_world_process_zero:
            logger.info(
                "early stopping after step %d: %s was %.4f at best, no better in %d evaluations",
                state.global_step, args.metric_for_best_model, state.best_metric,
                self.judge.early_stopping_patience,
            )  # fmt: skip
        return self.ended

    @override
    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """End a run that resumes where it had ended, or whose owed evaluation was the last."""
        if self.ended:
            raise FinishedEarlyError

    @override
    def on_epoch_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Do nothing more: Trainer takes leaving its loop for the end of an epoch."""
        if self.ended:
            control.should_log = control.should_evaluate = control.should_save = False
