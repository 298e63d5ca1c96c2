"""Last words: the note of a rank that ends early, its place in the code, errors of the machine.

The launcher reads the notes, one file per rank, in the directory STOKER_NOTES_DIR. Under
slurm/launch_node.sh this directory is for one node, under slurm/training_job.sh for all nodes of a
job. Without this variable no notes are written.
"""

import dataclasses
import errno
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.config.errors import LostProcessError, OutOfMemoryError, StorageError
from utils.host.machine import global_rank, host_name
from utils.host.redaction import redact, redacted, write_error

_ROOT = Path(__file__).parents[2]
NOTES_DIR = "STOKER_NOTES_DIR"
VERDICT = "verdict.txt"
EXIT_CODE = "exit_code"
RUN_STARTED = "run_started"
_STORAGE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
# Some libraries raise their own types of errors, so a fault of the storage shows only in the text.
# torch and protobuf report only that their writer failed.
_STORAGE_TEXTS = (
    *map(os.strerror, _STORAGE_ERRNOS), "PytorchStreamWriter failed writing", "iostream error",
)  # fmt: skip
_MEMORY_TEXTS = "out of memory", "t allocate memory", "bad_alloc", "ALLOC_FAILED"
# Texts of torch (a data worker), datasets and Python (a process pool) after a process died. They do
# not say what killed the process.
_LOST_PROCESS = re.compile(r"is killed by signal|exited unexpectedly(?! with)|abruptly")
runs_begun: list[Path] = []  # output directories of the runs that this process began as rank 0


@dataclass(frozen=True)
class Note:
    """The end of one rank. `text` is one line for people; `time` is in unix seconds.

    kind: "stopped" (a checkpoint was written), "refused" (the text is the first problem), "failed"
    (the text is the traceback's last line), "hung" (the text is the place in the code) or "killed"
    (the text is the signal; the launcher wrote the note). `beats` and `waiting` are for a hung
    rank: how many signs of life it gave, and whether it is waiting for other ranks.
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
    """Return the directory of the notes; None if nothing reads them."""
    directory = os.environ.get(NOTES_DIR)
    return Path(directory) if directory else None


def leave_note(
    kind: str, exit_code: int, text: str, rank: int | None = None, **details: Any
) -> Note:
    """Write this rank's note, unless it has one. A full disk raises nothing."""
    if rank is None:
        rank = global_rank()
    note = Note(kind, int(exit_code), text, rank, host_name(), time.time(), **details)
    _create(f"rank-{rank}.json", json.dumps(redacted(dataclasses.asdict(note))))
    return note


def read_notes(directory: str | os.PathLike[str]) -> list[Note]:
    """Return all notes in a directory, earliest first."""
    texts = [path.read_text(encoding="utf-8") for path in Path(directory).glob("rank-*.json")]
    return sorted((Note(**json.loads(text)) for text in texts), key=lambda note: note.time)


def leave_verdict(text: str, exit_code: int) -> bool:
    """Write the verdict: the cause of the job's end, and the job's exit code.

    Return False if the job has a verdict already or if the files cannot be written.
    """
    first = _create(VERDICT, redact(text.rstrip()) + "\n")
    return first and _create(EXIT_CODE, f"{int(exit_code)}\n")


def mark_run_started(output_dir: Path) -> None:
    """Leave a mark that the run has begun: the job script counts starts that end before that."""
    runs_begun.append(output_dir)
    _create(RUN_STARTED, f"{output_dir}\n")


def name_of_job(slurm: Mapping[str, Any]) -> str:
    """Return the job's id for Slurm's commands, from the `slurm` entry of provenance.json."""
    if slurm.get("array_job_id"):
        return f"{slurm['array_job_id']}_{slurm['array_task_id']}"
    return str(slurm.get("job_id"))


def verdict_of(slurm: Mapping[str, Any]) -> str | None:
    """Return the verdict that a start of a job left; None if its notes are gone."""
    start = f"job-{name_of_job(slurm)}.{slurm.get('restart_count') or 0}"
    try:
        text = (_ROOT / ".stoker" / start / VERDICT).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.strip() or None


def _create(name: str, text: str) -> bool:
    """Write a file among the notes in one step; return False if it exists or writing fails."""
    directory = notes_directory()
    if directory is None:
        return False
    draft = directory / f".{name}.{host_name()}.{os.getpid()}"
    try:
        draft.write_text(text, encoding="utf-8")
        try:
            os.link(draft, directory / name)  # fails if the file exists: the first one counts
        finally:
            draft.unlink()
    except FileExistsError:
        return False
    except OSError as error:
        write_error(f"{draft} cannot be written ({error.strerror}); it would say: {text}\n")
        return False
    return True


