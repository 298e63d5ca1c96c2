"""Stops a run, or saves it, at the same step on all ranks when a user, Slurm or the clock asks."""

import logging
import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from typing_extensions import override

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
    (0: any age), write one and the run continues. A stop during an evaluation interrupts it
    (`EvaluationInterrupted`): the resumed run does all of it first. An evaluation that is due at
    the step of a stop is owed as well. What fails in the background is raised on all ranks.

    stopped           whether the run ended early
    evaluation_due    whether the evaluation of the current step is owed
    extra_saves       the steps of checkpoints that no schedule asked for: the uninterrupted run
                      has none there, so they are no candidates for the best one
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        *,
        save_minutes: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        end_time: Callable[[], float | None] = job_end_time,  # seconds since the epoch
        signalled: Callable[[], str | None] = stop_request,
    ):
        self.checkpoints, self.save_minutes = checkpoints, save_minutes
        self.clock, self.end_time, self.signalled = clock, end_time, signalled
        self.stopped = False
        self.evaluation_due = False
        self.extra_saves: list[int] = []
        self.agreement: Agreement | None = None  # while training
        self.save_due = False
        self.saved_since_turn = False
        self.extra_save = False  # whether this step's checkpoint is one of extra_saves
        self.last_event: float | None = None
        self.first_step = True  # of this start: allocation and compilation predict no other step

    def resume_from(self, saved: dict[str, Any]) -> None:
        """Take over what the checkpoint holds."""
        self.evaluation_due = saved.get("evaluation_due", False)
        self.extra_saves = list(saved.get("extra_saves", []))

    def resume_state(self) -> dict[str, Any]:
        """Return what the checkpoint that is about to be written must hold."""
        self.extra_saves = [saved for saved in self.extra_saves if saved != self.step]
        if self.extra_save:
            self.extra_saves.append(self.step)
        return {"evaluation_due": self.evaluation_due, "extra_saves": self.extra_saves}

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Connect to the other ranks; a resumed run begins with the evaluation that it owes."""
        if state.global_step:
            args.eval_on_start = self.evaluation_due  # what it meant at first is past
        if self.evaluation_due:
            logger.info("evaluating step %d first: the stop came before it", state.global_step)
        self.rank, self.step = args.process_index, state.global_step
        self.deadline = self._deadline() if self.rank == 0 else None
        saves = args.save_strategy != SaveStrategy.NO
        self.requests = Requests(
            self.checkpoints,
            self.rank,
            self.deadline,
            save_every_s=60 * self.save_minutes if saves else 0.0,
            clock=self.clock,
            signalled=self.signalled,
        )
        self.agreement = Agreement(args.ddp_timeout)
        self._put_forward()

    def _deadline(self) -> Deadline | None:
        end = self.end_time()
        if end is None:
            return None
        deadline = Deadline(end - time.time(), self.clock(), self.checkpoints)
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
        """Do what the ranks agreed on: stop, or save and continue."""
        self.step = state.global_step
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
        """Interrupt the evaluation, or save after it; every rank has equally many batches."""
        if self.agreement is None:
            return  # the evaluation of a finished run
        self._count_event()
        agreed = self._take_turn(state)
        if agreed >= STOPPING:
            self._note_stop(agreed, f"a part of the evaluation at step {state.global_step}")
            self.evaluation_due, control.should_evaluate = True, False
            control.should_training_stop = True
            self.ask_for_save(args, state, control)
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
        if agreed >= FAILED:
            self.checkpoints.finish()  # raises
        if agreed == SAVING and not self.save_due:
            # A checkpoint that was written since it was asked for is what was asked for.
            self.save_due = not self.saved_since_turn
            if self.save_due and self.rank == 0:
                reason = self.requests.save_reason
                logger.info("saving at step %d, then continuing: %s", state.global_step, reason)
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
        self._note_stop(agreed, f"step {state.global_step}")
        # There may be no time for it: the resumed run begins with it.
        self.evaluation_due, control.should_evaluate = due, False
        control.should_training_stop = True
        self.ask_for_save(args, state, control)

    def _note_stop(self, agreed: int, place: str) -> None:
        self.stopped = True
        if self.rank == 0:
            reason = self.requests.reason or f"a signal to rank {agreed - STOPPING}"
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
        """Note that a request to save is met; a save is no event between two looks."""
        self.save_due, self.saved_since_turn = False, True
        self.requests.saved()
        self.last_event = self.clock()

    def _on_event(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        del args, state, control, kwargs
        self._count_event()

    # A log waits for the device, where the time of steps on a GPU shows.
    on_log = on_evaluate = _on_event

    def _count_event(self) -> None:
        """Measure the time since the event before; the first one ends the start-up."""
        before, self.last_event = self.last_event, self.clock()
        if self.deadline is not None and before is not None:
            self.deadline.took_step(self.last_event - before)

    @override
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wait for the turn under way before the group goes; collective over ranks."""
        if self.agreement is not None:
            self.agreement.close()
            self.agreement = None
