"""Lets all ranks act on one number at the same step, without waiting for each other."""

from typing import Any

import torch

from utils.cluster.decisions import cpu_group


class Agreement:
    """The largest of what the ranks put forward, known one turn later; all ranks take every turn.

    A turn is an all-reduce of one integer over the CPUs' network (gloo), which runs in a thread of
    its own while the ranks compute: reading the answer a step later waits neither for the device
    nor, as a rule, for a rank. A single process agrees with itself at once.
    """

    def __init__(self, timeout_s: float = 1800):
        """Make the group; collective over ranks. Raises UnfitClusterError."""
        self.pending: tuple[torch.Tensor, Any] | None = None
        self.own = 0
        self.group = cpu_group(timeout_s)

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
