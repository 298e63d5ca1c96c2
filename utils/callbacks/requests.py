"""What this rank is asked to do: stop, for whatever reason, or save."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from utils.callbacks.deadline import Deadline
from utils.cluster.signals import stop_request

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
