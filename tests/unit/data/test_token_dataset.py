"""Saved datasets: how they are read, refused and measured, and their stoker.json."""

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict, Features, LargeList, List, Value
from hypothesis import given
from hypothesis import strategies as st
from saved_datasets import ARROW_FILE, DOCUMENTS, LABELS, MASKS, documents_of, masks_of, save

from utils.config.errors import ConfigurationError
from utils.data import description
from utils.data.arrow_columns import list_column
from utils.data.description import describe_columns
from utils.data.packing import Segments
from utils.data.token_dataset import dataset_problems, describe_split, open_token_dataset

pytestmark = pytest.mark.usefixtures("own_cache")


def test_documents_are_equal_from_any_types_lists_and_files(tmp_path):
    for dtype in ("uint8", "uint16", "int64"):
        documents = [[token % 256 for token in document] for document in DOCUMENTS]
        dataset = open_token_dataset(save(tmp_path / dtype, documents, dtype))
        assert documents_of(dataset) == documents
        assert dataset.columns["input_ids"].values[0].dtype == dtype
        assert dataset.loss_mask is None
        assert masks_of(dataset) == [[1] * len(document) for document in DOCUMENTS]
    plain, large, sharded = (
        open_token_dataset(save(tmp_path / name, labels=LABELS, **how))
        for name, how in (
            ("plain", {}), ("large", {"list_type": LargeList}), ("sharded", {"shards": 3}),
        )
    )  # fmt: skip
    for dataset in (plain, large, sharded):
        assert (documents_of(dataset), masks_of(dataset)) == (DOCUMENTS, MASKS)
        assert dataset.description == plain.description
    features = Features({"input_ids": List(Value("int32"), length=3)})
    rows = [[1, 2, 3], [4, 5, 6]]
    Dataset.from_dict({"input_ids": rows}, features=features).save_to_disk(tmp_path / "fixed")
    assert documents_of(open_token_dataset(tmp_path / "fixed")) == rows


def test_tokens_are_views_of_the_file_and_stay_out_of_pickles(tmp_path):
    before = pa.total_allocated_bytes()
    rows = [list(range(100_000))] * 3
    dataset = open_token_dataset(save(tmp_path / "big", rows, labels=rows))
    assert pa.total_allocated_bytes() - before < 100_000
    ((view,), _) = dataset.pieces(Segments(np.array([2]), np.array([1]), np.array([3])))
    assert view.tolist() == [1, 2]
    assert np.shares_memory(view, dataset.columns["input_ids"].values[0])
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 2_000
    again = pickle.loads(pickled)
    assert documents_of(again) == rows
    assert (again.description, again.loss_mask) == (dataset.description, "labels")


def test_each_kind_of_loss_mask_says_the_same(tmp_path):
    for name in ("assistant_masks", "completion_mask", "labels"):
        column = LABELS if name == "labels" else MASKS
        dataset = open_token_dataset(save(tmp_path / name, **{name: column}))
        assert (dataset.loss_mask, masks_of(dataset)) == (name, MASKS)
        for length in (1, 2, 3, 9):
            found = dataset.has_targets(np.arange(5), stop=length)
            assert found.tolist() == [any(mask[1:length]) for mask in MASKS]


def test_a_folder_of_splits_gives_its_train_split_or_the_one_named(tmp_path):
    tokens = {"train": [[1, 2]], "test": [[3, 4]]}
    splits = {name: Dataset.from_dict({"input_ids": rows}) for name, rows in tokens.items()}
    DatasetDict(splits).save_to_disk(tmp_path / "d")
    assert documents_of(open_token_dataset(tmp_path / "d")) == [[1, 2]]
    assert documents_of(open_token_dataset(tmp_path / "d" / "test")) == [[3, 4]]
    assert documents_of(open_token_dataset(tmp_path / "d", default_split="test")) == [[3, 4]]
    with pytest.raises(ConfigurationError, match="no split 'validation'; it has test, train"):
        open_token_dataset(tmp_path / "d", default_split="validation")


def test_a_missing_dataset_of_our_recipes_names_the_command_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("data/fineweb-edu-gpt2/train", "data/fineweb-edu-gpt2"):
        with pytest.raises(ConfigurationError, match=r"--config recipes/data/fineweb_edu\.yaml$"):
            open_token_dataset(folder)


