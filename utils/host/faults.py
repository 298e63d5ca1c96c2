"""Causes of errors (storage, memory, a lost data worker), and the line of code that failed."""

import errno
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from utils.config.errors import LostProcessError, OutOfMemoryError, StorageError
from utils.host.machine import host_name

_ROOT = Path(__file__).parents[2]
_STORAGE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
# Texts of storage faults in library errors without an errno. torch and protobuf only say that their
# writer failed.
_STORAGE_TEXTS = (
    *map(os.strerror, _STORAGE_ERRNOS), "PytorchStreamWriter failed writing", "iostream error",
)  # fmt: skip
_MEMORY_TEXTS = "out of memory", "t allocate memory", "bad_alloc", "ALLOC_FAILED"
# Error texts of torch (data workers), datasets and Python (process pools) after a process died.
# These texts do not tell what killed the process.
_LOST_PROCESS = re.compile(r"is killed by signal|exited unexpectedly(?! with)|abruptly")


def innermost_frame(frames: Sequence[traceback.FrameSummary], packages: Sequence[str] = ()) -> str:
    """Return `file:line in function` of the innermost frame in this repository or in `packages`.

    frames: stack frames, innermost last. packages: names of installed packages. If the stack has no
    such frame, return its innermost frame.
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
    """Return the stack frames of a thread, innermost last and without source lines.

    thread: the thread's identifier (threading.get_ident). Return [] if the thread has ended.
    """
    frame = sys._current_frames().get(thread)
    stack = traceback.walk_stack(frame) if frame else iter(())
    return list(reversed(traceback.StackSummary.extract(stack, lookup_lines=False)))


def waits_for_ranks(frames: Sequence[traceback.FrameSummary]) -> bool:
    """Return whether a stack is in a collective, or in a backward pass, which calls collectives."""
    collectives = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/autograd/")
    return any(name in frame.filename for frame in frames for name in collectives)


def error_line(error: BaseException) -> str:
    """Return `Type: message (file:line in function)`, with only the first line of the message."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    frames = traceback.extract_tb(error.__traceback__)
    return f"{lines[0]} ({innermost_frame(frames)})" if frames else lines[0]


def storage_error(error: BaseException) -> StorageError | None:
    """Return a StorageError with advice if a storage fault caused `error`, else None.

    Storage faults are a full disk, an exceeded quota, a read-only file system and an I/O error.
    """
    if (cause := _first_cause(error, _storage_fault)) is None:
        return None
    target = getattr(cause, "filename", None)
    where = f", writing {target}" if target else f" ({error_line(error)})"
    return StorageError(
        f"{host_name()}: {_storage_fault(cause)}{where}. Make room (df -h, df -i, your site's "
        "quota command) or have the storage repaired, and start the same command again: it resumes "
        "from the newest checkpoint."
    )


def memory_cause(error: BaseException, killed: bool) -> BaseException | None:
    """Search `error` and its causes for a lack of memory; return the exception found, or None.

    killed: whether the kernel killed a process of this job for lack of memory. If True, the loss of
    a data worker counts as a lack of memory.
    """

    def lacks_memory(one: BaseException) -> bool:
        has_text = _may_be_from_library(one) and any(text in str(one) for text in _MEMORY_TEXTS)
        return isinstance(one, MemoryError) or has_text or (killed and _shows_lost_process(one))

    return _first_cause(error, lacks_memory)


def memory_owner(cause: BaseException) -> str:
    """Return which memory ran out: "GPU" or "host". cause: the exception from `memory_cause`."""
    return "GPU" if any(word in str(cause) for word in ("CUDA", "HIP", "CUBLAS")) else "host"


def memory_error(error: BaseException, killed: bool = False) -> OutOfMemoryError | None:
    """Return an OutOfMemoryError if a lack of memory caused `error`, else None.

    killed: see `memory_cause`. Call this for errors outside of training. During training
    callbacks/memory.py handles such errors.
    """
    cause = memory_cause(error, killed)
    if cause is None:
        return None
    return OutOfMemoryError(f"{host_name()} ({memory_owner(cause)}): {error_line(error)}")


def lost_process(error: BaseException) -> LostProcessError | None:
    """Return a LostProcessError with advice if a data worker died and caused `error`, else None."""
    if (cause := _first_cause(error, _shows_lost_process)) is None:
        return None
    room = "lack of memory"
    if "Bus error" in str(cause):
        room += "; see `df -h /dev/shm`, through which batches pass (--dataloader_num_workers 0)"
    return LostProcessError(
        f"{host_name()}: a data worker was lost: {error_line(cause)}. The kernel reports no {room}."
        " Start the same command again: it resumes from the newest checkpoint."
    )


def _first_cause(error: BaseException | None, fits: Callable[..., object]) -> BaseException | None:
    """Return the first exception among `error` and its causes for which `fits` is true, or None."""
    while error is not None and not fits(error):
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error


def _shows_lost_process(error: BaseException) -> bool:
    if isinstance(error, ConnectionError | EOFError | FileNotFoundError):
        # The kernel closes a killed process's sockets before torch notices that the process died.
        frames = traceback.extract_tb(error.__traceback__)
        return bool(frames) and frames[-1].filename.endswith("/multiprocessing/connection.py")
    return isinstance(error, RuntimeError) and bool(_LOST_PROCESS.search(str(error)))


def _storage_fault(error: BaseException) -> str | None:
    if isinstance(error, OSError) and error.errno in _STORAGE_ERRNOS:
        return os.strerror(error.errno)
    texts = _STORAGE_TEXTS if _may_be_from_library(error) else ()
    return next((text for text in texts if text in str(error)), None)


def _may_be_from_library(error: BaseException) -> bool:
    # The text of an error is evidence of its cause only if a library may have raised the error.
    untyped = type(error) is Exception or isinstance(error, OSError | RuntimeError)
    return untyped or "safetensors" in type(error).__module__.lower()
