"""Recognizes, in the words of any library, that storage took no more, and says where."""

import errno
import shutil
import traceback
from pathlib import Path

from utils.cluster.host import host_name
from utils.cluster.traces import place
from utils.config.errors import StorageError

_NO_SPACE = "no space (or no inode) is left on the device"
_QUOTA = "the disk quota is used up"
_READ_ONLY = "the file system is read-only"
_BROKEN = "the storage failed (input/output error)"
_CUT_OFF = "a file could not be written to its end"
_ERRNOS = {
    errno.ENOSPC: _NO_SPACE, errno.EDQUOT: _QUOTA, errno.EROFS: _READ_ONLY, errno.EIO: _BROKEN,
}  # fmt: skip
# safetensors, pyarrow and torch raise types of their own, tokenizers none, so that the text alone
# says what happened; torch says only that its writer failed (caffe2/serialize/inline_container.cc).
_TEXTS = {
    "No space left on device": _NO_SPACE,
    "Disk quota exceeded": _QUOTA,
    "Read-only file system": _READ_ONLY,
    "Input/output error": _BROKEN,
    "PytorchStreamWriter failed writing": _CUT_OFF,
    "iostream error": _CUT_OFF,
}


def storage_error(error: BaseException) -> StorageError | None:
    """Return `error` as a StorageError when storage is its cause; None when it is not.

    Looks through what it was raised from: torch closes a half-written archive with another error.
    """
    link: BaseException | None = error
    while link is not None and (fault := _fault(link)) is None:
        link = link.__cause__ or link.__context__
    if link is None or fault is None:
        return None
    where = place(traceback.extract_tb(error.__traceback__))
    remedy = "Make room (df -h, df -i, your site's quota command), or lower save_total_limit,"
    if fault == _BROKEN:
        remedy = "See whether the storage is sound (the administrators' logs know),"
    return StorageError(
        f"{host_name()}: {fault}{_target(link, error)} (at {where}). {remedy} and start the same "
        "command again: it resumes from the newest checkpoint."
    )


def _fault(error: BaseException) -> str | None:
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return _ERRNOS[error.errno]
    untyped = type(error) is Exception or isinstance(error, OSError | RuntimeError)
    if untyped or "safetensors" in type(error).__module__.lower():
        return next((fault for text, fault in _TEXTS.items() if text in str(error)), None)
    return None


def _target(fault: BaseException, error: BaseException) -> str:
    """Name what was written, with its free space: a file, or the directory a frame wrote into."""
    target = getattr(fault, "filename", None)
    if not isinstance(target, str):
        # From the outermost frame of all on: the trace of a fault begins where it was caught.
        frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
        folders = [
            names[name] for names in frames for name in ("output_dir", "save_directory")
            if isinstance(names.get(name), str | Path)
        ]  # fmt: skip
        if not folders:
            return ""
        target = folders[-1]
    path = Path(target).absolute()
    folder = next((folder for folder in (path, *path.parents) if folder.is_dir()), path)
    try:
        return f", writing {target} ({shutil.disk_usage(folder).free / 2**30:.2f} GiB free)"
    except OSError:
        return f", writing {target}"
