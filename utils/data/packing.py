"""Packing of documents into sequences of a fixed length, computed from the documents' lengths."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from utils.config.errors import ConfigurationError


class Segments(NamedTuple):
    """Parts of documents: segment i has the tokens [start[i], stop[i]) of document[i]."""

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each segment."""
        return self.stop - self.start

    def take(self, indices: np.ndarray) -> "Segments":
        """Return the segments with these indices."""
        return Segments(*(column[indices] for column in self))


@dataclass(frozen=True)
class PackPlan:
    """A plan that assigns segments of documents to sequences.

    sequence_offsets  (sequences + 1,) int64; sequence i has the segments with the indices
                      [sequence_offsets[i], sequence_offsets[i + 1])
    counts            {text for the log, such as "truncated": number of documents}
    left_out_tokens   number of unused tokens in documents that are longer than a sequence
    """

    sequence_length: int
    sequence_offsets: np.ndarray
    segments: Segments
    counts: dict[str, int]
    left_out_tokens: int

    @property
    def sequences(self) -> int:
        """Number of sequences in the plan."""
        return len(self.sequence_offsets) - 1

    @cached_property
    def sequence_tokens(self) -> np.ndarray:
        """Number of tokens in each sequence, without padding, int64 (sequences,)."""
        ends = np.concatenate([[0], np.cumsum(self.segments.lengths, dtype=np.int64)])
        return np.diff(ends[self.sequence_offsets])

    @property
    def one_document_each(self) -> bool:
        """True if each sequence has only one segment."""
        return len(self.segments.document) == self.sequences

    def segments_of(self, sequences: np.ndarray) -> tuple[np.ndarray, Segments]:
        """Return (index, segments) for sequence numbers: segment i is in sequences[index[i]]."""
        first = self.sequence_offsets[sequences]
        counts = self.sequence_offsets[sequences + 1] - first
        return np.arange(len(sequences)).repeat(counts), self.segments.take(ranges(first, counts))


def plan_packing(
    lengths: np.ndarray,
    sequence_length: int,
    packing: str = "best_fit",
    on_overlong: str = "split",
    *,
    has_targets: Callable[[np.ndarray, int], np.ndarray] | None = None,
    where: str = "the dataset",
) -> PackPlan:
    """Return a plan for packing documents of these lengths; equal arguments give equal plans.

    packing      best_fit: best-fit decreasing; documents that fit into a sequence are not cut
                 in_order: documents that fit into a sequence are not cut, and stay in their order
                 concat: documents stay in their order, and the end of a sequence cuts a document
                 none: each sequence has one document, or one piece of a document that is split
    on_overlong  treatment of documents longer than a sequence: error, truncate, drop, or split into
                 pieces that overlap by one token, so that each token after the first is predicted
                 exactly once
    has_targets  `TokenDataset.has_targets`. Documents that have no target after truncation are left
                 out. A target is a trained token after the first token.
    where        the dataset's name in errors

    Documents of fewer than two tokens have no target and are left out. Raises ConfigurationError if
    no document is left, or if a document is too long and on_overlong is "error".
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    long = np.flatnonzero(lengths > sequence_length)
    if long.size and on_overlong == "error":
        raise ConfigurationError(
            f"{where}: row {long[0]} has {lengths[long[0]]} tokens, more than sequence_length "
            f"{sequence_length} ({long.size} such rows); raise sequence_length, or set on_overlong "
            "to truncate or drop."
        )
    used, counts = _tokens_used(lengths, long, sequence_length, on_overlong, has_targets)
    left_out = int((lengths[long] - used[long]).sum())
    documents = np.flatnonzero(used)
    if not documents.size:
        found = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        raise ConfigurationError(
            f"{where}: no document is left to train on; of {len(lengths)}, {found}."
        )
    used = used[documents]
    if packing == "concat":
        offsets, segments = _concatenated(documents, used, sequence_length)
    else:
        segments = _pieces(documents, used, sequence_length)
        offsets = np.arange(len(segments.document) + 1)
        if packing in ("best_fit", "in_order"):
            pack = best_fit if packing == "best_fit" else in_order
            sequence_of_piece = pack(segments.lengths, sequence_length)
            segments = segments.take(np.argsort(sequence_of_piece, kind="stable"))
            offsets = np.concatenate([[0], np.cumsum(np.bincount(sequence_of_piece))])
    # Use 32 bits if they are enough: this takes half the memory.
    narrow = (
        column.astype(np.int32) if column.max(initial=0) < 2**31 else column for column in segments
    )
    return PackPlan(sequence_length, offsets, Segments(*narrow), counts, left_out)


def ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the concatenation of arange(first[i], first[i] + counts[i]) for all i, int64."""
    before = counts.cumsum() - counts
    return np.arange(int(counts.sum())) + (first - before).repeat(counts)


