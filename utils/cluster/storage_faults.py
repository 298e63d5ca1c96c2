"""Recognizes, in the words of any library, that storage took no more, and says where."""

import errno
import shutil
import traceback
from collections.abc import Iterator
from pathlib import Path

from utils.cluster.host import host_name
from utils.cluster.traces import place
from utils.config.errors import StorageError

_ERRNOS = {
    errno.ENOSPC: "no space (or no inode) is left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EIO: "the storage failed (input/output error)",
}
# safetensors, pyarrow and torch raise types of their own, tokenizers none, so that the text alone
# says what happened; torch says only that its writer failed (caffe2/serialize/inline_container.cc).
_TEXTS = {
    "No space left on device": _ERRNOS[errno.ENOSPC],
    "Disk quota exceeded": _ERRNOS[errno.EDQUOT],
    "Read-only file system": _ERRNOS[errno.EROFS],
    "Input/output error": _ERRNOS[errno.EIO],
    "PytorchStreamWriter failed writing": "a file could not be written to its end",
    "iostream error": "a file could not be written to its end",
}


def storage_error(error: BaseException) -> StorageError | None:
    """Return `error` as a StorageError when storage is its cause; None when it is not.

    Looks through what it was raised from: torch closes a half-written archive with another error.
    """
    for link in _chain(error):
        fault = _fault(link)
        if fault is None:
            continue
        target = _target(link, error)
        where = place(traceback.extract_tb(error.__traceback__))
        return StorageError(
            f"{host_name()}: {fault}{_described(target)} (at {where}). {_remedy(fault)} and start "
            "the same command again: it goes on from the newest checkpoint."
        )
    return None


def _remedy(fault: str) -> str:
    if fault == _ERRNOS[errno.EIO]:
        return "See whether the storage is sound (the administrators' logs know),"
    return "Make room (df -h, df -i, your site's quota command), or lower save_total_limit,"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _fault(error: BaseException) -> str | None:
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return _ERRNOS[error.errno]
    untyped = type(error) is Exception or isinstance(error, OSError | RuntimeError)
    if untyped or "safetensors" in type(error).__module__.lower():
        return next((fault for text, fault in _TEXTS.items() if text in str(error)), None)
    return None


def _target(fault: BaseException, error: BaseException) -> Path | None:
    """Return what was written: the fault's file, else the directory a frame was writing into."""
    filename = getattr(fault, "filename", None)
    if isinstance(filename, str):
        return Path(filename)
    found = None
    # From the outermost frame of all on: the trace of a fault begins where it was caught.
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for name in ("output_dir", "save_directory"):
            value = frame.f_locals.get(name)
            if isinstance(value, str | Path):
                found = Path(value)
    return found


def _described(target: Path | None) -> str:
    if target is None:
        return ""
    folder = next((path for path in (target, *target.absolute().parents) if path.is_dir()), None)
    if folder is None:
        return f", writing {target}"
    try:
        free = shutil.disk_usage(folder).free / 2**30
    except OSError:
        return f", writing {target}"
    return f", writing {target} ({free:.2f} GiB free)"