def test_a_folder_that_holds_no_dataset_is_refused(tmp_path):
    for folder, message in (("none", "no such directory"), ("", "not a token dataset")):
        with pytest.raises(ConfigurationError, match=message):
            open_token_dataset(tmp_path / folder)
    path = save(tmp_path / "d")
    for state, message in (
        ('{"_data_files": [{"filename": "gone.arrow"}]}', "gone.arrow: not a whole .* missing"),
        ('{"_data_files": "x"}', "does not list file names"),
        ('{"_indices_files": [{"filename": "i.arrow"}]}', "flatten_indices"),
        ('{"_data_files": []}', "holds no documents"),
        ('{"_data_files": [{"filename": "../../b.arrow"}]}', "no path inside .*nothing was read"),
        ('{"_data_files": [{"filename": "/etc/passwd"}]}', "no path inside .*nothing was read"),
        ('{"_data_files": [{"filename": 1}]}', "no path inside"),
        ("{", "state.json is not JSON"),
    ):
        (path / "state.json").write_text(state)
        with pytest.raises(ConfigurationError, match=message):
            open_token_dataset(path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["a"]}, "no column 'input_ids'; it has text"),
        ({"input_ids": [[1.5]]}, "'input_ids' is list<.*>; it must be a list of integers"),
        ({"input_ids": [[1]], "labels": [[1]], "completion_mask": [[1]]}, "several loss masks"),
        ({"input_ids": [[1]], "prompt_mask": [[1]]}, "'prompt_mask' looks like .*completion_mask"),
        ({"input_ids": [[1]], "seq_lengths": [[1]]}, "'seq_lengths' says .* packed already"),
        ({"input_ids": [[1], None]}, "from row 0 on .it holds a null"),
        ({"input_ids": [[1], [2, 3]], "labels": [[1], [2]]}, "row 1 has another number of labels"),
    ],
)
def test_columns_without_one_meaning_are_refused(tmp_path, columns, message):
    Dataset.from_dict(columns).save_to_disk(tmp_path / "d")
    with pytest.raises(ConfigurationError, match=message):
        open_token_dataset(tmp_path / "d")


def test_files_with_different_columns_are_refused(tmp_path):
    path, other = (save(tmp_path / kind, dtype=kind, shards=2) for kind in ("int64", "int32"))
    name = "data-00001-of-00002.arrow"
    (path / name).write_bytes((other / name).read_bytes())
    with pytest.raises(ConfigurationError, match=r"its files have different columns.*int32"):
        open_token_dataset(path)


def test_a_file_cut_anywhere_is_refused_by_name(tmp_path):
    path = save(tmp_path / "d", [[1, 2, 3]] * 3)
    file = path / ARROW_FILE
    whole = file.read_bytes()
    # Without its last 8 bytes, the end-of-stream mark, it is still a valid stream.
    for size in [*range(0, len(whole), 29), len(whole) - 8]:
        file.write_bytes(whole[:size])
        with pytest.raises(ConfigurationError, match=f"{ARROW_FILE}: .*(damaged|cut short)"):
            open_token_dataset(path)


@pytest.mark.parametrize("offsets", [[0, 3, 2, 6, 10, 12], [0, 3, 4, 6, 10, 99]])
def test_damaged_offsets_are_refused(tmp_path, offsets):
    file = save(tmp_path / "d") / ARROW_FILE
    sound, damaged = (np.int32(each).tobytes() for each in ([0, 3, 4, 6, 10, 12], offsets))
    content = file.read_bytes()
    assert content.count(sound) == 1
    file.write_bytes(content.replace(sound, damaged))
    with pytest.raises(ConfigurationError, match="'input_ids' is damaged from row 0 on"):
        open_token_dataset(tmp_path / "d")


PADDED = [[5, 6, 7, 0, 0, 0, 0, 0], [5, 6, 7, 8, 9, 1, 0, 0], [3] * 3 + [0] * 5]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"input_ids": [[1], [2, 64], [99]]}, "holds token id 99, .* ends at 63"),
        ({"input_ids": [[1], [2, -1]]}, "holds token id -1; ids start at 0"),
        ({"input_ids": [[1], [], [2], []]}, "row 1 is empty"),
        ({"input_ids": [[1, 2]], "labels": [[-100, 5]]}, "neither -100 nor the input id"),
        ({"input_ids": [[1, 2]], "completion_mask": [[0, 2]]}, "other than 0 and 1 in completion"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 0]]}, "row 0 is padded"),
        (
            {"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2], [3, -100]]},
            "row 1 has no token to learn from: labels",
        ),
        ({"input_ids": PADDED}, "every row has 8 tokens and 2 of the 3 looked at end in token 0"),
        ({"input_ids": PADDED, "labels": PADDED}, "it was padded"),
        ({"input_ids": [row[::-1] for row in PADDED]}, "2 of the 3 looked at begin in token 0"),
    ],
)
def test_each_fault_is_named(tmp_path, columns, message):
    dataset = open_token_dataset(save(tmp_path / "d", **columns))
    (problem,) = dataset_problems(dataset, vocabulary_size=64, needs_loss_tokens=True)
    with pytest.raises(ConfigurationError, match=message):
        raise ConfigurationError(problem)
    assert problem.startswith(str(tmp_path / "d"))


