"""Run a function on rank 0 or on all ranks, with the same result or error on every rank."""

import datetime
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from utils.config.errors import ConfigurationError, StorageError, UnfitClusterError
from utils.host.faults import storage_error
from utils.host.machine import host_name

Answer = TypeVar("Answer")


def on_rank_0(action: Callable[[], Answer], group: Any = None) -> Answer:
    """Run a function on rank 0; return its result, or raise its ConfigurationError, on every rank.

    The result must be picklable. An OSError becomes a StorageError, which is a ConfigurationError.
    Collective over `group` (None: all ranks).
    """
    leads = not _connected() or torch.distributed.get_rank() == 0
    outcome = _attempt(action) if leads else None
    return _answers_of(gathered(outcome, group)[:1])[0]


def on_every_rank(action: Callable[[], Answer], group: Any = None) -> list[Answer]:
    """Run a function on every rank; return the results of all ranks, in rank order.

    If the function fails on some ranks, all ranks raise one error with the messages of these ranks.
    Collective over `group`.
    """
    return _answers_of(gathered(_attempt(action), group))


def gathered(value: Any, group: Any = None) -> list[Any]:
    """Return the values of all ranks, in rank order. Collective over `group` (None: all ranks)."""
    if not _connected():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def _attempt(action: Callable[[], Any]) -> tuple[Any, type[ConfigurationError] | None, list[str]]:
    """Return (result, None, []), or (None, error type, messages) to send to other processes."""
    try:
        return action(), None, []
    except ConfigurationError as error:
        return None, type(error), error.problems
    except OSError as error:
        found = storage_error(error) or StorageError(f"{host_name()}: {error}.")
        return None, StorageError, found.problems


def _answers_of(outcomes: list[Any]) -> list[Any]:
    """Return the results in outcomes of `_attempt`; raise one error with all their messages."""
    refused = [kind for _, kind, _ in outcomes if kind is not None]
    if refused:
        raise refused[0](list(dict.fromkeys(text for *_, texts in outcomes for text in texts)))
    return [answer for answer, *_ in outcomes]


def _connected() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def cpu_group(timeout_s: float) -> Any:
    """Make a gloo group of all ranks, None for one; collective. Raises UnfitClusterError."""
    if not _connected() or torch.distributed.get_world_size() == 1:
        return None
    try:
        timeout = datetime.timedelta(seconds=timeout_s)
        return torch.distributed.new_group(backend="gloo", timeout=timeout)
    except RuntimeError as error:
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "unset")
        raise UnfitClusterError(
            f"{host_name()}: the ranks cannot reach each other over gloo (GLOO_SOCKET_IFNAME "
            f"is {interface}): {error}. Set it to the interface that the nodes share, in "
            "slurm/cluster.env."
        ) from error


class Agreement:
    """An asynchronous all-reduce: the maximum of one integer per rank, read one step later.

    All ranks call `begin_turn` in a step, and `result` in the next step. Meanwhile gloo reduces in
    a separate thread, so `result` does not block the GPU and seldom waits for another rank.
    """

    def __init__(self, timeout_s: float = 1800):
        """Make the process group; collective over ranks. Raises UnfitClusterError."""
        self.pending: tuple[torch.Tensor, Any] | None = None
        self.own = 0
        self.group = cpu_group(timeout_s)

    def result(self) -> int:
        """Return the maximum of the numbers given to the last `begin_turn`; 0 before the first."""
        if self.pending is None:
            return self.own
        value, work = self.pending
        work.wait()
        self.pending = None
        return int(value.item())

    def begin_turn(self, number: int) -> None:
        """Start the all-reduce with this rank's number. Call `result` before the next call."""
        assert self.pending is None, "the last turn was not read"
        self.own = number
        if self.group is not None:
            value = torch.tensor([number], dtype=torch.int32)
            maximum = torch.distributed.ReduceOp.MAX
            # Hide the all-reduce from torch's profiler: gloo would end the event after the profiler
            # has freed the event's memory.
            torch.autograd._enable_record_function(False)
            try:
                work = torch.distributed.all_reduce(value, maximum, group=self.group, async_op=True)
            finally:
                torch.autograd._enable_record_function(True)
            self.pending = (value, work)

    def close(self) -> None:
        """Wait for the all-reduce and destroy the process group; all ranks call it."""
        self.result()
        self.own = 0
        if self.group is not None:
            torch.distributed.destroy_process_group(self.group)
            self.group = None
