"""Lets all ranks act on one number at the same step, without waiting for each other."""

import datetime
import logging
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from utils.callbacks.journal_lines import duration, number
from utils.launch.signals import stop_request
from utils.support.collectives import cpu_group


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


# Knows when to stop so that a checkpoint still fits before the job's time limit.

# Of these many events the longest counts: a slow one long ago says little about the next.
RECENT_EVENTS = 100
LONGEST_MARGIN_S = 30.0
# Parallel file systems write faster; where the guess is far off, the first save puts it right.
GUESSED_BYTES_PER_S = 200e6
SHORTEST_GUESS_S = 5.0


class Deadline:
    """The end of the time limit, set against how long steps and saves were found to take.

    Two steps are reckoned with: the one in which the ranks agree, and the one before it, in which
    rank 0 did not look. `total_s` is left at the time `now`; all times are of one clock, of which
    only differences count. A save that is being written in the background (`writing`) has to end
    before the last one.
    """

    def __init__(self, total_s: float, now: float, checkpoint_bytes: int = 0):
        self.total_s = max(total_s, 0.0)
        self.ends_at = now + self.total_s
        self.margin_s = min(LONGEST_MARGIN_S, self.total_s / 10)
        guess_s = max(SHORTEST_GUESS_S, checkpoint_bytes / GUESSED_BYTES_PER_S)
        # A guess must not eat a short job up: its first save is early, and measured.
        self.guessed_save_s = min(guess_s, self.total_s / 10)
        self.longest_save_s: float | None = None
        self.steps_s: deque[float] = deque(maxlen=RECENT_EVENTS)
        self.writing: Callable[[], bool] = lambda: False

    def took_step(self, seconds: float) -> None:
        """Count a step, an evaluation batch, or what else lies between two looks."""
        self.steps_s.append(seconds)

    def took_save(self, seconds: float) -> None:
        """Count a save, from the step's end to the commit."""
        self.longest_save_s = max(seconds, self.longest_save_s or 0.0)

    @property
    def needed_s(self) -> float:
        """Seconds that stopping may take."""
        save_s = self.guessed_save_s if self.longest_save_s is None else self.longest_save_s
        saves = 1.5 + self.writing()
        return 2 * max(self.steps_s, default=0.0) + saves * save_s + self.margin_s

    def reason(self, now: float) -> str | None:
        """Say why it is time to stop; None while it is not."""
        left_s = self.ends_at - now
        if left_s > self.needed_s:
            return None
        step = number(max(self.steps_s, default=0.0), ".2g")
        if self.longest_save_s is None:
            save = f"a save is guessed to take {number(self.guessed_save_s, '.2g')} s"
        else:
            save = f"a save took {number(self.longest_save_s, '.2g')} s"
        return f"the time limit ends in {left_s:.0f} s: a step takes {step} s, {save}"

    def plan(self, end_time: float) -> str:
        """Say when the job ends (seconds since the epoch) and that the run will see to it."""
        ends = datetime.datetime.fromtimestamp(end_time).strftime("%H:%M")
        return (
            f"time limit: ends at {ends}, in {duration(self.total_s)}; the run stops by itself in "
            f"time for a save (guessed to take {number(self.guessed_save_s, '.2g')} s until one is "
            "measured)"
        )


# What this rank is asked to do: stop, for whatever reason, or save.

logger = logging.getLogger(__name__)

STOP, SAVE = "STOP", "SAVE"
LOOK_INTERVAL_S = 1.0

# The most pressing is the largest. STOPPING + rank says who was asked.
NOTHING, SAVING, STOPPING = range(3)
FAILED = 2**30


class Requests:
    """Looks for requests, at most once a second; one to stop is for good.

    Each rank looks for signals, and whether its part of a checkpoint written in the background
    `failed`; the files STOP and SAVE in the run directory, the time limit and the age of the last
    checkpoint are rank 0's to see. `reason` says in words what asks for the stop, `save_reason`
    what asks for the save.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        rank: int,
        clock: Callable[[], float],
        deadline: Deadline | None = None,
        signalled: Callable[[], str | None] = stop_request,
        failed: Callable[[], bool] = lambda: False,
    ):
        self.output_dir = Path(output_dir)
        self.rank, self.clock = rank, clock
        self.deadline, self.signalled, self.failed = deadline, signalled, failed
        self.found = NOTHING
        self.reason: str | None = None
        self.save_reason = ""
        self.save_every_s = 0.0  # 0: whatever the age of the last checkpoint
        self.saved_at = clock()
        self.looked_at = float("-inf")
        self.blind = False

    def look(self) -> int:
        """Return NOTHING, SAVING, STOPPING + this rank, or FAILED."""
        if self.failed():
            return FAILED
        now = self.clock()
        if self.found >= STOPPING or now - self.looked_at < LOOK_INTERVAL_S:
            return self.found
        self.looked_at, self.found = now, NOTHING
        files = self._files() if self.rank == 0 else set()
        self.reason = self.signalled()
        if self.reason is None and STOP in files:
            self.reason = str(self.output_dir / STOP)
        if self.reason is None and self.deadline is not None:
            self.reason = self.deadline.reason(now)
        if self.reason is not None:
            self.found = STOPPING + self.rank
        elif SAVE in files:
            self.found, self.save_reason = SAVING, str(self.output_dir / SAVE)
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
            (self.output_dir / name).unlink(missing_ok=True)

    def _files(self) -> set[str]:
        try:
            # Listed, not asked for by name: NFS remembers for a while that a file was not there.
            names = {path.name for path in self.output_dir.iterdir()}
        except OSError as error:
            if not self.blind:
                logger.warning("no STOP or SAVE can be seen in %s: %s", self.output_dir, error)
            self.blind = True
            return set()
        self.blind = False
        return names


def remove_stale_requests(output_dir: Path) -> None:
    """Remove STOP and SAVE that are older than this start, aloud: they were meant for another."""
    for name in (STOP, SAVE):
        path = output_dir / name
        try:
            path.unlink()
        except FileNotFoundError:
            continue
        logger.warning("%s is older than this start: removed; touch it again if you mean it", path)
