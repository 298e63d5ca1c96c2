"""Load micro-batches ahead of the training loop."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from utils.cluster.signals import shield_loader_worker
from utils.data.batches import Batch
from utils.data.consumed import ConsumedTokens, source_names
from utils.data.order import EvalBatchSampler, GlobalBatchSampler
from utils.data.packed_rows import PackedDataset


class TrainLoader:
    """The training micro-batches of one rank over the whole run.

    Iterating starts at the step given to `resume_at` and draws nothing from the global random
    state, so that a resumed run keeps the random numbers of the uninterrupted one. `wait_s` adds
    up the seconds that the consumer waited for batches; `consumed` counts the run's tokens.
    """

    def __init__(self, loader: DataLoader, sampler: GlobalBatchSampler, dataset: PackedDataset):
        self.loader = loader
        self.batch_sampler = sampler
        self.dataset = dataset
        self.wait_s = 0.0
        names = source_names([source.path for source in dataset.datasets])
        self.consumed = ConsumedTokens(self.tokens_by_source, names)

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
        return self.dataset.tokens_by_source(self.batch_sampler.rows_of_step(step))


def train_loader(
    dataset: PackedDataset, sampler: GlobalBatchSampler, *, seed: int = 0, **workers: Any
) -> TrainLoader:
    """Return the loader of a run; `workers` as for `eval_loader`."""
    return TrainLoader(_loader(dataset, sampler, seed=seed, **workers), sampler, dataset)


def eval_loader(
    dataset: PackedDataset, sampler: EvalBatchSampler, *, seed: int = 0, **workers: Any
) -> DataLoader:
    """Return a loader over every row once.

    workers: num_workers, pin_memory, prefetch_factor, persistent_workers and
    multiprocessing_context of `torch.utils.data.DataLoader`.
    """
    return _loader(dataset, sampler, seed=seed, **workers)


def _loader(
    dataset: PackedDataset,
    sampler: GlobalBatchSampler | EvalBatchSampler,
    *,
    seed: int,
    num_workers: int = 0,
    pin_memory: bool = False,
    **options: Any,
) -> DataLoader:
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
    """Stand in for a collator: `PackedDataset.__getitems__` has made the batch already."""
    return batch