def _tokens_used(
    lengths: np.ndarray,
    long: np.ndarray,
    sequence_length: int,
    on_overlong: str,
    has_targets: Callable[[np.ndarray, int], np.ndarray] | None,
) -> tuple[np.ndarray, dict[str, int]]:
    """Return how many tokens of each document are used, int64 (documents,), and PackPlan's counts.

    long: the indices of the documents that are longer than a sequence
    """
    used = np.where(lengths < 2, 0, lengths)
    counts = {}
    if on_overlong == "split":
        counts["split"] = int(long.size)
    elif on_overlong == "drop":
        used[long] = 0
        counts["dropped as too long"] = int(long.size)
    elif on_overlong == "truncate":
        no_targets = long[:0] if has_targets is None else long[~has_targets(long, sequence_length)]
        used[long] = sequence_length
        used[no_targets] = 0
        counts["truncated"] = int(long.size - no_targets.size)
        counts["dropped as truncation left no token to train on"] = int(no_targets.size)
    counts["left out with a single token"] = int(np.count_nonzero(lengths < 2))
    return used, counts


def _pieces(documents: np.ndarray, lengths: np.ndarray, sequence_length: int) -> Segments:
    """Return the pieces of documents: [0, T), [T - 1, 2T - 1), ... with T = sequence_length.

    Each piece begins with the last token of the document's previous piece. So each token after the
    document's first token has a previous token in its piece and is predicted once.
    """
    stride = sequence_length - 1
    counts = (lengths - 1 + stride - 1) // stride
    start = ranges(np.zeros_like(counts), counts) * stride
    stop = np.minimum(start + sequence_length, np.repeat(lengths, counts))
    return Segments(np.repeat(documents, counts), start, stop)


def in_order(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the sequence number of each piece, int64 (pieces,). Pieces stay in their order.

    A piece that does not fit into the current sequence begins the next sequence.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    firsts = [0]  # the first piece of each sequence
    while firsts[-1] < len(lengths):
        before = ends[firsts[-1]] - lengths[firsts[-1]]
        firsts.append(int(np.searchsorted(ends, before + capacity, side="right")))
    return np.arange(len(firsts) - 1).repeat(np.diff(firsts))


def _concatenated(
    documents: np.ndarray, lengths: np.ndarray, capacity: int
) -> tuple[np.ndarray, Segments]:
    """Cut the concatenated documents into sequences; return PackPlan's offsets and segments.

    documents: indices of the documents. lengths: (documents,) integers >= 2.

    If a sequence ends inside a document, the next sequence begins with this sequence's last
    token, so that the following token is still predicted. If only the first token of a document
    would fit at the end of a sequence, the last position of the sequence stays empty.
    """
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    end_of = ends.data  # a memoryview: reading single items is faster than in a numpy array
    starts, stops = [], []  # positions in the concatenation
    start = document = 0
    while start < total:
        stop = min(start + capacity, total)
        # Find the document of the sequence's last token. Each document has at least two tokens.
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
    begins = ends - lengths
    first = np.searchsorted(begins, starts, side="right") - 1
    counts = np.searchsorted(ends, stops) + 1 - first
    index = ranges(first, counts)
    start_in = np.maximum(np.repeat(starts, counts) - begins[index], 0)
    stop_in = np.minimum(np.repeat(stops, counts) - begins[index], lengths[index])
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return offsets, Segments(documents[index], start_in, stop_in)


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the sequence number of each piece, by best-fit decreasing bin packing.

    lengths: (pieces,) integers in [1, capacity]. capacity: tokens in a sequence.

    Longer pieces are placed first, and pieces of equal length in order. A piece goes to the fullest
    sequence that has room for the piece. If no sequence has room, the piece opens a new sequence.
    Pieces of equal length are placed together. This does not change the result: a sequence that
    takes a piece remains the fullest one until it has no room for another piece of this length. The
    number of loop passes grows with the different lengths and free spaces, not with the pieces.
    """
    # numpy sorts 16-bit keys by radix, four times as fast.
    key_type = np.uint16 if capacity < 1 << 16 else np.int64
    order = np.argsort((capacity - lengths).astype(key_type), kind="stable")
    counts = np.bincount(lengths, minlength=capacity + 1)
    # Pieces are placed in batches, in the order of `order`. A batch adds equally many pieces to
    # each of its sequences. filled: the sequences of all batches. For each batch, pieces_each has
    # the number of pieces per sequence, and batch_sizes the number of sequences.
    filled: list[int] = []
    pieces_each: list[int] = []
    batch_sizes: list[int] = []
    with_free: list[list[int]] = [[] for _ in range(capacity + 1)]
    nonempty = 0  # bit f is set if with_free[f] is not empty
    opened = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            if not nonempty >> length:
                first, opened = opened, opened - (-left // (capacity // length))
                with_free[capacity] = list(range(first, opened))
                nonempty |= 1 << capacity
            fitting = nonempty >> length
            free = length + (fitting & -fitting).bit_length() - 1
            sequences = with_free[free]
            pieces = min(free // length, left)
            receivers = sequences[-(left // pieces) :]  # from the end, where a list shrinks cheaply
            del sequences[-len(receivers) :]
            if not sequences:
                nonempty &= ~(1 << free)
            filled += receivers
            pieces_each.append(pieces)
            batch_sizes.append(len(receivers))
            left -= len(receivers) * pieces
            remaining = free - pieces * length
            with_free[remaining] += receivers
            nonempty |= 1 << remaining
    sequence_of_piece = np.empty(len(lengths), dtype=np.int64)
    sequence_of_piece[order] = np.repeat(filled, np.repeat(pieces_each, batch_sizes))
    return sequence_of_piece
