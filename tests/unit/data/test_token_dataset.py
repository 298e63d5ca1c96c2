"""A saved dataset as it is read: any type and layout, the same documents, views of the files."""

import pickle

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict, Features, LargeList, List, Value
from hypothesis import given
from hypothesis import strategies as st
from saved_datasets import DOCUMENTS, LABELS, MASKS, documents_of, masks_of, save

from utils.config.errors import ConfigurationError
from utils.data.columns import list_column
from utils.data.token_dataset import open_token_dataset

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_documents_come_back_in_any_integer_type(tmp_path, dtype):
    documents = [[token % 256 for token in document] for document in DOCUMENTS]
    dataset = open_token_dataset(save(tmp_path / "d", documents, dtype))
    assert documents_of(dataset) == documents
    assert dataset.tokens(0).dtype == dtype
    assert dataset.lengths.tolist() == [3, 1, 2, 4, 2]
    assert dataset.lengths.dtype == np.int64
    assert dataset.loss_mask is None
    assert masks_of(dataset) == [[1] * len(document) for document in DOCUMENTS]


def test_large_list_and_several_files_read_as_the_same_documents(tmp_path):
    plain = open_token_dataset(save(tmp_path / "plain", labels=LABELS))
    large = open_token_dataset(save(tmp_path / "large", list_type=LargeList, labels=LABELS))
    sharded = open_token_dataset(save(tmp_path / "sharded", shards=3, labels=LABELS))
    assert documents_of(large) == documents_of(sharded) == documents_of(plain) == DOCUMENTS
    assert masks_of(large) == masks_of(sharded) == masks_of(plain) == MASKS
    assert large.statistics == sharded.statistics == plain.statistics
    assert large.fingerprint == sharded.fingerprint == plain.fingerprint


def test_rows_of_one_fixed_length_are_read(tmp_path):
    features = Features({"input_ids": List(Value("int32"), length=3)})
    rows = [[1, 2, 3], [4, 5, 6]]
    Dataset.from_dict({"input_ids": rows}, features=features).save_to_disk(tmp_path / "d")
    assert documents_of(open_token_dataset(tmp_path / "d")) == rows


@given(
    documents=st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=12),
    data=st.data(),
)
def test_sliced_and_chunked_columns_are_the_documents(documents, data):
    bounds = st.integers(0, len(documents))
    start, cut = sorted([data.draw(bounds), data.draw(bounds)])
    kind = data.draw(st.sampled_from([pa.list_(pa.uint16()), pa.large_list(pa.int64())]))
    whole = pa.array(documents, type=kind)
    chunks = [whole.slice(start, cut - start), whole.slice(cut), whole.slice(0, start)]
    expected = documents[start:] + documents[:start]
    column = list_column("input_ids", pa.chunked_array(chunks, type=kind), "here")
    lengths = np.diff(column.offsets)
    whole = column.bounds(np.arange(len(lengths)), np.zeros_like(lengths), lengths)
    views = column.pieces(whole)
    assert [view.tolist() for view in views] == expected


def test_tokens_are_views_of_the_file_not_copies(tmp_path):
    dataset = open_token_dataset(save(tmp_path / "d"))
    view = dataset.tokens(3, 1, 3)
    assert view.tolist() == [4, 4]
    assert not view.flags.owndata
    assert np.shares_memory(view, dataset.columns["input_ids"].values[0])
    before = pa.total_allocated_bytes()
    open_token_dataset(save(tmp_path / "big", [list(range(100_000))] * 3))
    assert pa.total_allocated_bytes() - before < 100_000


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (2, 1), (-1, 2)])
def test_a_range_outside_the_document_is_an_index_error(tmp_path, start, stop):
    dataset = open_token_dataset(save(tmp_path / "d"))
    with pytest.raises(IndexError, match="which has 3 tokens"):
        dataset.tokens(0, start, stop)


@pytest.mark.parametrize(
    ("name", "column"),
    [("assistant_masks", MASKS), ("completion_mask", MASKS), ("labels", LABELS)],
)
def test_each_kind_of_loss_mask_says_the_same(tmp_path, name, column):
    dataset = open_token_dataset(save(tmp_path / "d", **{name: column}))
    assert dataset.loss_mask == name
    assert masks_of(dataset) == MASKS
    assert dataset.loss_mask_of(3, 2, 4).tolist() == [False, True]
    for length in (1, 2, 3, 9):
        found = dataset.has_targets(np.arange(5), stop=length)
        assert found.tolist() == [any(mask[1:length]) for mask in MASKS]


def test_a_folder_of_splits_gives_its_train_split_or_the_one_named(tmp_path):
    splits = DatasetDict(
        {
            "train": Dataset.from_dict({"input_ids": [[1, 2]]}),
            "test": Dataset.from_dict({"input_ids": [[3, 4]]}),
        }
    )
    splits.save_to_disk(tmp_path / "d")
    assert documents_of(open_token_dataset(tmp_path / "d")) == [[1, 2]]
    assert documents_of(open_token_dataset(tmp_path / "d" / "test")) == [[3, 4]]
    assert documents_of(open_token_dataset(tmp_path / "d", default_split="test")) == [[3, 4]]
    with pytest.raises(ConfigurationError, match="no split 'validation'; it has test, train"):
        open_token_dataset(tmp_path / "d", default_split="validation")


def test_a_pickled_dataset_reopens_its_files_and_carries_no_tokens(tmp_path):
    dataset = open_token_dataset(
        save(tmp_path / "d", [list(range(10_000))], labels=[list(range(10_000))])
    )
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 2_000
    again = pickle.loads(pickled)
    assert documents_of(again) == documents_of(dataset)
    assert (again.statistics, again.loss_mask) == (dataset.statistics, "labels")
