"""Calls of a function on rank 0 or on all ranks, with the same result or error on every rank."""

import datetime
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from utils.config.errors import ConfigurationError, StorageError, UnfitClusterError
from utils.host.faults import storage_error
from utils.host.machine import host_name

Result = TypeVar("Result")


def on_rank_0(action: Callable[[], Result], group: Any = None) -> Result:
    """Run a function on rank 0; return its result or raise its ConfigurationError on every rank.

    The result must be picklable. An OSError becomes a StorageError, which is a ConfigurationError.
    All ranks of `group` must call this. None means all ranks.
    """
    is_rank_0 = not _is_distributed() or torch.distributed.get_rank() == 0
    outcome = _attempt(action) if is_rank_0 else None
    return _results_or_raise(gathered(outcome, group)[:1])[0]


def on_every_rank(action: Callable[[], Result], group: Any = None) -> list[Result]:
    """Run a function on every rank; return the results of all ranks, in rank order.

    If the function fails on any rank, all ranks raise one error with all messages of failed ranks.
    All ranks of `group` must call this. None means all ranks.
    """
    return _results_or_raise(gathered(_attempt(action), group))


def gathered(value: Any, group: Any = None) -> list[Any]:
    """Return the `value` of each rank, as a list in rank order.

    All ranks of `group` must call this. None means all ranks.
    """
    if not _is_distributed():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def _attempt(action: Callable[[], Any]) -> tuple[Any, type[ConfigurationError] | None, list[str]]:
    """Call `action`. Return (result, None, []), or (None, error type, messages) if it fails.

    Only ConfigurationError and OSError are caught.
    """
    try:
        return action(), None, []
    except ConfigurationError as error:
        return None, type(error), error.problems
    except OSError as error:
        found = storage_error(error) or StorageError(f"{host_name()}: {error}.")
        return None, StorageError, found.problems


def _results_or_raise(outcomes: list[Any]) -> list[Any]:
    """Return the results of all ranks. If any rank failed, raise one error with all messages.

    outcomes: the return values of `_attempt`, one per rank
    """
    error_types = [kind for _, kind, _ in outcomes if kind is not None]
    if error_types:
        raise error_types[0](list(dict.fromkeys(text for *_, texts in outcomes for text in texts)))
    return [answer for answer, *_ in outcomes]


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def cpu_group(timeout_s: float) -> Any:
    """Return a new gloo process group of all ranks, or None if there is only one rank.

    All ranks must call this. Raises UnfitClusterError if the ranks cannot reach each other.
    """
    if not _is_distributed() or torch.distributed.get_world_size() == 1:
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


class AsyncMax:
    """An asynchronous all-reduce that returns the maximum of one integer per rank.

    All ranks call `begin_turn` in one step and `result` in the next step. Meanwhile a thread of
    gloo does the all-reduce, so `result` does not block the GPU and seldom waits for another rank.
    """

    def __init__(self, timeout_s: float = 1800):
        """Make a gloo process group. All ranks must call this. Raises UnfitClusterError."""
        self.pending: tuple[torch.Tensor, Any] | None = None
        self.own = 0
        self.group = cpu_group(timeout_s)

    def result(self) -> int:
        """Return the maximum of the ranks' numbers in the last `begin_turn`; 0 before any turn."""
        if self.pending is None:
            return self.own
        value, work = self.pending
        work.wait()
        self.pending = None
        return int(value.item())

    def begin_turn(self, number: int) -> None:
        """Start the all-reduce with this rank's `number`. Call `result` before the next turn."""
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
        """Wait for the all-reduce and destroy the process group. All ranks must call this."""
        self.result()
        self.own = 0
        if self.group is not None:
            torch.distributed.destroy_process_group(self.group)
            self.group = None
