"""How long the rest of a run will take, by the pace of its present start."""

import time
from collections.abc import Callable


class TimeLeft:
    """Knows the pace of the steps of one start, evaluations and saves between them included.

    What comes before the first step (an evaluation, say) happens once and counts for no step; as
    soon as there is a second step the first one, which compiles and allocates, counts no more.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.since: tuple[int, float] | None = None  # steps done, and when
        self.first_end: tuple[int, float] | None = None

    def begin_step(self, steps_done: int) -> None:
        """Note when the first step begins."""
        if self.since is None:
            self.since = (steps_done, self.clock())

    def end_step(self, steps_done: int) -> None:
        """Note the first step's end once a second one has ended."""
        if self.first_end is None:
            self.first_end = (steps_done, self.clock())
        else:
            self.since = self.first_end

    def seconds(self, steps_done: int, steps: int) -> float | None:
        """Return the seconds until all steps are done; None before the first one is."""
        if self.since is None or steps_done <= self.since[0]:
            return None
        pace_s = (self.clock() - self.since[1]) / (steps_done - self.since[0])
        return pace_s * max(steps - steps_done, 0)
