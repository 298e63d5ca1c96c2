"""Assemble micro-batches of packed rows, straight from the memory-mapped files."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from utils.data.batches import Batch
from utils.data.order import PADDING_ROW
from utils.data.packing import PackPlan, Segments
from utils.data.token_dataset import TokenDataset


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

    `__getitems__` makes a whole micro-batch (utils/data/batches.py). pad_token_id fills the places
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