@pytest.mark.parametrize(
    "columns",
    [
        {
            "input_ids": [[1, 2], [3, 4, 5]],
            "labels": [[-100, -100], [3, 4, 5]],
        },  # pretraining needs no trained token in every document
        # The mask says that these repeated tokens are no padding.
        {"input_ids": PADDED, "attention_mask": [[1] * 8] * 3},
        {"input_ids": [*PADDED, [1, 2]]},  # not padded to one length
        {"input_ids": np.random.default_rng(0).integers(0, 9, (200, 64)).tolist()},
    ],
)
def test_sound_datasets_have_no_problems(tmp_path, columns):
    dataset = open_token_dataset(save(tmp_path / "d", **columns))
    assert dataset_problems(dataset, 64, needs_loss_tokens=False) == []
    several = open_token_dataset(save(tmp_path / "several", [[], [-1], [99]]))
    assert len(dataset_problems(several, 64, needs_loss_tokens=False)) == 3, "all at once"


def expected_statistics(documents, masks):
    """Count the statistics one document at a time."""
    lengths = [len(document) for document in documents]
    without = [row for row, mask in enumerate(masks) if mask and not any(mask[1:])]
    return {
        "documents": len(documents),
        "tokens": sum(lengths),
        "loss_tokens": sum(map(sum, masks)),
        "longest_document": max(lengths),
        "shortest_document": min(lengths),
        "first_empty_row": lengths.index(0) if 0 in lengths else None,
        "first_row_without_loss": without[0] if without else None,
        "min_token_id": min((min(d) for d in documents if d), default=None),
        "max_token_id": max((max(d) for d in documents if d), default=None),
    }


@pytest.mark.parametrize("block_tokens", [1, 7])
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
        patch.setattr(description, "BLOCK_TOKENS", block_tokens)
        found = describe_columns(columns)
        bare = describe_columns({"input_ids": columns["input_ids"]}).statistics
    expected = expected_statistics(documents, masks)
    assert {key: getattr(found.statistics, key) for key in expected} == expected
    unmasked = expected_statistics(documents, [[1] * len(document) for document in documents])
    del unmasked["first_row_without_loss"]  # packing skips documents of one token
    assert {key: getattr(bare, key) for key in unmasked} == unmasked
    assert describe_columns(columns) == found, "whatever the size of a block"


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list, lambda value: pa.list_(value, 3)])
def test_a_mask_of_booleans_is_read_as_one_of_numbers(kind):
    masks = [[True, False, True], [False, False, True]]
    column = pa.chunked_array([pa.array(masks, type=kind(pa.bool_()))])
    found = list_column("completion_mask", column, "here")
    assert found.documents(0, 0, 2).tolist() == [1, 0, 1, 0, 0, 1]
    assert found.offsets.tolist() == [0, 3, 6]
    for name in ("input_ids", "labels"):
        with pytest.raises(ConfigurationError, match=f"column '{name}' is .*bool"):
            list_column(name, column, "here")


def test_a_fingerprint_changes_with_token_boundary_mask_and_type(tmp_path):
    others = [
        {},
        {"input_ids": [[5, 6, 8], *DOCUMENTS[1:]]},
        {"input_ids": [[5, 6, 7, 1], [], *DOCUMENTS[2:]]},
        {"dtype": "int32"},
        {"labels": LABELS},
        {"labels": [[-100, 6, -100], *LABELS[1:]]},
    ]
    found = {
        open_token_dataset(save(tmp_path / str(number), **given)).description.fingerprint
        for number, given in enumerate(others)
    }
    assert len(found) == len(others)


def test_a_plain_dataset_is_measured_once_and_again_when_it_is_rewritten(
    tmp_path, monkeypatch, caplog
):
    caplog.set_level("INFO")
    path = save(tmp_path / "d", labels=LABELS)
    before = sorted(file.name for file in path.iterdir())
    first = open_token_dataset(path)
    assert "measuring its 12 tokens once" in caplog.text
    assert sorted(file.name for file in path.iterdir()) == before, "the user's folder is left alone"
    with monkeypatch.context() as patch:
        patch.setattr(description, "describe_columns", None)
        assert open_token_dataset(path).description == first.description
    save(path, [[1, 2, 4]])
    assert open_token_dataset(path).description.statistics.max_token_id == 4


