"""The atomic write: whoever is killed while writing a file leaves the old one, or none."""

import contextlib
import os
import socket
from pathlib import Path


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
