"""Keeps Python's garbage collector out of a start, which would be a fifth longer for it.

Nearly all objects that imports make stay as long as the process, and the collector goes through
all of them again and again.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no cyclic garbage inside, until `resume_collector()` or the end."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def resume_collector() -> None:
    """Collect garbage again, but never look at the objects that there are by now."""
    gc.freeze()
    gc.enable()
