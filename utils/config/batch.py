"""The arithmetic of the global batch: what the user sets, divided over ranks and accumulation."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from utils.config.errors import ConfigurationError


def accumulation_steps(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Return the micro-batches that each rank accumulates per optimizer step.

    All three are counts: sequences per optimizer step over all ranks, sequences per rank and
    forward pass, and ranks. Raises ConfigurationError when the global batch does not divide,
    with the nearest ones that do; it is never rounded.
    """
    at_once = micro_batch_size * world_size
    if global_batch_size > 0 and global_batch_size % at_once == 0:
        return global_batch_size // at_once
    below = max(global_batch_size, 0) // at_once * at_once
    nearest = [size for size in (below, below + at_once) if size > 0]
    advice = f"use global_batch_size {' or '.join(map(str, nearest))}"
    if smaller := fitting_micro_batch(global_batch_size, micro_batch_size, world_size):
        advice += f", or per_device_train_batch_size {smaller}"
    ranks = f"{world_size} {'rank' if world_size == 1 else 'ranks'}"
    raise ConfigurationError(
        f"global_batch_size {global_batch_size} does not divide over {ranks} of "
        f"{micro_batch_size} sequences each, which makes {at_once} at once: {advice}"
    )


def batch_arithmetic(
    micro_batch_size: int, sequence_length: int, world_size: int, accumulation: int
) -> str:
    """Write out how many tokens one optimizer step sees."""
    tokens = micro_batch_size * sequence_length * world_size * accumulation
    return (
        f"{micro_batch_size} sequences x {sequence_length:,} tokens x {world_size} "
        f"{'rank' if world_size == 1 else 'ranks'} x {accumulation} accumulation "
        f"= {tokens:,} tokens/step"
    )


def fitting_micro_batch(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Return the largest micro-batch below the one asked for that divides; 0 if there is none."""
    sizes = range(min(micro_batch_size, global_batch_size // world_size), 0, -1)
    return next((size for size in sizes if global_batch_size % (size * world_size) == 0), 0)


# Keeps the launch that a dry run only plans away from the libraries that would join it.

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