def place(frames: Sequence[traceback.FrameSummary], packages: Sequence[str] = ()) -> str:
    """Return `file:line in function` of the innermost frame in this repository or in `packages`.

    Without such a frame, use the innermost frame, which is the last one of `frames`.
    """
    if not frames:
        return "no Python code"
    for frame in reversed(frames):
        name = frame.filename.removeprefix(f"{_ROOT}/")
        # The virtual environment may be inside the repository.
        installed = name.rpartition("/site-packages/")[2]
        ours = name != frame.filename if installed == name else installed.split("/")[0] in packages
        if ours:
            return f"{installed}:{frame.lineno} in {frame.name}"
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}"


def thread_frames(thread: int) -> list[traceback.FrameSummary]:
    """Return the stack of a thread, the innermost frame last, without reading source files."""
    frame = sys._current_frames().get(thread)
    stack = traceback.walk_stack(frame) if frame else iter(())
    return list(reversed(traceback.StackSummary.extract(stack, lookup_lines=False)))


def waits_for_ranks(frames: Sequence[traceback.FrameSummary]) -> bool:
    """Check whether a stack is in a collective, or in a backward pass, which runs collectives."""
    collectives = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/autograd/")
    return any(name in frame.filename for frame in frames for name in collectives)


def last_line(error: BaseException) -> str:
    """Return the first line of `Type: message`, followed by the place in the code."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    frames = traceback.extract_tb(error.__traceback__)
    return f"{lines[0]} ({place(frames)})" if frames else lines[0]


def storage_error(error: BaseException) -> StorageError | None:
    """Return a StorageError if storage caused the error, else None."""
    if (cause := _cause(error, _storage_fault)) is None:
        return None
    target = getattr(cause, "filename", None)
    where = f", writing {target}" if target else f" ({last_line(error)})"
    return StorageError(
        f"{host_name()}: {_storage_fault(cause)}{where}. Make room (df -h, df -i, your site's "
        "quota command) or have the storage repaired, and start the same command again: it resumes "
        "from the newest checkpoint."
    )


def memory_cause(error: BaseException, killed: bool) -> BaseException | None:
    """Return the error that shows lack of memory: `error` itself or one of its causes; else None.

    `killed` tells whether the kernel killed a process of this job for lack of memory. Then a lost
    helper process counts too. Without that evidence, `lost_process` reports the loss.
    """
    return _cause(error, lambda one: _lacks_memory(one) or (killed and _lost_process(one)))


def memory_owner(cause: BaseException) -> str:
    """Return whose memory ran out: "GPU" or "host"."""
    return "GPU" if any(word in str(cause) for word in ("CUDA", "HIP", "CUBLAS")) else "host"


def memory_error(error: BaseException, killed: bool = False) -> OutOfMemoryError | None:
    """Return an OutOfMemoryError if `error` shows lack of memory, else None.

    This is for errors outside of training. During training, the trainer writes a page with advice.
    """
    cause = memory_cause(error, killed)
    if cause is None:
        return None
    return OutOfMemoryError(f"{host_name()} ({memory_owner(cause)}): {last_line(error)}")


def lost_process(error: BaseException) -> LostProcessError | None:
    """Return a LostProcessError if the end of a data worker caused the error, else None."""
    if (cause := _cause(error, _lost_process)) is None:
        return None
    room = "lack of memory"
    if "Bus error" in str(cause):
        room += "; see `df -h /dev/shm`, through which batches pass (--dataloader_num_workers 0)"
    return LostProcessError(
        f"{host_name()}: a data worker was lost: {last_line(cause)}. The kernel reports no {room}. "
        "Start the same command again: it resumes from the newest checkpoint."
    )


def _cause(error: BaseException | None, fits: Callable[..., object]) -> BaseException | None:
    """Return the first error that `fits` in the chain of causes; None without one."""
    while error is not None and not fits(error):
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error


def _lacks_memory(error: BaseException) -> bool:
    said = _of_a_library(error) and any(text in str(error) for text in _MEMORY_TEXTS)
    return isinstance(error, MemoryError) or said


def _lost_process(error: BaseException) -> bool:
    if isinstance(error, ConnectionError | EOFError | FileNotFoundError):
        # The kernel closes a killed process's sockets shortly before torch notices its end.
        frames = traceback.extract_tb(error.__traceback__)
        return bool(frames) and frames[-1].filename.endswith("/multiprocessing/connection.py")
    return isinstance(error, RuntimeError) and bool(_LOST_PROCESS.search(str(error)))


def _storage_fault(error: BaseException) -> str | None:
    if isinstance(error, OSError) and error.errno in _STORAGE_ERRNOS:
        return os.strerror(error.errno)
    said = _STORAGE_TEXTS if _of_a_library(error) else ()
    return next((text for text in said if text in str(error)), None)


def _of_a_library(error: BaseException) -> bool:
    """Check by its type whether an error may be a library's report of a fault of the machine.

    The texts of other errors are not searched, because they may quote a user's text.
    """
    untyped = type(error) is Exception or isinstance(error, OSError | RuntimeError)
    return untyped or "safetensors" in type(error).__module__.lower()
