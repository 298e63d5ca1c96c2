"""Lets all ranks act on one number at the same step, without waiting for each other."""

import datetime
import os
from typing import Any

import torch

from utils.cluster.host import host_name
from utils.config.errors import UnfitClusterError


class Agreement:
    """The largest of what the ranks put forward, known one turn later; all ranks take every turn.

    A turn is an all-reduce of one integer over the CPUs' network (gloo), which runs in a thread of
    its own while the ranks compute: reading the answer a step later waits neither for the device
    nor, as a rule, for a rank. A single process agrees with itself at once.
    """

    def __init__(self, timeout_s: float = 1800):
        """Make the group; collective over ranks. Raises UnfitClusterError."""
        self.group: Any = None
        self.pending: tuple[torch.Tensor, Any] | None = None
        self.own = 0
        distributed = torch.distributed
        alone = not (distributed.is_available() and distributed.is_initialized())
        if alone or distributed.get_world_size() == 1:
            return
        try:
            self.group = distributed.new_group(
                backend="gloo", timeout=datetime.timedelta(seconds=timeout_s)
            )
        except RuntimeError as error:
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "unset")
            raise UnfitClusterError(
                f"{host_name()}: the ranks cannot reach each other over gloo (GLOO_SOCKET_IFNAME "
                f"is {interface}): {error}. Set it to the interface that the nodes share, in "
                "slurm/cluster.env."
            ) from error

    def result(self) -> int:
        """Return the largest number of the last turn; 0 before the first."""
        if self.pending is None:
            return self.own
        value, work = self.pending
        work.wait()
        self.pending = None
        return int(value.item())

    def put_forward(self, number: int) -> None:
        """Begin a turn with this rank's number; `result` must have been read."""
        assert self.pending is None, "the last turn was not read"
        self.own = number
        if self.group is not None:
            value = torch.tensor([number], dtype=torch.int32)
            maximum = torch.distributed.ReduceOp.MAX
            work = torch.distributed.all_reduce(value, maximum, group=self.group, async_op=True)
            self.pending = (value, work)

    def close(self) -> None:
        """Wait for the turn under way and give the group up; all ranks call it."""
        self.result()
        self.own = 0
        if self.group is not None:
            torch.distributed.destroy_process_group(self.group)
            self.group = None
