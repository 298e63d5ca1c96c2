"""Keeps Python's garbage collector out of a start, which would be a fifth longer for it.

Nearly all objects that imports make stay as long as the process. The collector goes through all of
them again and again, and when the process ends once more: a second of each `--help`.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no cyclic garbage inside, until `resume_collector()`, which the end calls too."""
    gc.disable()
    try:
        yield
    finally:
        resume_collector()


def resume_collector() -> None:
    """Collect garbage again, but never look at the objects that there are by now."""
    gc.freeze()
    gc.enable()
