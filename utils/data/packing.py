"""Assign pieces of documents to rows of a fixed capacity; lengths only, no token is touched."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from utils.config.errors import ConfigurationError


def best_fit_rows(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the row of each piece by best-fit decreasing bin packing.

    lengths: (pieces,) integers in [1, capacity]. Longest first, ties by index; each piece goes to
    the row with the least free space that still holds it, or opens a row. Rows are numbered in
    the order they were opened.

    All pieces of one length are placed together, which changes nothing in the result: a row that
    took a piece stays the tightest one until it cannot take another. So the work grows with the
    number of different lengths and free spaces met, not with pieces times rows.
    """
    # numpy sorts 16-bit keys by radix, four times as fast.
    key_type = np.uint16 if capacity < 1 << 16 else np.int64
    order = np.argsort((capacity - lengths).astype(key_type), kind="stable")
    counts = np.bincount(lengths, minlength=capacity + 1)
    # In the order of `order`: rows that take pieces, how many each takes, and for how many rows.
    taking: list[int] = []
    each_takes: list[int] = []
    rows_in_batch: list[int] = []
    rows_with_free: list[list[int]] = [[] for _ in range(capacity + 1)]
    nonempty = 0  # bit f is set if rows_with_free[f] is not empty
    opened = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            fitting = nonempty >> length
            if fitting:
                free = length + (fitting & -fitting).bit_length() - 1
                rows = rows_with_free[free]
            else:
                free = capacity
                rows = list(range(opened, opened + -(-left // (capacity // length))))
                opened += len(rows)
            each = free // length
            full = min(len(rows), left // each)
            # LIFO: taking from the end of a list costs nothing.
            batches = [(rows[len(rows) - full :], each)] if full else []
            del rows[len(rows) - full :]
            if rows and full * each < left < (full + 1) * each:
                batches.append(([rows.pop()], left - full * each))
            if not rows:
                nonempty &= ~(1 << free)
            for taken, pieces in batches:
                taking += taken
                each_takes.append(pieces)
                rows_in_batch.append(len(taken))
                left -= len(taken) * pieces
                remaining = free - pieces * length
                rows_with_free[remaining] += taken
                nonempty |= 1 << remaining
    row_of_piece = np.empty(len(lengths), dtype=np.int64)
    row_of_piece[order] = np.repeat(taking, np.repeat(each_takes, rows_in_batch))
    return row_of_piece


def cut_rows(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bounds [start, stop) of rows cut from the documents laid end to end.

    lengths: (documents,) integers >= 2. Bounds are positions in the concatenation. A document cut
    at a row's end goes on in the next row from its last token again, so that no next-token
    target is lost; where only its first token would fit, the place stays empty.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1])
    end_of = ends.data  # its items are Python ints, quicker one by one than numpy's
    starts, stops = [], []
    start = document = 0
    while start < total:
        stop = min(start + capacity, total)
        # The document that holds the row's last token; at most one per two tokens lies between.
        farthest = min(document + capacity // 2 + 1, len(lengths))
        document = bisect_left(end_of, stop, lo=document, hi=farthest)
        begin = end_of[document - 1] if document else 0
        starts.append(start)
        if stop == end_of[document]:
            start = stop
        elif stop == begin + 1:
            start = stop = begin
        else:
            start = stop - 1
        stops.append(stop)
    return np.array(starts, dtype=np.int64), np.array(stops, dtype=np.int64)


# Plan how documents fill rows of a fixed length: indices only, never tokens.

PACKINGS = ("best_fit", "concat", "none")
ON_OVERLONG = ("split", "error", "truncate", "drop")


class Segments(NamedTuple):
    """Parts [start, stop) of documents, arrays of one length."""

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per segment."""
        return self.stop - self.start

    def take(self, indices: np.ndarray) -> "Segments":
        """Return the segments at `indices`."""
        return Segments(*(column[indices] for column in self))


@dataclass(frozen=True)
class PackPlan:
    """Which segment goes where: row i holds segments row_offsets[i] to row_offsets[i + 1].

    row_offsets: (rows + 1,) int64. The counts say what became of documents that did not simply
    go into a row; `left_out_tokens` are those of truncated and dropped documents.
    """

    sequence_length: int
    row_offsets: np.ndarray
    segments: Segments
    split: int = 0
    truncated: int = 0
    dropped: int = 0
    truncated_without_loss: int = 0
    without_targets: int = 0
    left_out_tokens: int = 0

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.row_offsets) - 1

    @cached_property
    def row_tokens(self) -> np.ndarray:
        """Real (not padding) tokens of each row, int64 (rows,)."""
        ends = np.concatenate([[0], np.cumsum(self.segments.lengths, dtype=np.int64)])
        return np.diff(ends[self.row_offsets])

    @cached_property
    def tokens(self) -> int:
        """Real tokens of all rows; the token shared by two pieces of a document counts twice."""
        return int(self.row_tokens.sum())

    @property
    def one_document_a_row(self) -> bool:
        """Whether no row holds more than one segment, its padded tail aside."""
        return len(self.segments.document) == self.rows

    @property
    def fill(self) -> float:
        """Share of real tokens among all places of all rows."""
        return self.tokens / (self.rows * self.sequence_length)

    def row(self, index: int) -> Segments:
        """Return the segments of one row in their order in it."""
        return Segments(
            *(
                column[self.row_offsets[index] : self.row_offsets[index + 1]]
                for column in self.segments
            )
        )

    def segments_of_rows(self, rows: np.ndarray) -> tuple[np.ndarray, Segments]:
        """Return the segments of several rows in order, and for each its place in `rows`."""
        first = self.row_offsets[rows]
        counts = self.row_offsets[rows + 1] - first
        return np.arange(len(rows)).repeat(counts), self.segments.take(ranges(first, counts))


def plan_packing(
    lengths: np.ndarray,
    sequence_length: int,
    packing: str = "best_fit",
    on_overlong: str = "split",
    *,
    has_targets: Callable[[np.ndarray, int], np.ndarray] | None = None,
    where: str = "the dataset",
) -> PackPlan:
    """Place documents of the given lengths into rows of `sequence_length` tokens.

    packing: best_fit (best-fit decreasing over all documents, no document is cut that fits a
    row), concat (documents in order, cut at row ends) or none (one piece per row).
    on_overlong: what becomes of documents longer than a row: split into pieces that overlap by
    one token, so that every next-token target is there exactly once; error; truncate; drop.
    has_targets: (documents, stop) -> bool array, `TokenDataset.has_targets`; truncated documents
    that keep no loss-bearing target are left out.
    Documents of one token have nothing to predict and are left out.

    Deterministic. Raises ConfigurationError, naming `where`, for `error` and if nothing is left.
    """
    _check(sequence_length, packing, on_overlong)
    lengths = np.asarray(lengths, dtype=np.int64)
    long = np.flatnonzero(lengths > sequence_length)
    if long.size and on_overlong == "error":
        raise ConfigurationError(
            f"{where}: row {long[0]} has {lengths[long[0]]} tokens, more than sequence_length "
            f"{sequence_length} ({long.size} such rows); raise sequence_length, or let on_overlong "
            "truncate or drop them."
        )
    used, counts = _tokens_used(lengths, long, sequence_length, on_overlong, has_targets)
    documents = np.flatnonzero(used)
    if not documents.size:
        found = [f"{name.replace('_', ' ')}: {count}" for name, count in counts.items() if count]
        raise ConfigurationError(
            f"{where}: no document is left to train on; of {len(lengths)}, {', '.join(found)}."
        )
    row_offsets, segments = _fill(documents, used[documents], sequence_length, packing)
    return PackPlan(sequence_length, row_offsets, _narrow(segments), **counts)


def ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return first[0], first[0] + 1, ... (counts[0] of them), first[1], ...: ragged aranges."""
    before = counts.cumsum() - counts
    return np.arange(int(counts.sum())) + (first - before).repeat(counts)


def _check(sequence_length: int, packing: str, on_overlong: str) -> None:
    problems = []
    if sequence_length < 2:
        problems.append(f"sequence_length {sequence_length}: a row needs at least 2 tokens.")
    if packing not in PACKINGS:
        problems.append(f"packing {packing!r}: must be one of {', '.join(PACKINGS)}.")
    if on_overlong not in ON_OVERLONG:
        problems.append(f"on_overlong {on_overlong!r}: must be one of {', '.join(ON_OVERLONG)}.")
    if problems:
        raise ConfigurationError(problems)


def _tokens_used(
    lengths: np.ndarray,
    long: np.ndarray,
    sequence_length: int,
    on_overlong: str,
    has_targets: Callable[[np.ndarray, int], np.ndarray] | None,
) -> tuple[np.ndarray, dict[str, int]]:
    """Return how many tokens of each document are used (0: left out) and the plan's counts."""
    used = np.where(lengths < 2, 0, lengths)
    counts = {"without_targets": int(np.count_nonzero(lengths < 2))}
    if on_overlong == "split":
        counts["split"] = int(long.size)
    elif on_overlong == "drop":
        used[long] = 0
        counts["dropped"] = int(long.size)
    elif on_overlong == "truncate":
        lossless = long[:0] if has_targets is None else long[~has_targets(long, sequence_length)]
        used[long] = sequence_length
        used[lossless] = 0
        counts["truncated"] = int(long.size - lossless.size)
        counts["truncated_without_loss"] = int(lossless.size)
    counts["left_out_tokens"] = int((lengths[long] - used[long]).sum())
    return used, counts


def _fill(
    documents: np.ndarray, lengths: np.ndarray, sequence_length: int, packing: str
) -> tuple[np.ndarray, Segments]:
    """Return (row_offsets, segments) for documents (indices) of which `lengths` tokens are used."""
    if packing == "concat":
        return _concatenated(documents, lengths, sequence_length)
    pieces = _pieces(documents, lengths, sequence_length)
    if packing == "none":
        return np.arange(len(pieces.document) + 1), pieces
    row_of_piece = best_fit_rows(pieces.lengths, sequence_length)
    order = np.argsort(row_of_piece, kind="stable")
    row_offsets = np.concatenate([[0], np.cumsum(np.bincount(row_of_piece))])
    return row_offsets, pieces.take(order)


def _pieces(documents: np.ndarray, lengths: np.ndarray, sequence_length: int) -> Segments:
    """Cut [0, T), [T - 1, 2T - 1), ...: each piece of T tokens brings T - 1 new targets."""
    stride = sequence_length - 1
    counts = (lengths - 1 + stride - 1) // stride
    start = ranges(np.zeros_like(counts), counts) * stride
    stop = np.minimum(start + sequence_length, np.repeat(lengths, counts))
    return Segments(np.repeat(documents, counts), start, stop)


def _concatenated(
    documents: np.ndarray, lengths: np.ndarray, sequence_length: int
) -> tuple[np.ndarray, Segments]:
    ends = np.cumsum(lengths)
    begins = ends - lengths
    starts, stops = cut_rows(lengths, sequence_length)
    first = np.searchsorted(begins, starts, side="right") - 1
    counts = np.searchsorted(ends, stops) + 1 - first
    index = ranges(first, counts)
    start = np.maximum(np.repeat(starts, counts) - begins[index], 0)
    stop = np.minimum(np.repeat(stops, counts) - begins[index], lengths[index])
    return np.concatenate([[0], np.cumsum(counts)]), Segments(documents[index], start, stop)


def _narrow(segments: Segments) -> Segments:
    """Halve the memory of a plan where 32 bits are enough."""
    return Segments(
        *(
            column.astype(np.int32) if column.max(initial=0) < 2**31 else column
            for column in segments
        )
    )
