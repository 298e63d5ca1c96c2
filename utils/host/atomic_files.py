"""Atomic writes of files, checked file names, locked directories, the disk cache.

The disk cache is in $XDG_CACHE_HOME/stoker (default: ~/.cache/stoker). The name of a cache file is
a digest of everything that determines the content, so a cache file is never out of date.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from utils.config.errors import ConfigurationError
from utils.host.machine import host_name
from utils.host.redaction import redact

CACHE_FORMAT = 1
LONGEST_NAME = 1000  # characters of a path inside a folder; Linux allows 4096 bytes for a full path

Content = TypeVar("Content")

logger = logging.getLogger(__name__)


def replace_text(path: Path, text: str, *, exact: bool = False) -> None:
    """Write a text to a file atomically: write and flush a draft, then rename it. Raises OSError.

    Secrets in the text are masked, unless `exact` is True. Set `exact` if a digest of the text is
    stored elsewhere.
    """
    # Processes on several hosts may write the same file at the same time.
    draft = path.with_name(f".{path.name}.{host_name()}.{os.getpid()}.tmp")
    try:
        draft.unlink(missing_ok=True)
        with draft.open("x", encoding="utf-8") as file:  # x: fails if another user put a link here
            file.write(text if exact else redact(text))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def from_here(path: str | Path) -> Path:
    """Return a path for log lines: relative if it is in the working directory, else unchanged."""
    absolute = Path(path).absolute()
    return absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else Path(path)


def paths_inside(
    folder: Path, names: Iterable[Any], listed_in: str | Path, *, links: bool = False
) -> dict[str, Path]:
    """Check file names, such as those in an index; return {name: path in `folder`}.

    The named files may be missing. listed_in: the origin of the names, for error messages. links:
    True allows symbolic links out of the folder, as in the Hub's cache. Raises ConfigurationError
    for a name that leads out of the folder or to something other than a regular file. Two names
    that some file systems treat as the same are also an error.
    """
    paths: dict[str, Path] = {}
    plain: dict[str, str] = {}
    for name in names:
        if not _is_inside(folder, name, links=links):
            raise ConfigurationError(
                f"{listed_in} names {str(name)[:200]!r}, which is no path inside {folder} to a "
                f"regular file{'' if links else ' without links'}: nothing was read or written "
                "there. Find out who made the file, and get it again from its source."
            )
        other = plain.setdefault(unicodedata.normalize("NFKC", name).casefold(), name)
        if other != name:
            raise ConfigurationError(
                f"{listed_in} names {name[:200]!r} and {other[:200]!r}, which some file systems "
                "treat as the same: nothing was read or written there. Get the file again from "
                "its source."
            )
        paths[name] = folder / name
    return paths


def _is_inside(folder: Path, name: Any, *, links: bool) -> bool:
    if not isinstance(name, str) or len(name) >= LONGEST_NAME or not name.isprintable():
        return False
    parts = name.split("/")
    if {"", ".", ".."} & {*parts} or "\\" in name:
        return False
    for count in range(1, len(parts) + 1):
        path = folder.joinpath(*parts[:count])
        try:
            mode = (path.stat() if links else path.lstat()).st_mode
        except FileNotFoundError:
            return True
        except OSError:  # the name is too long, or a folder of the path is a file
            return False
        if not (stat.S_ISREG(mode) if count == len(parts) else stat.S_ISDIR(mode)):
            return False
    return True


def locked_directory(base: Path, prefix: str) -> tuple[Path, int]:
    """Make a private directory in `base` and lock it; return (path, file descriptor of the lock).

    prefix: the beginning of the directory's name. Closing the descriptor unlocks the directory. The
    kernel closes it when the process ends. Raises OSError.
    """
    while True:
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        # If another process removes the directory before it is locked, make another directory.
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # without locks, `remove_abandoned` does nothing
                fcntl.flock(lock, fcntl.LOCK_EX)
            if directory.exists():
                return directory, lock
            os.close(lock)


def remove_abandoned(base: Path, prefix: str) -> list[Path]:
    """Delete directories of `locked_directory` whose process has ended; return their paths.

    Only this user's directories in `base` with names that begin with `prefix` are deleted.
    """
    removed = []
    for directory in sorted(base.glob(f"{prefix}*")):
        with contextlib.suppress(OSError):  # a link, locked by a living process, or already removed
            if directory.lstat().st_uid != os.getuid():
                continue
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
                if directory.exists():
                    logger.warning("%s, of an ended process, cannot be removed", directory)
                else:
                    removed.append(directory)
            finally:
                os.close(lock)
    return removed


def cache_root() -> Path:
    """Return the folder of the disk cache (default: ~/.cache/stoker)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "stoker"


def cache_path(kind: str, facts: Any) -> Path:
    """Return the path of a file in the disk cache.

    kind: the folder in the cache. facts: JSON values that determine the content of the file. Their
    digest is the file's name.
    """
    name = hashlib.blake2b(json.dumps([CACHE_FORMAT, facts]).encode(), digest_size=16).hexdigest()
    return cache_root() / kind / f"{name}.json"


def file_states(files: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Return (resolved path, size in bytes, modification time in ns) of each file."""
    stats = [(file.resolve(), file.stat()) for file in files]
    return [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def read_cache(path: Path, read: Callable[[Any], Content]) -> Content | None:
    """Pass a cache file's JSON to `read` and return its result; None without a valid file."""
    try:
        return read(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s cannot be used (%r): it is made again.", path, error)
        return None


def write_cache(path: Path, content: Any) -> None:
    """Write JSON values to a cache file; only log a warning if writing fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        logger.warning(
            "%s cannot be written (%s), so every start works it out again: set XDG_CACHE_HOME to a "
            "writable folder.", path, error,
        )  # fmt: skip
