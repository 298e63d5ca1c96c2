"""What a process leaves behind when it ends early, for the launcher to read: one file a rank.

The directory is named by STOKER_NOTES_DIR; slurm/launch_node.sh sets it, shared by all nodes of a
job where slurm/training_job.sh starts it. Without it there is nobody to read a note.
"""

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from utils.cluster.host import host_name

NOTES_DIR = "STOKER_NOTES_DIR"


@dataclass(frozen=True)
class Note:
    """How one rank ended. `text` is one line for people; `time` is seconds since the epoch.

    `kind` is "stopped" (a checkpoint was written), "refused" (the text is the first problem),
    "failed" (the text is the traceback's last line), "hung" (where it stood) or, written by the
    launcher for a rank that could not, "killed" (by which signal).
    """

    kind: str
    exit_code: int
    text: str
    rank: int
    host: str
    time: float


def leave_note(kind: str, exit_code: int, text: str, rank: int | None = None) -> None:
    """Write this rank's note; the first one of a rank stays. Does nothing without a directory."""
    directory = os.environ.get(NOTES_DIR)
    if not directory:
        return
    if rank is None:
        rank = int(os.environ.get("RANK", "0"))
    note = Note(kind, int(exit_code), text, rank, host_name(), time.time())
    path = Path(directory) / f"rank-{rank}.json"
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(dataclasses.asdict(note)), encoding="utf-8")
    try:
        os.link(draft, path)  # fails where a note is: who wrote first knows best
    except FileExistsError:
        pass
    finally:
        draft.unlink()


def read_notes(directory: str | os.PathLike[str]) -> list[Note]:
    """Return all notes in a directory, the earliest first."""
    notes = [
        Note(**json.loads(path.read_text(encoding="utf-8")))
        for path in Path(directory).glob("rank-*.json")
    ]
    return sorted(notes, key=lambda note: note.time)
