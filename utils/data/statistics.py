"""Measure a token dataset in one streaming pass: counts, extremes, first faults, fingerprint.

Everything is vectorised over blocks of documents, so memory stays bounded by a block (or by the
longest document) whatever the size of the dataset.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from utils.data.columns import ListColumn

IGNORED_LABEL = -100
BLOCK_TOKENS = 1 << 20


@dataclass
class Statistics:
    """Counts over all documents of a split, and the first row of every kind of fault.

    Rows are document indices. A loss-bearing target is a loss-bearing token that has a token
    before it in its document to be predicted from. `None` stands for "no such row".
    """

    documents: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    loss_targets: int = 0
    longest_document: int = 0
    shortest_document: int = 0
    min_token_id: int | None = None
    min_token_row: int | None = None
    max_token_id: int | None = None
    max_token_row: int | None = None
    empty_documents: int = 0
    first_empty_row: int | None = None
    documents_without_loss: int = 0
    first_row_without_loss: int | None = None
    first_bad_mask_row: int | None = None
    first_differing_label_row: int | None = None
    first_padded_row: int | None = None

    def as_dict(self) -> dict[str, int | None]:
        """Return the JSON form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Statistics":
        """Read the JSON form; KeyError for a field that is missing, others are passed over."""
        return cls(**{field.name: content[field.name] for field in fields(cls)})


def bears_loss(mask_name: str | None, values: np.ndarray) -> np.ndarray:
    """Return which tokens bear loss (bool) from values of the loss-mask column."""
    return values != IGNORED_LABEL if mask_name == "labels" else values != 0


def measure(columns: Mapping[str, ListColumn], loss_mask: str | None) -> tuple[Statistics, str]:
    """Return the statistics of a split and the fingerprint of its content.

    `columns` holds input_ids, the column named by `loss_mask` if any, and attention_mask if the
    dataset has one; all share one set of offsets. The fingerprint hashes token ids, loss mask and
    document lengths in row order with the integer types, and nothing else: record batches, the
    split into files, list or large_list, other columns and the path do not change it.
    """
    tokens = columns["input_ids"]
    statistics = Statistics(documents=len(tokens.offsets) - 1)
    fingerprint = _Fingerprint(
        [column for name, column in columns.items() if name in ("input_ids", loss_mask)]
    )
    for chunk, first, last in _blocks(tokens):
        offsets = tokens.offsets[first : last + 1] - tokens.offsets[first]
        ids = tokens.rows(chunk, first, last)
        _add_lengths(statistics, first, offsets)
        _add_ids(statistics, first, offsets, ids)
        if loss_mask:
            mask = columns[loss_mask].rows(chunk, first, last)
            _add_mask_faults(statistics, loss_mask, first, offsets, mask, ids)
            _add_loss(statistics, first, offsets, bears_loss(loss_mask, mask))
        if "attention_mask" in columns:
            padding = columns["attention_mask"].rows(chunk, first, last) == 0
            known = statistics.first_padded_row
            statistics.first_padded_row = _first(known, first, offsets, padding)
        fingerprint.add(chunk, first, last)
    if not loss_mask:
        statistics.loss_tokens = statistics.tokens
        non_empty = statistics.documents - statistics.empty_documents
        statistics.loss_targets = statistics.tokens - non_empty
    return statistics, fingerprint.hexdigest()


class _Fingerprint:
    """One hash per column over its values, one over the lengths, combined at the end."""

    def __init__(self, columns: Sequence[ListColumn]):
        self.columns = columns
        self.values = [hashlib.blake2b(digest_size=16) for _ in columns]
        self.lengths = hashlib.blake2b(digest_size=16)

    def add(self, chunk: int, first: int, last: int) -> None:
        lengths = np.diff(self.columns[0].offsets[first : last + 1])
        self.lengths.update(lengths.astype("<i8").tobytes())
        for digest, column in zip(self.values, self.columns, strict=True):
            digest.update(column.rows(chunk, first, last).view(np.uint8).data)

    def hexdigest(self) -> str:
        whole = hashlib.blake2b(self.lengths.digest(), digest_size=16)
        for digest, column in zip(self.values, self.columns, strict=True):
            whole.update(f"{column.name}:{column.values[0].dtype.str}".encode())
            whole.update(digest.digest())
        return whole.hexdigest()


