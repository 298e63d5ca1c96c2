"""Files that appear whole: whoever is killed while writing one leaves the old one, or none."""

import contextlib
import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write `text` to `path` in one step, on stable storage before it has its name.

    Raises OSError, with the draft removed.
    """
    # The process id keeps those that write the same file at once out of each other's draft.
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
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
