"""Knows when to stop so that a checkpoint still fits before the job's time limit."""

import datetime
from collections import deque
from collections.abc import Callable

from utils.callbacks.lines import duration, number

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