def _blocks(tokens: ListColumn) -> Iterator[tuple[int, int, int]]:
    """Yield (chunk, first, last): documents [first, last) of one chunk, about BLOCK_TOKENS long."""
    ends = np.append(tokens.first_rows[1:], len(tokens.offsets) - 1)
    for chunk, end in enumerate(ends.tolist()):
        first = int(tokens.first_rows[chunk])
        while first < end:
            wanted = tokens.offsets[first] + BLOCK_TOKENS
            last = int(np.searchsorted(tokens.offsets, wanted, side="right")) - 1
            last = min(max(last, first + 1), end)
            yield chunk, first, last
            first = last


def _add_lengths(statistics: Statistics, first: int, offsets: np.ndarray) -> None:
    lengths = np.diff(offsets)
    shortest, longest = int(lengths.min()), int(lengths.max())
    statistics.shortest_document = (
        min(shortest, statistics.shortest_document) if first else shortest
    )
    statistics.longest_document = max(longest, statistics.longest_document)
    statistics.tokens += int(offsets[-1])
    if shortest == 0:
        empty = np.flatnonzero(lengths == 0)
        statistics.empty_documents += empty.size
        if statistics.first_empty_row is None:
            statistics.first_empty_row = first + int(empty[0])


def _add_ids(statistics: Statistics, first: int, offsets: np.ndarray, ids: np.ndarray) -> None:
    if not ids.size:
        return
    smallest, largest = int(ids.min()), int(ids.max())
    if statistics.min_token_id is None or smallest < statistics.min_token_id:
        statistics.min_token_id = smallest
        statistics.min_token_row = first + _row_of(offsets, int(ids.argmin()))
    if statistics.max_token_id is None or largest > statistics.max_token_id:
        statistics.max_token_id = largest
        statistics.max_token_row = first + _row_of(offsets, int(ids.argmax()))


def _add_mask_faults(
    statistics: Statistics,
    loss_mask: str,
    first: int,
    offsets: np.ndarray,
    mask: np.ndarray,
    ids: np.ndarray,
) -> None:
    if loss_mask == "labels":
        differing = (mask != IGNORED_LABEL) & (mask != ids)
        statistics.first_differing_label_row = _first(
            statistics.first_differing_label_row, first, offsets, differing
        )
    else:
        statistics.first_bad_mask_row = _first(
            statistics.first_bad_mask_row, first, offsets, (mask != 0) & (mask != 1)
        )


def _add_loss(statistics: Statistics, first: int, offsets: np.ndarray, loss: np.ndarray) -> None:
    rows = np.flatnonzero(np.diff(offsets))  # reduceat needs non-empty ranges
    if not rows.size:
        return
    starts = offsets[rows]
    tokens = np.add.reduceat(loss.view(np.int8), starts, dtype=np.int64)
    targets = tokens - loss[starts]
    statistics.loss_tokens += int(tokens.sum())
    statistics.loss_targets += int(targets.sum())
    without = rows[targets == 0]
    statistics.documents_without_loss += without.size
    if without.size and statistics.first_row_without_loss is None:
        statistics.first_row_without_loss = first + int(without[0])


def _first(known: int | None, first_row: int, offsets: np.ndarray, fault: np.ndarray) -> int | None:
    """Return `known`, or the row of the first True in `fault`."""
    if known is not None or not fault.any():
        return known
    return first_row + _row_of(offsets, int(fault.argmax()))


def _row_of(offsets: np.ndarray, position: int) -> int:
    return int(np.searchsorted(offsets, position, side="right")) - 1
