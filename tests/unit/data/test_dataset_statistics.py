"""What is counted of a dataset, its fingerprint, and the cache of both."""

import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from saved_datasets import DOCUMENTS, LABELS, save

from utils.data import statistics
from utils.data.columns import list_column
from utils.data.token_dataset import open_token_dataset

pytestmark = pytest.mark.usefixtures("own_cache")


def expected_statistics(documents, masks):
    """Count one document at a time."""
    lengths = [len(document) for document in documents]
    targets = [sum(mask[1:]) for mask in masks]
    return {
        "documents": len(documents),
        "tokens": sum(lengths),
        "loss_tokens": sum(map(sum, masks)),
        "loss_targets": sum(targets),
        "longest_document": max(lengths),
        "shortest_document": min(lengths),
        "empty_documents": lengths.count(0),
        "first_empty_row": lengths.index(0) if 0 in lengths else None,
        "min_token_id": min((min(d) for d in documents if d), default=None),
        "max_token_id": max((max(d) for d in documents if d), default=None),
    }


@pytest.mark.parametrize("block_tokens", [1, 7, 1 << 20])
@given(
    pairs=st.lists(
        st.lists(st.tuples(st.integers(0, 50), st.integers(0, 1)), max_size=6),
        min_size=1,
        max_size=15,
    ),
    chunk_rows=st.integers(1, 6),
)
def test_statistics_equal_a_count_document_by_document(block_tokens, pairs, chunk_rows):
    documents = [[token for token, _ in pair] for pair in pairs]
    masks = [[bit for _, bit in pair] for pair in pairs]
    columns = {}
    for name, rows in (("input_ids", documents), ("assistant_masks", masks)):
        kind = pa.list_(pa.int32())
        chunks = [rows[i : i + chunk_rows] for i in range(0, len(rows), chunk_rows)]
        table = pa.chunked_array([pa.array(chunk, type=kind) for chunk in chunks])
        columns[name] = list_column(name, table, "here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "BLOCK_TOKENS", block_tokens)
        found, fingerprint = statistics.measure(columns, "assistant_masks")
        bare, _ = statistics.measure({"input_ids": columns["input_ids"]}, None)
    expected = expected_statistics(documents, masks)
    assert {key: getattr(found, key) for key in expected} == expected
    without = [row for row, mask in enumerate(masks) if mask and not any(mask[1:])]
    assert found.documents_without_loss == len(without)
    assert found.first_row_without_loss == (without[0] if without else None)
    unmasked = expected_statistics(documents, [[1] * len(document) for document in documents])
    assert {key: getattr(bare, key) for key in unmasked} == unmasked
    whole, _ = statistics.measure(columns, "assistant_masks")
    assert whole == found
    assert statistics.measure(columns, "assistant_masks")[1] == fingerprint


@pytest.mark.parametrize(
    "changed",
    [
        {"input_ids": [[5, 6, 8], [1], [9, 8], [4, 4, 4, 4], [2, 300]]},
        {"input_ids": [[5, 6, 7, 1], [], [9, 8], [4, 4, 4, 4], [2, 300]], "labels": None},
        {"labels": [[-100, 6, -100], *LABELS[1:]]},
        {"dtype": "int32"},
    ],
)
def test_a_fingerprint_changes_with_token_boundary_mask_and_type(tmp_path, changed):
    base = {"input_ids": DOCUMENTS, "dtype": "int64", "labels": LABELS} | (
        {"labels": None} if "labels" in changed and changed["labels"] is None else {}
    )
    both = [
        {key: value for key, value in arguments.items() if value is not None}
        for arguments in (base, base | changed)
    ]
    first = open_token_dataset(save(tmp_path / "a", **both[0]))
    second = open_token_dataset(save(tmp_path / "b", **both[1]))
    assert first.fingerprint != second.fingerprint


def test_statistics_of_a_plain_dataset_are_measured_once_and_cached(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    path = save(tmp_path / "d", labels=LABELS)
    before = sorted(file.name for file in path.iterdir())
    first = open_token_dataset(path)
    assert "measuring its 12 tokens once" in caplog.text
    assert sorted(file.name for file in path.iterdir()) == before, "the user's folder is left alone"
    monkeypatch.setattr("utils.data.token_dataset.measure", None)
    second = open_token_dataset(path)
    assert (second.statistics, second.fingerprint) == (first.statistics, first.fingerprint)
    monkeypatch.undo()


def test_a_rewritten_dataset_is_measured_again(tmp_path):
    path = save(tmp_path / "d", [[1, 2, 3]])
    assert open_token_dataset(path).statistics.max_token_id == 3
    save(path, [[1, 2, 4]])
    assert open_token_dataset(path).statistics.max_token_id == 4


def test_a_broken_cache_entry_is_said_and_replaced(tmp_path, caplog):
    path = save(tmp_path / "d")
    expected = open_token_dataset(path).statistics
    (entry,) = (tmp_path / "cache" / "stoker").rglob("*.json")
    entry.write_text("{")
    assert open_token_dataset(path).statistics == expected
    assert "it is made again" in caplog.text
    assert json.loads(entry.read_text())["statistics"]["documents"] == 5


def test_a_cache_that_cannot_be_written_is_said_and_tolerated(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert open_token_dataset(save(tmp_path / "d")).statistics.documents == 5
    assert "every start works it out again" in caplog.text
