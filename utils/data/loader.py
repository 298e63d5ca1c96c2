"""Assemble micro-batches of packed rows, and load them ahead of the training loop."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from utils.cluster.signals import shield_loader_worker
from utils.data.consumed import ConsumedTokens, source_names
from utils.data.order import PADDING_ROW, EvalBatchSampler, GlobalBatchSampler
from utils.data.packing import PackPlan, Segments
from utils.data.statistics import IGNORED_LABEL
from utils.data.token_dataset import TokenDataset

Batch = dict[str, Any]


class DocumentPart(NamedTuple):
    """Tokens [start, stop) of a document (its row in the dataset, from 0)."""

    dataset: Path
    document: int
    start: int
    stop: int


class PackedDataset(Dataset):
    """The rows of one or several packed datasets, numbered through all of them.

    `__getitems__` makes a whole micro-batch, straight from the memory-mapped files. pad_token_id
    fills the places of a row behind its documents; no document sees it, so any id will do.
    """

    def __init__(
        self,
        datasets: Sequence[TokenDataset],
        plans: Sequence[PackPlan],
        pad_token_id: int | None = None,
    ):
        assert len(datasets) == len(plans) > 0
        assert len({plan.sequence_length for plan in plans}) == 1
        self.datasets = tuple(datasets)
        self.plans = tuple(plans)
        self.pad_token_id = pad_token_id or 0
        self.sequence_length = plans[0].sequence_length
        self.rows_per_source = [plan.rows for plan in plans]
        self.first_rows = np.cumsum([0, *self.rows_per_source])
        # One number for all rows keeps the length of cu_seq_lens, so the shapes, constant.
        self.max_segments_per_row = max(plan.max_segments_per_row for plan in plans)

    def __len__(self) -> int:
        return int(self.first_rows[-1])

    def __getitems__(self, rows: Sequence[int]) -> Batch:
        """Return the micro-batch of these rows (B of them); PADDING_ROW stands for padding only.

        input_ids, labels, position_ids: (B, T) int64. Labels are unshifted: -100 where a token
        bears no loss or is the first of its segment. Positions count from 0 in each segment, the
        padded tail of a row being one. cu_seq_lens_q and _k: the starts of all segments in the
        flattened (B * T) tokens and then B * T, int32, padded to B * max_segments_per_row + 1 with
        B * T. max_length_q and _k: T, an upper bound that does not change. loss_positions: which of
        the flattened tokens predict one that bears loss, int64.
        """
        numbers = np.asarray(rows, dtype=np.int64)
        length, places = self.sequence_length, len(rows) * self.sequence_length
        input_ids = np.full(places, self.pad_token_id, dtype=np.int64)
        bears_loss = np.ones(places, dtype=bool)
        tails = self._tails(numbers)
        found = [tails[:, 0]]
        for source, segments, begins in self._located(numbers):
            self.datasets[source].copy_tokens(segments, input_ids, begins)
            self.datasets[source].mark_lossless(segments, bears_loss, begins)
            found.append(begins)
        for begin, end in tails.tolist():
            bears_loss[begin:end] = False
        starts = np.sort(np.concatenate(found))
        bears_loss[starts] = False
        labels = np.where(bears_loss, input_ids, IGNORED_LABEL)
        bounds = np.append(starts, places)
        position_ids = np.arange(places) - np.repeat(starts, np.diff(bounds))
        cu_seq_lens = np.full(len(rows) * self.max_segments_per_row + 1, places, dtype=np.int32)
        cu_seq_lens[: len(starts)] = starts
        boundaries = torch.from_numpy(cu_seq_lens)
        shape = (len(rows), length)
        return {
            "input_ids": torch.from_numpy(input_ids).view(shape),
            "labels": torch.from_numpy(labels).view(shape),
            "position_ids": torch.from_numpy(position_ids).view(shape),
            "cu_seq_lens_q": boundaries,
            "cu_seq_lens_k": boundaries.clone(),
            "max_length_q": length,
            "max_length_k": length,
            # No row begins with a token that bears loss.
            "loss_positions": torch.from_numpy(np.flatnonzero(bears_loss) - 1),
        }

    def tokens_by_source(self, rows: np.ndarray) -> np.ndarray:
        """Return how many real tokens these rows hold of each source, int64 (sources,)."""
        sources = np.searchsorted(self.first_rows, rows, side="right") - 1
        tokens = np.zeros(len(self.plans), dtype=np.int64)
        np.add.at(tokens, sources, self._row_tokens(rows))
        return tokens

    def documents_in_rows(self, rows: np.ndarray) -> list[DocumentPart]:
        """Return what these rows hold, source by source."""
        return [
            DocumentPart(self.datasets[source].path, *part)
            for source, segments, _ in self._located(rows)
            for part in zip(*(column.tolist() for column in segments), strict=True)
        ]

    def _row_tokens(self, rows: np.ndarray) -> np.ndarray:
        tokens = np.zeros(len(rows), dtype=np.int64)
        for source, places in self._by_source(rows):
            tokens[places] = self.plans[source].row_tokens[rows[places] - self.first_rows[source]]
        return tokens

    def _by_source(self, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (source, places in `rows` that it fills)."""
        if len(self.plans) == 1:
            yield 0, np.flatnonzero(rows != PADDING_ROW)
            return
        sources = np.searchsorted(self.first_rows, rows, side="right") - 1
        for source in np.unique(sources[rows != PADDING_ROW]).tolist():
            yield source, np.flatnonzero(sources == source)

    def _located(self, rows: np.ndarray) -> Iterator[tuple[int, Segments, np.ndarray]]:
        """Yield (source, segments, where each begins among the flattened tokens)."""
        for source, places in self._by_source(rows):
            own = rows[places] - self.first_rows[source]
            of_row, segments = self.plans[source].segments_of_rows(own)
            lengths = segments.lengths
            before = np.cumsum(lengths) - lengths  # counted from the first of all these rows
            first = np.searchsorted(of_row, np.arange(len(places)))
            begins = places[of_row] * self.sequence_length + before - before[first][of_row]
            yield source, segments, begins

    def _tails(self, rows: np.ndarray) -> np.ndarray:
        """Return [begin, end) of the padding of each row that has some, int64 (tails, 2)."""
        ends = np.arange(1, len(rows) + 1) * self.sequence_length
        begins = ends - self.sequence_length + self._row_tokens(rows)
        return np.stack([begins, ends], axis=1)[begins < ends]


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
