"""What each rank leaves behind when it ends early, for the launcher to read: one file a rank.

STOKER_NOTES_DIR names the directory: of one node under slurm/launch_node.sh, of all nodes of a job
under slurm/training_job.sh. Without it there is nobody to read a note.
"""

import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.cluster.host import host_name

NOTES_DIR = "STOKER_NOTES_DIR"
VERDICT = "verdict.txt"
EXIT_CODE = "exit_code"
RUN_STARTED = "run_started"


@dataclass(frozen=True)
class Note:
    """How one rank ended. `text` is one line for people; `time` is seconds since the epoch.

    `kind` is "stopped" (a checkpoint was written), "refused" (the text is the first problem),
    "failed" (the text is the traceback's last line), "hung" (where it stood, after how many
    `beats`, and whether it was `waiting` for other ranks there) or, written by the launcher for a
    rank that could not, "killed" (by which signal).
    """

    kind: str
    exit_code: int
    text: str
    rank: int
    host: str
    time: float
    beats: int | None = None
    waiting: bool = False


def notes_directory() -> Path | None:
    """Return where notes go; None where nobody reads them."""
    directory = os.environ.get(NOTES_DIR)
    return Path(directory) if directory else None


def leave_note(
    kind: str, exit_code: int, text: str, rank: int | None = None, **details: Any
) -> None:
    """Write this rank's note, with further fields of a Note; the first one of a rank stays.

    Does nothing without a directory, and never raises for storage that takes no note: what made
    the process end matters more.
    """
    directory = notes_directory()
    if directory is None:
        return
    if rank is None:
        rank = int(os.environ.get("RANK", "0"))
    note = Note(kind, int(exit_code), text, rank, host_name(), time.time(), **details)
    _create(directory / f"rank-{rank}.json", json.dumps(dataclasses.asdict(note)))


def read_notes(directory: str | os.PathLike[str]) -> list[Note]:
    """Return all notes in a directory, the earliest first."""
    texts = [path.read_text(encoding="utf-8") for path in Path(directory).glob("rank-*.json")]
    return sorted((Note(**json.loads(text)) for text in texts), key=lambda note: note.time)


def leave_verdict(text: str, exit_code: int) -> bool:
    """Write why the whole job ends and its exit code; return whether this was the first verdict.

    Only the first one of a job counts. False, too, without a directory.
    """
    directory = notes_directory()
    if directory is None or not _create(directory / VERDICT, text.rstrip() + "\n"):
        return False
    return _create(directory / EXIT_CODE, f"{int(exit_code)}\n")


def mark_run_started() -> None:
    """Say that this start got as far as the run itself, which counts starts without progress.

    The job script counts those that did not (slurm/training_job.sh).
    """
    directory = notes_directory()
    if directory is not None:
        _create(directory / RUN_STARTED, "")


def _create(path: Path, text: str) -> bool:
    """Write a file that is whole as soon as it is there; False where there is one already."""
    draft = path.with_name(f".{path.name}.{host_name()}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        try:
            os.link(draft, path)  # fails where a file is: who wrote first knows best
        finally:
            draft.unlink()
    except FileExistsError:
        return False
    except OSError as error:
        sys.stderr.write(f"{path} cannot be written ({error.strerror}); it would say: {text}\n")
        sys.stderr.flush()
        return False
    return True
