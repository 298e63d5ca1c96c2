"""Assign pieces of documents to rows of a fixed capacity; lengths only, no token is touched."""

from bisect import bisect_left

import numpy as np


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
