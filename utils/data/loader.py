"""Load micro-batches ahead of the training loop, and count the tokens that a run has seen."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from utils.data.order import EvalBatchSampler, GlobalBatchSampler
from utils.data.sequences import Batch, PackedDataset
from utils.launch.signals import shield_loader_worker


class TokenCounts:
    """The real tokens (no padding) of all steps up to one, over all ranks and starts of a run.

    Each step is counted once, when it is asked for. Every rank counts by itself: it knows the
    sequences of all ranks.

    names      of the sources, short
    by_source  int64 (sources,)
    """

    def __init__(self, in_step: Callable[[int], np.ndarray], names: Sequence[str]):
        """`in_step` returns the tokens of a 0-based step, int64 (sources,)."""
        self.in_step, self.names = in_step, tuple(names)
        self.by_source = np.zeros(len(names), dtype=np.int64)
        self.former: dict[str, int] = {}  # of sources that the run no longer has
        self.steps = 0

    def resume(self, steps: int, tokens: Mapping[str, int]) -> None:
        """Continue from what `state` returned after this many steps."""
        self.steps = steps
        self.by_source = np.array([tokens.get(name, 0) for name in self.names], dtype=np.int64)
        self.former = {name: count for name, count in tokens.items() if name not in self.names}

    def count(self, steps: int) -> int:
        """Count up to the end of this many steps, never fewer than before; return all tokens."""
        for step in range(self.steps, steps):
            self.by_source += self.in_step(step)
        self.steps = max(steps, self.steps)
        return int(self.by_source.sum()) + sum(self.former.values())

    def state(self) -> dict[str, int]:
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


class TrainLoader:
    """The training micro-batches of one rank over the whole run.

    Iterating starts at the step given to `resume_at` and draws nothing from the global random
    state, so that a resumed run keeps the random numbers of the uninterrupted one. `wait_s` adds
    up the seconds that the consumer waited for batches; `tokens_seen` counts the run's tokens.
    """

    def __init__(self, dataset: PackedDataset, sampler: GlobalBatchSampler, **workers: Any):
        """`workers` as for `eval_loader`."""
        self.loader = eval_loader(dataset, sampler, **workers)
        self.batch_sampler = sampler
        self.dataset = dataset
        self.wait_s = 0.0
        names = source_names([source.path for source in dataset.datasets])
        self.tokens_seen = TokenCounts(self.tokens_by_source, names)

    def __len__(self) -> int:
        """Count the micro-batches of the whole run, wherever iteration starts."""
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Batch]:
        before = time.perf_counter()
        for batch in self.loader:
            self.wait_s += time.perf_counter() - before
            yield batch
            before = time.perf_counter()

    def resume_at(self, step: int) -> None:
        """Let the next iteration start with the first micro-batch of optimizer step `step`."""
        self.batch_sampler.resume_at(step)

    def tokens_by_source(self, step: int) -> np.ndarray:
        """Return the real tokens of each source in the global batch of a step, over all ranks."""
        return self.dataset.tokens_by_source(self.batch_sampler.sequences_of_step(step))


def eval_loader(
    dataset: PackedDataset,
    sampler: GlobalBatchSampler | EvalBatchSampler,
    *,
    seed: int = 0,
    num_workers: int = 0,
    pin_memory: bool = False,
    **options: Any,
) -> DataLoader:
    """Return a loader of a sampler's micro-batches; `options` are those of torch's DataLoader."""
    if num_workers == 0:
        options = {}  # torch refuses settings of workers without workers
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        # Pinning speeds up copies to an accelerator; without one torch would only warn.
        pin_memory=pin_memory and torch.accelerator.is_available(),
        collate_fn=_whole_batch,
        worker_init_fn=shield_loader_worker,
        # Without its own generator every iterator would take a number from the global one.
        generator=torch.Generator().manual_seed(seed),
        **options,
    )


def _whole_batch(batch: Any) -> Any:
    """Replace the collator: `PackedDataset.__getitems__` has made the batch already."""
    return batch
