"""Seconds that a process spent in each phase of a run. See callbacks.progress.Phase for phases."""

import time
from typing import Any

SAVING, HUNG = "saving", "hanging"
LONGEST_S = 1e10  # a longer time in a file is a damaged value


class PhaseTimes:
    """The seconds that this process spent in each phase. Another thread may read them at any time.

    now    (current phase, time.monotonic() at its start, seconds of each phase until its start).
           This tuple is only replaced as a whole.
    saved  the seconds of each phase when the last save ended
    """

    def __init__(self, phase: str):
        self.now: tuple[str, float, dict[str, float]] = (phase, time.monotonic(), {})
        self.saved: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        """End the current phase and begin `phase`. Both may be the same phase."""
        spent = self.seconds()
        if self.now[0] == SAVING != phase:
            self.saved = spent
        self.now = (phase, time.monotonic(), spent)

    def take_hang(self, silent_s: float) -> None:
        """Move the last `silent_s` seconds from the current phase to the phase "hanging" (HUNG)."""
        phase, spent = self.now[0], self.seconds()
        silent_s = min(silent_s, spent[phase])
        spent |= {phase: spent[phase] - silent_s, HUNG: silent_s}
        self.now = (phase, time.monotonic(), spent)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase until now."""
        phase, since, spent = self.now
        return spent | {phase: round(spent.get(phase, 0.0) + time.monotonic() - since, 3)}


def valid_numbers(given: Any) -> dict[str, float]:
    """Return {key: float} of the values in a JSON object that are numbers from 0 to LONGEST_S."""
    items = given.items() if isinstance(given, dict) else ()
    return {
        key: float(value)
        for key, value in items
        if type(value) in (int, float) and 0 <= value < LONGEST_S
    }
