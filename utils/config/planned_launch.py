"""Keeps the launch that a dry run only plans away from the libraries that would join it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

# What torchrun tells a process of the others; accelerate connects to them as soon as it sees it.
LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@contextmanager
def alone() -> Iterator[None]:
    """Take the launcher's variables out of the environment for a while.

    A dry run with WORLD_SIZE=8 stands for eight processes of which none is there to answer.
    """
    hidden = {name: os.environ.pop(name) for name in LAUNCHER_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
