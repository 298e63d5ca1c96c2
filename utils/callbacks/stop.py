"""Stops and saves at the same step on all ranks: by signals, time limits, files STOP and SAVE."""

import datetime
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from typing_extensions import override

from utils.callbacks.progress import Phase, Progress
from utils.checkpoints.discovery import DAMAGED, set_aside
from utils.checkpoints.store import Checkpoints
from utils.host.collectives import AsyncMax
from utils.host.journal_file import duration
from utils.launch.signals import Stage, enter_stage, stop_request
from utils.launch.slurm import job_end_time

STOP, SAVE = "STOP", "SAVE"  # files in the run directory
JOB_BEGAN = "STOKER_JOB_BEGAN"  # unix seconds, set by slurm/job_setup.sh
LOOK_INTERVAL_S = 1.0
# Requests. Each rank sends a number, and all ranks act on the largest number. STOPPING + N: rank N
# was asked to stop. SPENT: max_gpu_hours are used. FAILED: a background save failed.
NOTHING, SAVING, STOPPING = range(3)
SPENT, FAILED = 2**30 - 1, 2**30

# The next step or batch may take as long as the longest of the last RECENT_EVENTS steps or batches.
RECENT_EVENTS = 100
LONGEST_MARGIN_S = 30.0
# Assumed speed of a save until the first save is measured; low for a parallel file system.
GUESSED_BYTES_PER_S = 200e6
SHORTEST_GUESS_S = 5.0

logger = logging.getLogger(__name__)


class EvaluationInterrupted(Exception):
    """Error on all ranks if a stop interrupts an evaluation. A resumed run evaluates first."""


class Deadline:
    """A time limit of the run, and an estimate of the time that a stop needs before the limit.

    A stop needs time for a save and two steps: rank 0 reads the clock only after a step, and the
    ranks agree on the stop during the next step. The save waits for an earlier save that is still
    being written in the background. total_s: the seconds from `now` to the limit. name: the limit's
    name in the log.
    """

    def __init__(
        self, total_s: float, now: float, checkpoints: Checkpoints, name: str = "the time limit"
    ):
        self.total_s, self.checkpoints, self.name = max(total_s, 0.0), checkpoints, name
        self.ends_at = now + self.total_s
        self.margin_s = min(LONGEST_MARGIN_S, self.total_s / 10)
        guess_s = max(SHORTEST_GUESS_S, checkpoints.estimated_bytes / GUESSED_BYTES_PER_S)
        # The guess must not stop a short job too early. The first save is measured soon.
        self.guessed_save_s = min(guess_s, self.total_s / 10)
        # Times of steps, evaluation batches and other events between two looks at the clock.
        self.steps_s: deque[float] = deque([0.0], maxlen=RECENT_EVENTS)

    def reason(self, now: float) -> str | None:
        """Return the reason as text if the run must stop now, or None if there is enough time."""
        left_s, step_s = self.ends_at - now, max(self.steps_s)
        saves_s = (save.stall_s + save.write_s for save in self.checkpoints.saves)
        save_s = max(saves_s, default=self.guessed_save_s)
        if left_s > 2 * step_s + (1.5 + self.checkpoints.writing) * save_s + self.margin_s:
            return None
        return (
            f"{self.name} ends in {max(left_s, 0):.0f} s: a step takes {step_s:.2g} s, "
            f"a save {save_s:.2g} s"
        )


