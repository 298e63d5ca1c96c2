"""A micro-batch: as the loader makes it, small, and as the model takes it, on its device."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from utils.data.order import PADDING_ROW
from utils.data.packing import PackPlan, Segments
from utils.data.statistics import IGNORED_LABEL
from utils.data.token_dataset import TokenDataset

# What PackedDataset assembles of B rows of T tokens. input_ids: (B, T) int32. bears_loss: (B, T)
# bool, false for the first token of each segment. cu_seq_lens: the starts of all segments in the
# flattened (B * T) tokens, the padded tail of a row being one, and then B * T, int32: as many as
# there are, for flash kernels go through each, empty ones too. loss_positions: which of the
# flattened tokens predict one that bears loss, int64. row_tokens: how many tokens of each row come
# before its padding, int64 (B,).
Batch = dict[str, torch.Tensor]


def model_inputs(batch: Batch, device: torch.device | str) -> dict[str, Any]:
    """Return a micro-batch as the model takes it, made on its device out of what is moved there.

    From pinned memory nobody waits for the copies. input_ids, labels, position_ids: (B, T) int64.
    Labels are unshifted: -100 where a token bears no loss. Positions count from 0 in each segment.
    cu_seq_lens_q and _k: `cu_seq_lens`. max_length_q and _k: at least the longest segment.
    loss_positions and row_tokens as they are, if they are given.
    """
    moved = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
    input_ids = moved["input_ids"].long()
    starts, places = moved["cu_seq_lens"][:-1], input_ids.numel()
    segment_starts = starts.repeat_interleave(moved["cu_seq_lens"].diff(), output_size=places)
    positions = torch.arange(places, device=device) - segment_starts
    longest = longest_segment(batch["cu_seq_lens"], input_ids.shape[1])
    inputs: dict[str, Any] = {
        "input_ids": input_ids,
        "labels": torch.where(moved["bears_loss"], input_ids, IGNORED_LABEL),
        "position_ids": positions.view_as(input_ids),
        "cu_seq_lens_q": moved["cu_seq_lens"],
        "cu_seq_lens_k": moved["cu_seq_lens"],
        "max_length_q": longest,
        "max_length_k": longest,
    }
    as_they_are = ("loss_positions", "row_tokens")
    return inputs | {name: moved[name] for name in as_they_are if name in moved}


def longest_segment(cu_seq_lens: torch.Tensor, row_length: int) -> int:
    """Return a power of two that no segment is longer than, or the row's length if it is less.

    Flash kernels start work for as many tokens of each segment, and most segments are short. Few
    bounds, for a kernel may plan anew for each. The boundaries are on the host: nobody waits.
    """
    longest = int(np.diff(cu_seq_lens.numpy()).max())
    return min(1 << (longest - 1).bit_length(), row_length)


# Assemble micro-batches of packed rows, straight from the memory-mapped files.


class DocumentPart(NamedTuple):
    """Tokens [start, stop) of a document (its row in the dataset, from 0)."""

    dataset: Path
    document: int
    start: int
    stop: int


class _Located(NamedTuple):
    """What one source has in a micro-batch's rows.

    begins: where each segment begins among the flattened tokens. places, filled: which of the rows
    are its own, and how many tokens each holds.
    """

    source: int
    segments: Segments
    begins: np.ndarray
    places: np.ndarray
    filled: np.ndarray


class PackedDataset(Dataset):
    """The rows of one or several packed datasets, numbered through all of them.

    `__getitems__` makes a whole micro-batch. pad_token_id fills the places
    of a row behind its documents; no document sees it, so any id will do.
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
        self.sequence_length = plans[0].sequence_length
        self._padding = np.full(self.sequence_length, pad_token_id or 0, dtype=np.int32)
        self._lossless = np.zeros(self.sequence_length, dtype=bool)
        self.rows_per_source = [plan.rows for plan in plans]
        self.first_rows = np.cumsum([0, *self.rows_per_source])

    def __len__(self) -> int:
        return int(self.first_rows[-1])

    def __getitems__(self, rows: Sequence[int]) -> Batch:
        """Return the micro-batch of these rows; PADDING_ROW stands for padding only."""
        numbers = np.asarray(rows, dtype=np.int64)
        shape = (len(rows), self.sequence_length)
        places = len(rows) * self.sequence_length
        begins, tokens, bearing, free = self._pieces(numbers)
        input_ids = np.empty(places, dtype=np.int32)
        np.concatenate(tokens, out=input_ids, casting="same_kind")
        marks = np.empty(places, dtype=np.int8)
        np.concatenate(bearing, out=marks, casting="unsafe")  # of int64 masks: 0 and 1 all the same
        bears_loss = marks != 0
        bears_loss[begins] = False
        cu_seq_lens = np.full(len(begins) + 1, places, dtype=np.int32)
        cu_seq_lens[:-1] = begins
        return {
            "input_ids": torch.from_numpy(input_ids.reshape(shape)),
            "bears_loss": torch.from_numpy(bears_loss.reshape(shape)),
            "cu_seq_lens": torch.from_numpy(cu_seq_lens),
            # Of the token before it: no row begins with a token that bears loss.
            "loss_positions": torch.from_numpy(np.flatnonzero(bears_loss[1:])),
            "row_tokens": torch.from_numpy(self.sequence_length - free),
        }

    def tokens_by_source(self, rows: np.ndarray) -> np.ndarray:
        """Return how many real tokens these rows hold of each source, int64 (sources,)."""
        tokens = np.zeros(len(self.plans), dtype=np.int64)
        for source, places in self._by_source(rows):
            own = rows[places] - self.first_rows[source]
            tokens[source] = self.plans[source].row_tokens[own].sum()
        return tokens

    def documents_in_rows(self, rows: np.ndarray) -> list[DocumentPart]:
        """Return what these rows hold, source by source."""
        return [
            DocumentPart(self.datasets[located.source].path, *part)
            for located in self._located(rows)
            for part in zip(*(column.tolist() for column in located.segments), strict=True)
        ]

    def _by_source(self, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (source, places in `rows` that it fills)."""
        if len(self.plans) == 1:
            yield 0, (rows != PADDING_ROW).nonzero()[0]
            return
        sources = np.searchsorted(self.first_rows, rows, side="right") - 1
        for source in np.unique(sources[rows != PADDING_ROW]).tolist():
            yield source, (sources == source).nonzero()[0]

    def _located(self, rows: np.ndarray) -> Iterator[_Located]:
        """Yield what each source has in these rows."""
        for source, places in self._by_source(rows):
            own = rows[places] - self.first_rows[source]
            of_row, segments = self.plans[source].segments_of_rows(own)
            filled = self.plans[source].row_tokens[own]
            row_begins = places * self.sequence_length
            # Counted from the first of all these rows, and then from where its own row begins.
            before = _sums_before(segments.lengths)
            begins = before + (row_begins - _sums_before(filled))[of_row]
            yield _Located(source, segments, begins, places, filled)

    def _pieces(
        self, rows: np.ndarray
    ) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray], np.ndarray]:
        """Return what these rows consist of, in order: documents' segments and padded tails.

        Where each begins among the flattened tokens, its token ids, and what is not 0 where a
        token bears loss; and the length of each row's padded tail.
        """
        begins, tokens, bearing = [], [], []
        free = np.full(len(rows), self.sequence_length)
        for located in self._located(rows):
            ids, bears_loss = self.datasets[located.source].pieces(located.segments)
            tokens += ids
            bearing += bears_loss
            begins.append(located.begins)
            free[located.places] -= located.filled
        padded = free.nonzero()[0]
        begins.append((padded + 1) * self.sequence_length - free[padded])
        for length in free[padded].tolist():
            tokens.append(self._padding[:length])
            bearing.append(self._lossless[:length])
        unordered = np.concatenate(begins)
        order = unordered.argsort()
        numbers = order.tolist()
        return unordered[order], [tokens[i] for i in numbers], [bearing[i] for i in numbers], free


def _sums_before(counts: np.ndarray) -> np.ndarray:
    return counts.cumsum() - counts
