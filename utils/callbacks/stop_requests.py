"""What asks a run to stop or to save, and how all ranks act on it at the same step."""

import datetime
import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from utils.callbacks.journal import duration
from utils.checkpoints.store import Checkpoints
from utils.launch.signals import stop_request
from utils.support.collectives import cpu_group

STOP, SAVE = "STOP", "SAVE"  # files in the run directory
LOOK_INTERVAL_S = 1.0
# The most pressing is the largest. STOPPING + rank tells who was asked.
NOTHING, SAVING, STOPPING = range(3)
FAILED = 2**30

# Of these many events the longest counts: a slow one long ago says little about the next.
RECENT_EVENTS = 100
LONGEST_MARGIN_S = 30.0
# Parallel file systems write faster; the first save replaces the guess.
GUESSED_BYTES_PER_S = 200e6
SHORTEST_GUESS_S = 5.0

logger = logging.getLogger(__name__)


class Agreement:
    """The largest of what the ranks put forward, known one turn later; all ranks take every turn.

    A turn is an all-reduce of one integer over the CPUs' network (gloo), which runs in a thread of
    its own while the ranks compute: reading the answer a step later waits neither for the device
    nor, as a rule, for a rank. A single process agrees with itself at once.
    """

    def __init__(self, timeout_s: float = 1800):
        """Make the group; collective over ranks. Raises UnfitClusterError."""
        self.pending: tuple[torch.Tensor, Any] | None = None
        self.own = 0
        self.group = cpu_group(timeout_s)

    def result(self) -> int:
        """Return the largest number of the last turn; 0 before the first."""
        if self.pending is None:
            return self.own
        value, work = self.pending
        work.wait()
        self.pending = None
        return int(value.item())

    def put_forward(self, number: int) -> None:
        """Begin a turn with this rank's number; `result` must have been read."""
        assert self.pending is None, "the last turn was not read"
        self.own = number
        if self.group is not None:
            value = torch.tensor([number], dtype=torch.int32)
            maximum = torch.distributed.ReduceOp.MAX
            work = torch.distributed.all_reduce(value, maximum, group=self.group, async_op=True)
            self.pending = (value, work)

    def close(self) -> None:
        """Wait for the turn under way and give the group up; all ranks call it."""
        self.result()
        self.own = 0
        if self.group is not None:
            torch.distributed.destroy_process_group(self.group)
            self.group = None


class Deadline:
    """The end of the job's time limit, compared with how long steps and saves take.

    Two steps are allowed for: the one in which the ranks agree, and the one before it, in which
    rank 0 did not look. `total_s` is left at the time `now`. A save that is being written in the
    background has to end before the last one.
    """

    def __init__(self, total_s: float, now: float, checkpoints: Checkpoints):
        self.total_s = max(total_s, 0.0)
        self.ends_at = now + self.total_s
        self.margin_s = min(LONGEST_MARGIN_S, self.total_s / 10)
        self.checkpoints = checkpoints
        guess_s = max(SHORTEST_GUESS_S, checkpoints.estimated_bytes / GUESSED_BYTES_PER_S)
        # A guess must not eat a short job up: its first save is early, and measured.
        self.guessed_save_s = min(guess_s, self.total_s / 10)
        self.steps_s: deque[float] = deque(maxlen=RECENT_EVENTS)

    def took_step(self, seconds: float) -> None:
        """Count a step, an evaluation batch, or what else lies between two looks."""
        self.steps_s.append(seconds)

    @property
    def _save_s(self) -> float:
        saves = self.checkpoints.saves
        return max((save.total_s for save in saves), default=self.guessed_save_s)

    @property
    def needed_s(self) -> float:
        """Seconds that stopping may take."""
        saves = 1.5 + self.checkpoints.writing
        return 2 * max(self.steps_s, default=0.0) + saves * self._save_s + self.margin_s

    def reason(self, now: float) -> str | None:
        """Say why it is time to stop; None while it is not."""
        left_s = self.ends_at - now
        if left_s > self.needed_s:
            return None
        save = "a save took" if self.checkpoints.saves else "a save takes an estimated"
        step_s = max(self.steps_s, default=0.0)
        return (
            f"the time limit ends in {left_s:.0f} s: a step takes {step_s:.2g} s, "
            f"{save} {self._save_s:.2g} s"
        )

    def plan(self, end_time: float) -> str:
        """Say when the job ends (seconds since the epoch) and that the run stops before it."""
        ends = datetime.datetime.fromtimestamp(end_time).strftime("%H:%M")
        return (
            f"time limit: ends at {ends}, in {duration(self.total_s)}; the run stops early enough "
            f"for a save (estimated at {self.guessed_save_s:.2g} s until one is measured)"
        )


class Requests:
    """Looks for requests, at most once a second; a request to stop stays.

    Each rank looks for signals and for its own failure to write in the background; the files STOP
    and SAVE, the time limit and the age of the last checkpoint (`save_every_s`, 0: any) are for
    rank 0. `reason` says what asks for the stop, `save_reason` what asks for the save.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        rank: int,
        deadline: Deadline | None = None,
        *,
        save_every_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        signalled: Callable[[], str | None] = stop_request,
    ):
        self.checkpoints, self.rank, self.deadline = checkpoints, rank, deadline
        self.save_every_s, self.clock, self.signalled = save_every_s, clock, signalled
        self.found = NOTHING
        self.reason: str | None = None
        self.save_reason = ""
        self.saved_at = clock()
        self.looked_at = float("-inf")
        self.warned = False

    def look(self) -> int:
        """Return NOTHING, SAVING, STOPPING + this rank, or FAILED."""
        if self.checkpoints.failed:
            return FAILED
        now = self.clock()
        if self.found >= STOPPING or now - self.looked_at < LOOK_INTERVAL_S:
            return self.found
        self.looked_at, self.found = now, NOTHING
        files = self._files() if self.rank == 0 else set()
        self.reason = self.signalled()
        if self.reason is None and STOP in files:
            self.reason = str(self._path(STOP))
        if self.reason is None and self.deadline is not None:
            self.reason = self.deadline.reason(now)
        if self.reason is not None:
            self.found = STOPPING + self.rank
        elif SAVE in files:
            self.found, self.save_reason = SAVING, str(self._path(SAVE))
        elif self.rank == 0 and 0 < self.save_every_s <= now - self.saved_at:
            minutes = self.save_every_s / 60
            self.found = SAVING
            self.save_reason = f"{minutes:g} minutes since the last checkpoint (save_minutes)"
        return self.found

    def saved(self) -> None:
        """Note that a checkpoint was just written: none is due before the next look."""
        self.saved_at = self.clock()
        if self.found == SAVING:
            self.found = NOTHING

    def consume(self, name: str) -> None:
        """Remove the file that is acted upon, so that it counts once; all ranks call it."""
        if self.found < STOPPING:
            self.found = NOTHING
        if self.rank == 0:
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.checkpoints.output_dir / name

    def _files(self) -> set[str]:
        directory = self.checkpoints.output_dir
        try:
            # Listed, not asked for by name: NFS remembers for a while that a file was not there.
            return {path.name for path in directory.iterdir()}
        except OSError as error:
            if not self.warned:
                logger.warning("cannot look for STOP and SAVE in %s: %s", directory, error)
            self.warned = True
            return set()


def remove_stale_requests(output_dir: Path) -> None:
    """Remove STOP and SAVE of before this start, with a warning: they were for an earlier one."""
    for name in (STOP, SAVE):
        path = output_dir / name
        if path.exists():
            path.unlink()
            logger.warning(
                "removed %s: it is older than this start. Touch it again to use it", path
            )