class StopWatch(TrainerCallback):
    """A callback that stops or saves after a step or evaluation batch if any rank requests it.

    A stop is requested by a file STOP in the run directory, a signal to any rank, the time limit or
    max_gpu_hours. The run ends with a checkpoint. A stop interrupts an evaluation
    (`EvaluationInterrupted`) and cancels an evaluation that is due at the same step. A resumed run
    then begins with the whole evaluation.

    A save is requested by a file SAVE, or if the last checkpoint is older than `save_minutes` (0
    means never). After the save, the run continues.

    At most once a second, each rank checks whether it has received a signal. Only rank 0 checks the
    files, the limits and save_minutes. If a background save failed on any rank, all ranks raise an
    error.

    stopped           true if the run was stopped early; rank 0 has the `reason` as text
    spent             true if the run was stopped early because of max_gpu_hours
    evaluation_due    true if a resumed run must evaluate the current step first
    unscheduled_save  true if only this callback requested the save of the current step
    """

    def __init__(  # noqa: PLR0913 - the last four are sources of times and requests
        self,
        checkpoints: Checkpoints,
        progress: Progress,
        *,
        save_minutes: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        end_time: Callable[[], float | None] = job_end_time,  # seconds since the epoch
        signalled: Callable[[], str | None] = stop_request,
        budget_end: Callable[[], float | None] = lambda: None,  # of max_gpu_hours, unix seconds
    ):
        self.checkpoints, self.progress, self.save_minutes = checkpoints, progress, save_minutes
        self.clock, self.end_time, self.signalled = clock, end_time, signalled
        self.budget_end = budget_end
        self.stopped = self.spent = self.evaluation_due = self.unscheduled_save = False
        self.agreement: AsyncMax | None = None  # while training
        self.deadline: Deadline | None = None  # of the job; only on rank 0
        self.budget: Deadline | None = None  # of max_gpu_hours; only on rank 0
        self.request, self.reason = NOTHING, ""  # the request of this rank, and the reason
        self.looked_at = float("-inf")
        self.warned = self.save_due = self.saved_since_turn = False
        self.last_event: float | None = None
        # The first step allocates and compiles, so its time does not predict other steps.
        self.first_step = True

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore `evaluation_due` from a checkpoint's values (`saved`)."""
        self.evaluation_due = saved.get("evaluation_due", False)

    def state(self) -> dict[str, Any]:
        """Return {"evaluation_due": whether a resumed run evaluates first} for a checkpoint."""
        return {"evaluation_due": self.evaluation_due}

    @override
    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """Read the time limits; begin the first all-reduce of the ranks' requests.

        If a stop interrupted or canceled an evaluation before a resume, let Trainer evaluate first.
        """
        if state.global_step:
            args.eval_on_start = self.evaluation_due  # the user's value is not for resumed runs
            state.compute_steps(args, state.max_steps)  # Trainer keeps the checkpoint's *_steps
        if self.evaluation_due:
            logger.info("evaluating step %d first: the stop came before it", state.global_step)
        self.rank, self.step = args.process_index, state.global_step
        self.saved_at = self.clock()
        end = self.end_time() if self.rank == 0 else None
        self.deadline = None
        if end is not None:
            self.deadline = Deadline(end - time.time(), self.saved_at, self.checkpoints)
            if self.deadline.total_s > 0:  # after scancel, Slurm's end is now
                logger.info(
                    "time limit: ends at %s, in %s; the run stops early enough for a save "
                    "(estimated at %.2g s until one is measured)",
                    datetime.datetime.fromtimestamp(end).strftime("%H:%M"),
                    duration(self.deadline.total_s), self.deadline.guessed_save_s,
                )  # fmt: skip
        if self.rank == 0 and (end := self.budget_end()) is not None:
            left_s = end - time.time()
            self.budget = Deadline(left_s, self.saved_at, self.checkpoints, "max_gpu_hours")
        if args.save_strategy == SaveStrategy.NO:
            self.save_minutes = 0.0
        self.agreement = AsyncMax(args.ddp_timeout)
        self._begin_all_reduce(self.agreement)

    def limit_s(self) -> float | None:
        """Return the seconds until the job's time limit, or None without a limit."""
        return None if self.deadline is None else max(self.deadline.ends_at - self.clock(), 0.0)

    @override
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Set `unscheduled_save` to False for the new step."""
        self.unscheduled_save = False

    @override
    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Make Trainer stop or save if any rank has requested a stop or a save."""
        self.step = state.global_step
        if self.first_step:
            self.first_step, self.last_event = False, self.clock()
            enter_stage(Stage.TRAINING)  # from now on a stop has something to save
        agreed = self._agreed_request()
        last = state.global_step >= state.max_steps
        if last and args.logging_strategy == IntervalStrategy.STEPS:
            control.should_log = True  # the report and the model card show the last step
        # If eval_strategy is "epoch", Trainer requests the last evaluation only after this event.
        due = control.should_evaluate or (last and args.eval_strategy == IntervalStrategy.EPOCH)
        if agreed >= STOPPING and last and not due:
            if self.rank == 0:
                logger.info("finishing, not stopping: step %d is the last", self.step)
            self._clear_requests(STOP)
        elif agreed >= STOPPING:
            self.evaluation_due = due  # there may be no time now: the resumed run evaluates first
            self._stop(agreed, f"step {self.step}", control)
        if self.stopped or self.save_due:
            self._ask_for_save(args, state, control)

    @override
    def on_prediction_step(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Raise EvaluationInterrupted if a stop is requested.

        If a save is requested, Trainer saves after the evaluation. All ranks have the same number
        of evaluation batches, so all ranks stop at the same batch.
        """
        if self.agreement is None:
            return  # the evaluation of a finished run
        agreed = self._agreed_request()
        if agreed >= STOPPING:
            self.evaluation_due = True
            self._stop(agreed, f"a part of the evaluation at step {self.step}", control)
        if self.stopped or self.save_due:
            self._ask_for_save(args, state, control)
        if self.stopped:
            raise EvaluationInterrupted

    def _agreed_request(self) -> int:
        """Return the largest of all ranks' requests (numbers), and begin the next all-reduce.

        With several ranks, the result is from the requests at the previous call.
        """
        assert self.agreement is not None, "on_train_begin comes first"
        self._store_event_time()
        alone = self.agreement.group is None
        if alone:
            self._begin_all_reduce(self.agreement)
        agreed = self.agreement.result()
        if agreed >= FAILED:
            self.progress.begin(Phase.SAVE, self.step)
            self.checkpoints.finish()  # raises the error of the failed save
        # A checkpoint written since this all-reduce began fulfils the request.
        if agreed == SAVING and not self.save_due:
            self._clear_requests(SAVE)
            self.save_due = not self.saved_since_turn
            if self.save_due and self.rank == 0:
                logger.info("saving at step %d, then continuing: %s", self.step, self.reason)
        if not alone:
            self._begin_all_reduce(self.agreement)
        return agreed

    def _begin_all_reduce(self, agreement: AsyncMax) -> None:
        agreement.begin_turn(self._own_request())
        self.saved_since_turn = False

    def _own_request(self) -> int:
        """Return this rank's request, a number: NOTHING, SAVING, STOPPING + rank, SPENT or FAILED.

        A request to stop remains until the run ends.
        """
        if self.checkpoints.failed:
            return FAILED
        now = self.clock()
        if self.request >= STOPPING or now - self.looked_at < LOOK_INTERVAL_S:
            return self.request
        self.looked_at, self.request = now, NOTHING
        directory, files = self.checkpoints.output_dir, self._listing() if self.rank == 0 else set()
        stop = self.signalled() or (str(directory / STOP) if STOP in files else None)
        if stop is None and self.deadline is not None:
            stop = self.deadline.reason(now)
        spent = self.budget.reason(now) if self.budget is not None else None
        if spent is not None:
            self.request, self.reason = SPENT, spent
        elif stop is not None:
            self.request, self.reason = STOPPING + self.rank, stop
        elif SAVE in files:
            self.request, self.reason = SAVING, str(directory / SAVE)
        elif self.rank == 0 and 0 < 60 * self.save_minutes <= now - self.saved_at:
            minutes = f"{self.save_minutes:g} minutes since the last checkpoint (save_minutes)"
            self.request, self.reason = SAVING, minutes
        return self.request

    def _listing(self) -> set[str]:
        try:
            # List the directory: NFS caches for a while that a single name is missing.
            return {path.name for path in self.checkpoints.output_dir.iterdir()}
        except OSError as error:
            if not self.warned:
                logger.warning("cannot look for STOP and SAVE: %s", error)
            self.warned = True
            return set()

    def _clear_requests(self, *names: str) -> None:
        """Reset this rank's request to save. Rank 0 also removes the files `names` (STOP, SAVE)."""
        if self.request < STOPPING:
            self.request = NOTHING
        if self.rank == 0:
            for name in names:
                (self.checkpoints.output_dir / name).unlink(missing_ok=True)

    def _stop(self, agreed: int, place: str, control: TrainerControl) -> None:
        self.stopped, self.spent = True, agreed == SPENT
        if self.rank == 0:
            own = self.request == STOPPING or self.spent
            self.reason = self.reason if own else f"a signal to rank {agreed - STOPPING}"
            logger.info("stopping after %s: %s", place, self.reason)
        self._clear_requests(STOP, SAVE)
        control.should_evaluate, control.should_training_stop = False, True

    def _ask_for_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl
    ) -> None:
        """Request a save from Trainer; set `unscheduled_save` if the step had no scheduled save."""
        last = state.global_step >= state.max_steps
        scheduled = control.should_save or (last and args.save_strategy == SaveStrategy.EPOCH)
        self.unscheduled_save |= not scheduled
        control.should_save = True

    @override
    def on_epoch_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """After a stop, cancel the log, evaluation and save that Trainer does at an epoch's end."""
        if self.stopped:
            control.should_log = control.should_evaluate = control.should_save = False

    @override
    def on_save(self, *_: Any, **__: Any) -> None:
        """Reset requests to save. Restart the clock, because a save is not part of a step."""
        self.save_due, self.saved_since_turn = False, True
        self.saved_at = self.last_event = self.clock()
        if self.request == SAVING:
            self.request = NOTHING

    def _store_event_time(self, *_: Any, **__: Any) -> None:
        """Store the time since the last event. The time of a step is estimated from these times."""
        before, self.last_event = self.last_event, self.clock()
        for deadline in (self.deadline, self.budget):
            if deadline is not None and before is not None:
                deadline.steps_s.append(self.last_event - before)

    # A log waits for the device, so it measures the time of steps on a GPU.
    on_log = on_evaluate = _store_event_time

    @override
    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Complete the last all-reduce and close its process group. All ranks must call this."""
        enter_stage(Stage.FINISHING)
        if self.agreement is not None:
            self.agreement.close()
            self.agreement = None


def remove_stale_requests(output_dir: Path) -> None:
    """Remove STOP and SAVE files left by an earlier job of this run, and log a warning.

    A file that is newer than the beginning of this job (STOKER_JOB_BEGAN) is a request to this job
    and stays.
    """
    began = os.environ.get(JOB_BEGAN, "")
    for name in (STOP, SAVE):
        path = output_dir / name
        if path.is_dir():
            logger.warning("%s is a directory: set aside as %s", path, set_aside(path, DAMAGED))
        elif path.exists() and began.isdecimal() and path.stat().st_mtime >= int(began):
            logger.info("%s is there: the run obeys it after its first step", path)
        elif path.exists():
            path.unlink()
            logger.warning(
                "removed %s: it is older than this start. Touch it again to use it", path
            )