def test_a_described_split_is_opened_from_its_description(tmp_path, monkeypatch):
    path = save(tmp_path / "out" / "train", assistant_masks=MASKS)
    tokenizer = {"path": "../tokenizer", "sha256": "abc", "vocabulary_size": 301}
    described = describe_split(
        path, tokenizer=tokenizer, chat_template_sha256="def", preparation={"sources": []}
    )
    content = json.loads((path / "stoker.json").read_text())
    assert (content["format"], content["loss_mask"]) == (1, "assistant_masks")
    assert (content["tokenizer"], content["chat_template_sha256"]) == (tokenizer, "def")
    monkeypatch.setattr("utils.data.description.describe_columns", None)
    opened = open_token_dataset(tmp_path / "out")
    read, made = opened.description, described.description
    assert (read.statistics, read.fingerprint) == (made.statistics, made.fingerprint)
    assert opened.tokenizer_path == tmp_path / "out" / "tokenizer"
    for away in ("/etc", "../../tokenizer", "../tokenizer/../../tokenizer"):
        (path / "stoker.json").write_text(json.dumps(content | {"tokenizer": {"path": away}}))
        with pytest.raises(ConfigurationError, match=rf"names the tokenizer '{away}', outside of"):
            _ = open_token_dataset(tmp_path / "out").tokenizer_path
    (path / "stoker.json").write_text(json.dumps(content))
    (path / "data-00000-of-00001.arrow").rename(tmp_path / "kept.arrow")
    (path / "data-00000-of-00001.arrow").symlink_to(tmp_path / "kept.arrow")
    assert documents_of(open_token_dataset(path)) == documents_of(described), "the user's own link"
    assert opened.description.preparation == {"sources": []}
    assert not (tmp_path / "cache").exists()


def test_a_description_of_an_earlier_version_is_read_and_a_broken_one_refused(tmp_path):
    path = save(tmp_path / "d")
    before = describe_split(path)
    content = json.loads((path / "stoker.json").read_text())
    content |= {"created": "2026-11-20", "chat_template_sha256": None, "tokenizer": None}
    content["statistics"] |= {"loss_targets": 7, "max_token_row": 4}
    (path / "stoker.json").write_text(json.dumps(content))
    assert open_token_dataset(path).description == replace(
        before.description, files=content["files"], modified_ns=content["modified_ns"]
    )
    for broken in ({"format": 2}, {"statistics": {}}, {"statistics": None}):
        (path / "stoker.json").write_text(json.dumps(content | broken))
        with pytest.raises(ConfigurationError, match=r"stoker\.json: cannot be read .*delete"):
            open_token_dataset(path)


def reverse_files(path: Path) -> None:
    state = json.loads((path / "state.json").read_text())
    state["_data_files"].reverse()
    (path / "state.json").write_text(json.dumps(state))


def save_others(path: Path) -> None:
    save(path, [[1, 2], [3, 4, 5]], shards=2)


@pytest.mark.parametrize("change", [reverse_files, save_others])
def test_other_contents_than_described_are_refused(tmp_path, monkeypatch, change):
    path = save(tmp_path / "d", shards=2)
    before = describe_split(path)
    change(path)
    with pytest.raises(ConfigurationError, match=r"stoker.json describes other contents"):
        open_token_dataset(path)
    monkeypatch.setattr(
        description, "describe_columns", None
    )  # the cache already has the measurements
    (path / "stoker.json").unlink()
    assert open_token_dataset(path).description.fingerprint != before.description.fingerprint


def test_a_copy_is_measured_once_and_counts_as_described(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    path = save(tmp_path / "d", labels=LABELS)
    described = describe_split(path, preparation={"sources": []}).description
    os.utime(path / ARROW_FILE)
    opened = open_token_dataset(path)
    assert "than stoker.json says: measuring its 12 tokens once" in caplog.text
    assert opened.description.fingerprint == described.fingerprint
    assert opened.description.preparation == {"sources": []}
    monkeypatch.setattr("utils.data.description.describe_columns", None)
    assert open_token_dataset(path).description.fingerprint == described.fingerprint
    os.utime(path / ARROW_FILE, ns=(0, 0))
    monkeypatch.setattr("utils.data.token_dataset.READ_AGAIN_TOKENS", 11)
    assert open_token_dataset(path).description.fingerprint == described.fingerprint
    assert "too large to read again" in caplog.text
