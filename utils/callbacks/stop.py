"""Stops a run, or saves it, at the same step on all ranks when a user, Slurm or the clock asks."""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from typing_extensions import override

from utils.callbacks.resume_state import carried_state
from utils.callbacks.stop_requests import (
    FAILED,
    SAVE,
    SAVING,
    STOP,
    STOPPING,
    Agreement,
    Deadline,
    Requests,
)
from utils.checkpoints.store import Checkpoints
from utils.launch.signals import stop_request
from utils.launch.slurm import job_end_time

logger = logging.getLogger(__name__)


class EvaluationInterrupted(Exception):
    """Raised on all ranks at the same batch: the run stops, and owes this evaluation."""


class StopWatch(TrainerCallback):
    """Acts at the ends of steps and evaluation batches on what any rank is asked to do.

    STOP in the run directory, a signal to any rank and the time limit end the run with a
    checkpoint; SAVE in the run directory, and a last checkpoint that is older than `save_minutes`
    (0: any age), write one and the run goes on. A stop during an evaluation breaks it off
    (`EvaluationInterrupted`): the resumed run does it first, all of it. An evaluation that is due
    at the step of a stop is owed as well. What fails in the background is raised on all ranks.

    stopped           whether the run ended early
    evaluation_due    whether the evaluation of the current step is owed
    extra_saves       the steps of checkpoints that no schedule asked for: the uninterrupted run
                      has none there, so they are no candidates for the best one

    `clock` and `end_time` (seconds since the epoch) are for the time limit, `signalled` says which
    signal asked for a stop.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        checkpoint_bytes: int = 0,
        *,
        save_minutes: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        end_time: Callable[[], float | None] = job_end_time,
        signalled: Callable[[], str | None] = stop_request,
    ):
        self.output_dir = Path(output_dir)
        self.checkpoint_bytes, self.save_minutes = checkpoint_bytes, save_minutes
        self.checkpoints: Checkpoints | None = None  # the trainer gives its own
        self.clock, self.end_time, self.signalled = clock, end_time, signalled
        self.stopped = False
        self.evaluation_due = False
        self.extra_saves: list[int] = []
        self.agreement: Agreement | None = None  # while training
        self.save_due = False
        self.saved_since_turn = False
        self.saves_counted = 0
        self.extra_save = False  # whether this step's checkpoint is one of extra_saves
        self.last_event: float | None = None
        self.first_step = True  # of this start: allocation and compilation say nothing of the next

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take over what the checkpoint carries; collective over ranks."""
        carried = carried_state(state)
        self.evaluation_due = carried.get("evaluation_due", False)
        self.extra_saves = list(carried.get("extra_saves", []))
        if state.global_step:
            # What eval_on_start means is past; a resumed run begins with what it owes.
            args.eval_on_start = self.evaluation_due
        if self.evaluation_due:
            logger.info("the evaluation of step %d is owed: it comes first", state.global_step)
        self.rank = args.process_index
        self.deadline = self._deadline() if self.rank == 0 else None
        self.requests = Requests(
            self.output_dir, self.rank, self.clock, self.deadline, self.signalled, self._failed
        )
        if args.save_strategy != SaveStrategy.NO:
            self.requests.save_every_s = 60 * self.save_minutes
        self.agreement = Agreement(args.ddp_timeout)
        self._put_forward()

    def _failed(self) -> bool:
        return self.checkpoints is not None and self.checkpoints.failed

    def _writing(self) -> bool:
        return self.checkpoints is not None and self.checkpoints.writing

    def _deadline(self) -> Deadline | None:
        end = self.end_time()
        if end is None:
            return None
        deadline = Deadline(end - time.time(), self.clock(), self.checkpoint_bytes)
        deadline.writing = self._writing
        logger.info("%s", deadline.plan(end))
        return deadline

    @override
    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forget what was saved before, as `control` does."""
        self.extra_save = False

    @override
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Act on what the ranks agreed on: stop, or save and go on."""
        if self.first_step:
            self.first_step, self.last_event = False, self.clock()
        self._count_event()
        agreed = self._take_turn(state)
        if agreed >= STOPPING:
            self._stop_at_step(agreed, args, state, control)
        elif self.save_due:
            self.ask_for_save(args, state, control)

    @override
    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Break the evaluation off, or save after it; every rank has equally many batches."""
        if self.agreement is None:
            return  # the evaluation of a finished run
        self._count_event()
        agreed = self._take_turn(state)
        if agreed >= STOPPING:
            self._say_stop(agreed, f"a part of the evaluation at step {state.global_step}")
            self.evaluation_due = True
            raise EvaluationInterrupted
        if self.save_due:
            self.ask_for_save(args, state, control)

    def _take_turn(self, state: TrainerState) -> int:
        """Return what the ranks agreed on in the last turn, and begin the next one."""
        assert self.agreement is not None, "on_train_begin comes first"
        alone = self.agreement.group is None
        if alone:
            self._put_forward()
        agreed = self.agreement.result()
        if agreed >= FAILED and self.checkpoints is not None:
            self.checkpoints.finish()  # raises
        if agreed == SAVING and not self.save_due:
            # A checkpoint that was written since it was asked for is what was asked for.
            self.save_due = not self.saved_since_turn
            if self.save_due and self.rank == 0:
                reason = self.requests.save_reason
                logger.info("saving at step %d and going on: %s", state.global_step, reason)
            self.requests.consume(SAVE)
        if not alone:
            self._put_forward()
        return agreed

    def _put_forward(self) -> None:
        assert self.agreement is not None, "on_train_begin comes first"
        self.agreement.put_forward(self.requests.look())
        self.saved_since_turn = False

    def _stop_at_step(
        self, agreed: int, args: TrainingArguments, state: TrainerState, control: TrainerControl
    ) -> None:
        last = state.global_step >= state.max_steps
        # With this strategy the last step's evaluation is asked for after this event.
        due = control.should_evaluate or (last and args.eval_strategy == IntervalStrategy.EPOCH)
        if last and not due:
            if self.rank == 0:
                logger.info("finishing, not stopping: step %d is the last", state.global_step)
            self.requests.consume(STOP)
            return
        self._say_stop(agreed, f"step {state.global_step}")
        # There may be no time for it: the resumed run begins with it.
        self.evaluation_due, control.should_evaluate = due, False
        control.should_training_stop = True
        self.ask_for_save(args, state, control)

    def _say_stop(self, agreed: int, place: str) -> None:
        self.stopped = True
        if self.rank == 0:
            asked = agreed - STOPPING
            reason = self.requests.reason or f"rank {asked} was asked to (a signal)"
            logger.info("stopping after %s: %s", place, reason)
        self.requests.consume(STOP)
        self.requests.consume(SAVE)

    def ask_for_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl
    ) -> None:
        """Let Trainer write a checkpoint at this step, due by schedule or not."""
        last = state.global_step >= state.max_steps
        scheduled = control.should_save or (last and args.save_strategy == SaveStrategy.EPOCH)
        self.extra_save |= not scheduled
        control.should_save = True

    def save_the_best(self, control: TrainerControl) -> None:
        """Let Trainer write a checkpoint of this step, which every run like this one has."""
        self.extra_save = False
        control.should_save = True

    def carried(self, step: int) -> dict[str, Any]:
        """Return what the checkpoint that is about to be written at this step must carry."""
        self.extra_saves = [saved for saved in self.extra_saves if saved != step]
        if self.extra_save:
            self.extra_saves.append(step)
        return {"evaluation_due": self.evaluation_due, "extra_saves": self.extra_saves}

    @override
    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Do nothing more: Trainer takes leaving its loop for the end of an epoch."""
        if self.stopped:
            control.should_log = control.should_evaluate = control.should_save = False

    @override
    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure how long saving takes; a request to save is met."""
        self.save_due = False
        self.saved_since_turn = True
        self.requests.saved()
        seconds = self._since_last_event()
        if self.deadline is not None and seconds is not None and not self._writing():
            self.deadline.took_save(seconds)

    @override
    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count the wait for the device, where the time of steps on a GPU shows."""
        self._count_event()

    @override
    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count the end of an evaluation."""
        self._count_event()

    def _count_event(self) -> None:
        seconds = self._since_last_event()
        if self.deadline is not None and seconds is not None:
            self.deadline.took_step(seconds)
        if self.deadline is not None and self.checkpoints is not None:
            for save in self.checkpoints.saves[self.saves_counted :]:
                self.deadline.took_save(save.total_s)
                self.saves_counted += 1

    def _since_last_event(self) -> float | None:
        """Return the seconds since the event before; None for the first, which is start-up."""
        before, self.last_event = self.last_event, self.clock()
        return None if before is None else self.last_event - before

    @override
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wait for the turn under way before the group goes; collective over ranks."""
        if self.agreement is not None:
            self.agreement.close()
            self.agreement = None
