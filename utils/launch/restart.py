"""Restarts of the ranks from the newest checkpoint, inside the same job, after a rank was lost.

In a Slurm job, slurm/training_job.sh starts a new Slurm step. Slurm has then ended all processes of
the old step on all nodes, and the new ranks meet at another port. Without a job script, the
launcher starts its ranks again. The job script and the launcher both read the file of
`note_restarts`. Both give up if the ranks began at the same checkpoint twice in a row. Then the job
script requeues the job, or the launcher ends.
"""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from utils.config.errors import ExitCode
from utils.host.run_lock import RESTART_IN_JOB
from utils.launch.signals import STAGE
from utils.launch.verdict import NOTES_DIR, Verdict, leave_file, read_notes

logger = logging.getLogger(__name__)

LOST_AT = "STOKER_LOST_AT"  # unix seconds: when a rank first reported the loss before this restart
_NOTE_NAME = "restarts"


def note_restarts(most: int, step: int) -> None:
    """Write the file that allows restarts of the ranks inside the job.

    most: the highest number of restarts (setting `restarts_in_job`). step: the step of the
    checkpoint from which the ranks resumed.
    """
    leave_file(_NOTE_NAME, f"{most} {step}\n")


def recovery_s() -> float | None:
    """Return the seconds from the loss of a rank until now; None if the ranks were not restarted.

    Call this after the first training step. A second call returns None.
    """
    lost_at = os.environ.pop(LOST_AT, None)
    return None if lost_at is None else time.time() - float(lost_at)


@dataclass
class Restarts:
    """The launcher's restarts of the ranks of this node.

    directory    the node's private directory
    by_launcher  whether the launcher restarts ranks: there is one node, and no job script
    number       number of restarts so far
    began_at     the checkpoint step from which the ranks had started before the last restart
    """

    directory: Path
    by_launcher: bool
    number: int = 0
    began_at: int | None = None

    def run(self, run_ranks: Callable[[], Verdict], is_stopping: Callable[[], bool]) -> Verdict:
        """Run the ranks, and run them again if one is lost; return why the last ranks ended.

        run_ranks: runs all ranks once and returns why they ended. is_stopping: returns True after a
        request to stop. Then the ranks are not restarted.
        """
        verdict = run_ranks()
        while not is_stopping() and self._prepare_restart(verdict):
            verdict = run_ranks()
        return verdict

    def _prepare_restart(self, verdict: Verdict) -> bool:
        """Return whether the ranks should run again after they ended with `verdict`.

        If so, also delete the note files of the old ranks and set environment variables for the new
        ranks.
        """
        notes = Path(os.environ[NOTES_DIR])
        rank_lost = verdict.exit_code == ExitCode.LOST_RANK and (notes / _NOTE_NAME).exists()
        if not (self.by_launcher and rank_lost):
            return False
        most, step = map(int, (notes / _NOTE_NAME).read_text(encoding="utf-8").split())
        if self.number >= most or self.began_at == step:
            return False
        self.number, self.began_at = self.number + 1, step
        lost_at = min((note.time for note in read_notes()), default=time.time())
        os.environ |= {RESTART_IN_JOB: str(self.number), LOST_AT: str(lost_at)}
        for file in (self.directory / STAGE, *notes.iterdir()):
            file.unlink(missing_ok=True)
        logger.warning(
            "%s; restart %d of at most %d inside the job", verdict.text, self.number, most
        )
        return True
