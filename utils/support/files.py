"""The atomic write: whoever is killed while writing a file leaves the old one, or none."""

import contextlib
import hashlib
import json
import logging
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar


def replace_text(path: Path, text: str, *, sync: bool = True) -> None:
    """Write `text` to `path` in one step; with `sync` it is on stable storage before it has a name.

    Raises OSError, with the draft removed.
    """
    # Several processes, on several hosts, may write the same file at once.
    draft = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


# What took long to find out, kept for the next start: JSON files under $XDG_CACHE_HOME/stoker.

FORMAT = 1

Content = TypeVar("Content")

logger = logging.getLogger(__name__)


def file_states(files: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Return path, size and modification time of files: with others, they were written to."""
    stats = [(file.resolve(), file.stat()) for file in files]
    return [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def kept_path(kind: str, facts: Any) -> Path:
    """Return where the content that follows from `facts` (JSON values) is kept."""
    name = hashlib.blake2b(json.dumps([FORMAT, facts]).encode(), digest_size=16).hexdigest()
    return cache_root() / kind / f"{name}.json"


def cache_root() -> Path:
    """Return the folder for all that is kept; its ~ is left to whoever reads or writes there."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "stoker"


def read_kept(path: Path, read: Callable[[Any], Content], otherwise: str) -> Content | None:
    """Return what `read` makes of a kept file's JSON; None, said aloud, where it cannot be read."""
    try:
        return read(json.loads(path.expanduser().read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s: cannot be used (%r); %s.", path, error, otherwise)
        return None


def keep(path: Path, content: Any, otherwise: str) -> None:
    """Keep JSON values for the next start; what prevents it is said, and no error."""
    try:
        path = path.expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(content, indent=1) + "\n")
    except (OSError, RuntimeError) as error:
        logger.warning(
            "%s. It could not be written down (%s): set XDG_CACHE_HOME to a writable folder.",
            otherwise,
            error,
        )
