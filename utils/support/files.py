"""Files: the atomic write, and the disk cache under $XDG_CACHE_HOME/stoker.

Whoever is killed while writing a file leaves the old one, or none. A cache entry goes by all that
its content follows from, so it is never out of date, only unused.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from utils.support.host import host_name

CACHE_FORMAT = 1

Content = TypeVar("Content")

logger = logging.getLogger(__name__)


def replace_text(path: Path, text: str) -> None:
    """Write `text` to `path` in one step, flushed before it is named; OSError leaves no draft."""
    # Several processes, on several hosts, may write the same file at once.
    draft = path.with_name(f".{path.name}.{host_name()}.{os.getpid()}.tmp")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def cache_root() -> Path:
    """Return the folder of the disk cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "stoker"


def cache_path(kind: str, facts: Any) -> Path:
    """Return the cache file of the content that follows from `facts` (JSON values)."""
    name = hashlib.blake2b(json.dumps([CACHE_FORMAT, facts]).encode(), digest_size=16).hexdigest()
    return cache_root() / kind / f"{name}.json"


def file_states(files: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Return path, size and modification time of files: they change when a file is written to."""
    stats = [(file.resolve(), file.stat()) for file in files]
    return [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def read_cache(path: Path, read: Callable[[Any], Content]) -> Content | None:
    """Return what `read` makes of a cache file's JSON; None, with a warning if it is damaged."""
    try:
        return read(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s cannot be used (%r): it is made again.", path, error)
        return None


def write_cache(path: Path, content: Any) -> None:
    """Write JSON values to the cache; storage that takes none is a warning."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        logger.warning(
            "%s cannot be written (%s), so every start works it out again: set XDG_CACHE_HOME to a "
            "writable folder.", path, error,
        )  # fmt: skip
