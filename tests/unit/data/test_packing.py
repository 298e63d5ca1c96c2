from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from utils.config.errors import ConfigurationError
from utils.data.packing import best_fit, plan_packing

PACKINGS = ("best_fit", "in_order", "concat", "none")
LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(lambda x: max(x) >= 2)
ROW_LENGTH = st.integers(2, 24)


def plan(lengths, *arguments, **keywords):
    return plan_packing(np.array(lengths, dtype=np.int64), *arguments, **keywords)


def rows_of(packed):
    rows = [[] for _ in range(packed.sequences)]
    numbers, segments = packed.segments_of(np.arange(packed.sequences))
    for row, *segment in zip(numbers.tolist(), *map(np.ndarray.tolist, segments), strict=True):
        rows[row].append(tuple(segment))
    return rows


def targets_of(rows):
    """Count (document, position) of every token whose previous token is in the same segment."""
    return Counter(
        (document, position)
        for row in rows
        for document, start, stop in row
        for position in range(start + 1, stop)
    )


def best_fit_by_the_book(lengths, capacity):
    """Return the used space of each sequence, by a simple best fit that tries every sequence."""
    used = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in range(len(used)) if used[row] + length <= capacity]
        if fitting:
            used[max(fitting, key=used.__getitem__)] += length
        else:
            used.append(length)
    return used


@pytest.mark.parametrize("packing", PACKINGS)
@given(lengths=LENGTHS, row_length=ROW_LENGTH)
def test_every_target_of_every_document_is_there_exactly_once(packing, lengths, row_length):
    packed = plan(lengths, row_length, packing)
    rows = rows_of(packed)
    expected = Counter(
        (document, position)
        for document, length in enumerate(lengths)
        for position in range(1, length)
    )
    assert targets_of(rows) == expected
    for row in rows:
        assert 0 < sum(stop - start for _, start, stop in row) <= row_length
        assert all(stop - start >= 2 for _, start, stop in row), "no place without a target"
    assert packed.counts == {
        "split": sum(length > row_length for length in lengths),
        "left out with a single token": sum(length < 2 for length in lengths),
    }
    tokens = [sum(stop - start for _, start, stop in row) for row in rows]
    assert packed.sequence_tokens.tolist() == tokens
    chosen = np.array([packed.sequences - 1, 0, packed.sequences // 2])
    _, segments = packed.segments_of(chosen)
    found = list(zip(*map(np.ndarray.tolist, segments), strict=True))
    assert found == [segment for row in chosen for segment in rows[row]]


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60), capacity=st.integers(20, 50))
def test_best_fit_fills_rows_as_the_textbook_does(lengths, capacity):
    rows = best_fit(np.array(lengths), capacity)
    used = np.bincount(rows, weights=lengths).astype(int).tolist()
    assert sorted(used) == sorted(best_fit_by_the_book(lengths, capacity))


@given(lengths=LENGTHS, row_length=ROW_LENGTH)
def test_what_is_cut_and_how_full_rows_are(lengths, row_length):
    for packing in ("best_fit", "none"):
        for row in rows_of(plan(lengths, row_length, packing)):
            for document, start, stop in row:
                assert lengths[document] > row_length or (start, stop) == (0, lengths[document])
    packed = plan(lengths, row_length, "concat")
    segments = [segment for row in rows_of(packed) for segment in row]
    assert segments == sorted(segments)
    # One token may stay free if only the first token of a document would fit.
    assert (packed.sequence_tokens[:-1] >= row_length - 1).all()


def test_plans_written_out():
    assert rows_of(plan([3, 3, 3, 3], 6)) == [[(0, 0, 3), (1, 0, 3)], [(2, 0, 3), (3, 0, 3)]]
    packed = plan([3, 6, 1, 2], 4, "none")
    assert rows_of(packed) == [[(0, 0, 3)], [(1, 0, 4)], [(1, 3, 6)], [(3, 0, 2)]]
    assert packed.one_document_each
    assert plan([8, 8], 8).one_document_each
    assert not plan([5, 8, 3], 8).one_document_each


@given(LENGTHS, ROW_LENGTH)
def test_in_order_keeps_documents_whole_and_in_their_order(lengths, row_length):
    rows = rows_of(plan(lengths, row_length, "in_order"))
    pieces = [piece for row in rows for piece in row]
    assert pieces == [piece for row in rows_of(plan(lengths, row_length, "none")) for piece in row]
    used = [sum(stop - start for _, start, stop in row) for row in rows]
    assert max(used) <= row_length
    for before, row in zip(used, rows[1:], strict=False):
        _, start, stop = row[0]
        assert before + stop - start > row_length, "its first piece fits the sequence before"


def test_overlong_documents_can_be_truncated_but_not_to_nothing_to_learn():
    asked = []

    def has_targets(documents, stop):
        asked.append((documents.tolist(), stop))
        return documents != 3

    packed = plan([3, 9, 4, 7], 4, "none", "truncate")
    assert rows_of(packed) == [[(0, 0, 3)], [(1, 0, 4)], [(2, 0, 4)], [(3, 0, 4)]]
    assert (packed.counts["truncated"], packed.left_out_tokens) == (2, 8)
    packed = plan([3, 9, 4, 7], 4, "none", "truncate", has_targets=has_targets)
    assert asked == [([1, 3], 4)], "only truncated documents are looked at"
    assert rows_of(packed) == [[(0, 0, 3)], [(1, 0, 4)], [(2, 0, 4)]]
    assert packed.counts["truncated"] == 1
    assert packed.counts["dropped as truncation left no token to train on"] == 1
    assert packed.left_out_tokens == 5 + 7


def test_overlong_documents_can_be_dropped_or_refused():
    packed = plan([3, 9, 4, 7], 4, "none", "drop")
    assert rows_of(packed) == [[(0, 0, 3)], [(2, 0, 4)]]
    assert (packed.counts["dropped as too long"], packed.left_out_tokens) == (2, 16)
    with pytest.raises(ConfigurationError, match=r"data/x: row 1 has 9 tokens.*4 \(2 such rows\)"):
        plan([3, 9, 4, 7], 4, on_overlong="error", where="data/x")
    assert plan([3, 4, 4], 4, on_overlong="error").sequences == 3
    with pytest.raises(ConfigurationError, match=r"no document is left.*of 1, 1 dropped as too"):
        plan([9], 4, on_overlong="drop")
