"""Counts the real tokens that a run has consumed, source by source, over all of its starts."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np


class ConsumedTokens:
    """The real tokens (no padding) of all steps up to one, over all ranks.

    Each step is counted once, when it is asked about; a start takes over what its checkpoint
    carries. Every rank counts by itself: which rows a step has is no secret of any rank.

    names      of the sources, short
    by_source  int64 (sources,)
    """

    def __init__(self, in_step: Callable[[int], np.ndarray], names: Sequence[str]):
        """`in_step` returns the tokens of a 0-based step, int64 (sources,)."""
        self.in_step, self.names = in_step, tuple(names)
        self.by_source = np.zeros(len(names), dtype=np.int64)
        self.former: dict[str, int] = {}  # of sources that the run has no more
        self.steps = 0

    def take_over(self, steps: int, tokens: Mapping[str, int]) -> None:
        """Go on from what `carried` returned after this many steps."""
        self.steps = steps
        self.by_source = np.array([tokens.get(name, 0) for name in self.names], dtype=np.int64)
        self.former = {name: count for name, count in tokens.items() if name not in self.names}

    def count(self, steps: int) -> int:
        """Count up to the end of this many steps, never fewer than before; return all tokens."""
        for step in range(self.steps, steps):
            self.by_source += self.in_step(step)
        self.steps = max(steps, self.steps)
        return int(self.by_source.sum()) + sum(self.former.values())

    def carried(self) -> dict[str, int]:
        """Return the counts for a checkpoint."""
        return self.former | dict(zip(self.names, self.by_source.tolist(), strict=True))


def source_names(paths: Sequence[Path]) -> list[str]:
    """Name datasets by the shortest ends of their paths that differ, less what all end with.

    >>> source_names([Path("/data/web/train"), Path("/data/code/train")])
    ['web', 'code']
    >>> source_names([Path("/a/web"), Path("/b/web"), Path("/b/code")])
    ['a/web', 'b/web', 'b/code']
    """
    parts = [path.parts for path in paths]
    length = 1
    while len({part[-length:] for part in parts}) < len(set(parts)):
        length += 1
    ends = [part[-length:] for part in parts]
    while len({end[-1:] for end in ends}) == 1 and min(map(len, ends)) > 1:
        ends = [end[:-1] for end in ends]
    return ["/".join(end) for end in ends]
