"""A saved dataset as it is read, what is refused of it, what is measured, and stoker.json."""

import json
import os
import pickle
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
from utils.data.columns import list_column
from utils.data.description import measure
from utils.data.packing import Segments
from utils.data.token_dataset import dataset_problems, describe_split, open_token_dataset

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_documents_come_back_in_any_integer_type(tmp_path, dtype):
    documents = [[token % 256 for token in document] for document in DOCUMENTS]
    dataset = open_token_dataset(save(tmp_path / "d", documents, dtype))
    assert documents_of(dataset) == documents
    assert dataset.columns["input_ids"].values[0].dtype == dtype
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
    segment = Segments(np.array([3]), np.array([1]), np.array([3]))
    ((view,), _) = dataset.pieces(segment)
    assert view.tolist() == [4, 4]
    assert np.shares_memory(view, dataset.columns["input_ids"].values[0])
    before = pa.total_allocated_bytes()
    open_token_dataset(save(tmp_path / "big", [list(range(100_000))] * 3))
    assert pa.total_allocated_bytes() - before < 100_000


@pytest.mark.parametrize(
    ("name", "column"),
    [("assistant_masks", MASKS), ("completion_mask", MASKS), ("labels", LABELS)],
)
def test_each_kind_of_loss_mask_says_the_same(tmp_path, name, column):
    dataset = open_token_dataset(save(tmp_path / "d", **{name: column}))
    assert dataset.loss_mask == name
    assert masks_of(dataset) == MASKS
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


# ---- refused


def test_a_path_that_holds_no_dataset_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="no such directory"):
        open_token_dataset(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="is a file"):
        open_token_dataset(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="not a token dataset"):
        open_token_dataset(tmp_path / "empty")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"_data_files": [{"filename": "gone.arrow"}]},
            "1 of 1 data files are missing.*gone.arrow",
        ),
        ({"_data_files": "x"}, "does not list file names"),
        ({"_indices_files": [{"filename": "i.arrow"}]}, "flatten_indices"),
        ({"_data_files": []}, "holds no documents"),
    ],
)
def test_a_state_file_that_cannot_be_followed_is_refused(tmp_path, state, message):
    path = save(tmp_path / "d")
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigurationError, match=message):
        open_token_dataset(path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["a"]}, "no column 'input_ids'; it has text"),
        ({"input_ids": ["a"]}, "column 'input_ids' is string; it must be a list of integers"),
        ({"input_ids": [[1.5]]}, r"column 'input_ids' is list<item: (float|double)>"),
        ({"input_ids": [[[1]]]}, r"it must be a list of integers"),
        ({"input_ids": [[1]], "labels": [["a"]]}, "column 'labels' is"),
        (
            {"input_ids": [[1]], "labels": [[1]], "completion_mask": [[1]]},
            r"several loss masks \(completion_mask, labels\)",
        ),
        (
            {"input_ids": [[1]], "loss_mask": [[1]]},
            r"'loss_mask' looks like .*rename_column\('loss_mask', 'completion_mask'\)",
        ),
        (
            {"input_ids": [[1]], "prompt_mask": [[1]]},
            r"'prompt_mask' looks like .*\[1 - bit for bit in row\['prompt_mask'\]\]",
        ),
        ({"input_ids": [[1]], "seq_lengths": [[1]]}, "'seq_lengths' says .* packed already"),
        ({"input_ids": [[1], None]}, "row 1: input_ids is null"),
        ({"input_ids": [[1], [2], [3, None]]}, "row 2: input_ids holds a null"),
        (
            {"input_ids": [[1], [2, 3]], "labels": [[1], [2]]},
            r"row 1 has 1 labels for 2 input_ids \(1 such rows\)",
        ),
        ({"input_ids": []}, "holds no documents"),
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
    # Without its last 8 bytes it is a valid stream: only the end-of-stream mark is gone.
    for size in [*range(0, len(whole), 7), len(whole) - 8]:
        file.write_bytes(whole[:size])
        with pytest.raises(ConfigurationError, match=f"{ARROW_FILE}: .*(damaged|cut short)"):
            open_token_dataset(path)


@pytest.mark.parametrize(
    "offsets",
    [[0, 3, 2, 6, 10, 12], [0, 3, 4, 6, 10, 99], [50, 51, 52, 53, 54, 55], [-9, 3, 4, 6, 10, 12]],
)
def test_damaged_offsets_are_refused(tmp_path, offsets):
    path = save(tmp_path / "d")
    file = path / ARROW_FILE
    sound = np.array([0, 3, 4, 6, 10, 12], dtype=np.int32).tobytes()
    content = file.read_bytes()
    assert content.count(sound) == 1
    file.write_bytes(content.replace(sound, np.array(offsets, dtype=np.int32).tobytes()))
    with pytest.raises(ConfigurationError, match="'input_ids' is damaged from row 0 on"):
        open_token_dataset(path)


def test_a_sound_dataset_has_no_problems(tmp_path):
    documents, masks = DOCUMENTS[:2] + DOCUMENTS[3:], MASKS[:2] + MASKS[3:]
    dataset = open_token_dataset(
        save(
            tmp_path / "d",
            documents[:1] + documents[2:],
            assistant_masks=masks[:1] + masks[2:],
            attention_mask=[[1, 1, 1], [1, 1, 1, 1], [1, 1]],
        )
    )
    assert dataset_problems(dataset, vocabulary_size=301, needs_loss_tokens=True) == []


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"input_ids": [[1], [2, 64], [99]]}, "row 2 holds token id 99, .* ends at 63"),
        ({"input_ids": [[1], [2, 64]]}, "row 1 holds token id 64, .* ends at 63"),
        ({"input_ids": [[1], [2, -1]]}, "row 1 holds token id -1; ids start at 0"),
        ({"input_ids": [[1], [], [2], []]}, r"row 1 is empty \(2 such rows\)"),
        (
            {"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2], [-100, 5]]},
            "row 1: a label is neither -100 nor the input id",
        ),
        (
            {"input_ids": [[1, 2], [3, 4]], "completion_mask": [[0, 1], [0, 2]]},
            "row 1: completion_mask has a value other than 0 and 1",
        ),
        (
            {"input_ids": [[1, 2], [3, 4]], "attention_mask": [[1, 1], [1, 0]]},
            "row 1 is padded",
        ),
        (
            {"input_ids": [[1, 2], [3, 4], [5, 6]], "labels": [[1, 2], [-100] * 2, [5, -100]]},
            r"row 1 has no token to learn from: labels .* \(2 such rows\)",
        ),
    ],
)
def test_each_fault_is_named_with_its_row(tmp_path, columns, message):
    dataset = open_token_dataset(save(tmp_path / "d", **columns))
    (problem,) = dataset_problems(dataset, vocabulary_size=64, needs_loss_tokens=True)
    with pytest.raises(ConfigurationError, match=message):
        raise ConfigurationError(problem)
    assert problem.startswith(str(tmp_path / "d"))


PADDED = [[5, 6, 7, 0, 0, 0, 0, 0], [5, 6, 7, 8, 9, 1, 0, 0], [3] * 3 + [0] * 5]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"input_ids": PADDED}, "every row has 8 tokens and 3 of the 3 looked at end in token 0"),
        (
            {"input_ids": [row[::-1] for row in PADDED], "labels": [[-100] * 7 + [5]] * 3},
            "begin in token 0 over and over",
        ),
        ({"input_ids": PADDED, "labels": PADDED}, r"first: row 0\): it was padded"),
    ],
)
def test_padding_without_an_attention_mask_is_a_fault(tmp_path, columns, message):
    dataset = open_token_dataset(save(tmp_path / "d", **columns))
    with pytest.raises(ConfigurationError, match=message):
        raise ConfigurationError(dataset_problems(dataset, 64, needs_loss_tokens=False))


@pytest.mark.parametrize(
    "columns",
    [
        {"input_ids": PADDED, "attention_mask": [[1] * 8] * 3},  # meant, and said so
        {"input_ids": [*PADDED, [1, 2]]},  # no padding to one length
        {
            "input_ids": PADDED,
            "completion_mask": [[0, 1, 1, 1, 0, 0, 0, 0]] * 2 + [[0, 1] + [0] * 6],
        },
        {"input_ids": np.random.default_rng(0).integers(0, 9, (200, 64)).tolist()},
    ],
)
def test_what_is_not_padded_or_not_trained_on_is_no_fault(tmp_path, columns):
    dataset = open_token_dataset(save(tmp_path / "d", **columns))
    assert dataset_problems(dataset, 64, needs_loss_tokens=False) == []


def test_masked_rows_are_a_fault_only_where_loss_is_needed(tmp_path):
    dataset = open_token_dataset(save(tmp_path / "d", [[1, 2]], labels=[[-100, -100]]))
    assert dataset_problems(dataset, vocabulary_size=9, needs_loss_tokens=False) == []


def test_every_fault_is_reported_at_once(tmp_path):
    dataset = open_token_dataset(save(tmp_path / "d", [[], [-1], [99]]))
    assert len(dataset_problems(dataset, vocabulary_size=9, needs_loss_tokens=False)) == 3


# ---- measured


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
        patch.setattr(description, "BLOCK_TOKENS", block_tokens)
        found, fingerprint = measure(columns, "assistant_masks")
        bare, _ = measure({"input_ids": columns["input_ids"]}, None)
    expected = expected_statistics(documents, masks)
    assert {key: getattr(found, key) for key in expected} == expected
    without = [row for row, mask in enumerate(masks) if mask and not any(mask[1:])]
    assert found.documents_without_loss == len(without)
    assert found.first_row_without_loss == (without[0] if without else None)
    unmasked = expected_statistics(documents, [[1] * len(document) for document in documents])
    assert {key: getattr(bare, key) for key in unmasked} == unmasked
    whole, _ = measure(columns, "assistant_masks")
    assert whole == found
    assert measure(columns, "assistant_masks")[1] == fingerprint


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


# ---- described in stoker.json


def test_a_described_split_is_opened_from_its_description(tmp_path, monkeypatch):
    path = save(tmp_path / "out" / "train", assistant_masks=MASKS)
    tokenizer = {"path": "../tokenizer", "sha256": "abc", "vocabulary_size": 301}
    described = describe_split(
        path, tokenizer=tokenizer, chat_template_sha256="def", preparation={"sources": []}
    )
    content = json.loads((path / "stoker.json").read_text())
    assert content["format"] == 1
    assert content["loss_mask"] == "assistant_masks"
    assert content["files"] == {ARROW_FILE: (path / ARROW_FILE).stat().st_size}
    assert content["modified_ns"] == {ARROW_FILE: (path / ARROW_FILE).stat().st_mtime_ns}
    assert content["tokenizer"] == tokenizer
    assert content["chat_template_sha256"] == "def"
    assert content["statistics"]["documents"] == 5
    assert {"datasets", "pyarrow"} <= content["versions"].keys()
    monkeypatch.setattr("utils.data.token_dataset.measure", None)
    opened = open_token_dataset(tmp_path / "out")
    assert (opened.statistics, opened.fingerprint) == (described.statistics, described.fingerprint)
    assert opened.tokenizer_path == tmp_path / "out" / "tokenizer"
    assert opened.tokenizer_sha256 == "abc"
    assert opened.description.preparation == {"sources": []}
    assert not (tmp_path / "cache").exists()
    assert [file.name for file in path.iterdir() if "partial" in file.name] == []


def _edit_description(path: Path, **changes) -> None:
    file = path / "stoker.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": {ARROW_FILE: 1}}, rf"\(described: .*{ARROW_FILE}.: 1}}, found: .*delete stoker"),
        ({"files": None}, "described: None"),
        ({"format": 2}, "format 2; this Stoker reads format 1"),
        ({"statistics": {}}, "'documents' is missing or broken"),
        ({"loss_mask": "labels"}, "with loss mask labels; the files hold 5 with None"),
        ({"modified_ns": None}, "is missing or broken"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(tmp_path, changes, message):
    path = save(tmp_path / "d")
    describe_split(path)
    _edit_description(path, **changes)
    with pytest.raises(ConfigurationError, match=message):
        open_token_dataset(path)


def test_a_description_that_is_no_json_is_refused(tmp_path):
    path = save(tmp_path / "d")
    (path / "stoker.json").write_text("[]")
    with pytest.raises(ConfigurationError, match="not a JSON object"):
        open_token_dataset(path)
    (path / "stoker.json").write_text("{")
    with pytest.raises(ConfigurationError, match="cannot be read as JSON"):
        open_token_dataset(path)


def edit_in_place(file: Path, old: list[int], new: list[int]) -> None:
    """Put other int64 values where `old` ones are, as an editor of bytes would."""
    values = [np.array(each, dtype="int64").tobytes() for each in (old, new)]
    content = file.read_bytes()
    assert content.count(values[0]) == 1
    file.write_bytes(content.replace(*values))


@pytest.mark.parametrize("shards", [1, 3])
def test_a_token_that_changed_in_place_is_found(tmp_path, monkeypatch, shards):
    path = save(tmp_path / "d", shards=shards)
    before = describe_split(path)
    last = f"data-{shards - 1:05d}-of-{shards:05d}.arrow"
    edit_in_place(path / last, [2, 300], [2, 299])
    told = rf"fingerprint: {before.fingerprint} described, \w+ found; changed .*: {last}\)"
    with pytest.raises(ConfigurationError, match=told):
        open_token_dataset(path)
    monkeypatch.setattr("utils.data.token_dataset.measure", None)  # it is known from now on
    with pytest.raises(ConfigurationError, match=told):
        open_token_dataset(path)
    (path / "stoker.json").unlink()
    assert open_token_dataset(path).fingerprint != before.fingerprint


def test_files_in_another_order_are_found(tmp_path):
    path = save(tmp_path / "d", [[1, 2], [3, 4]], shards=2)
    describe_split(path)
    state = json.loads((path / "state.json").read_text())
    state["_data_files"].reverse()
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigurationError, match=r"other contents .* \(fingerprint: "):
        open_token_dataset(path)


def _copied(path: Path) -> None:
    os.utime(path / ARROW_FILE)


def _of_an_earlier_version(path: Path) -> None:
    content = json.loads((path / "stoker.json").read_text())
    del content["modified_ns"]
    (path / "stoker.json").write_text(json.dumps(content))


@pytest.mark.parametrize("what_happened", [_copied, _of_an_earlier_version])
def test_what_may_have_changed_is_measured_once(tmp_path, monkeypatch, caplog, what_happened):
    caplog.set_level("INFO")
    path = save(tmp_path / "d", labels=LABELS)
    described = describe_split(path, preparation={"sources": []})
    what_happened(path)
    opened = open_token_dataset(path)
    assert f"described it (first: {ARROW_FILE}): measuring its 12 tokens once" in caplog.text
    assert (opened.statistics, opened.fingerprint) == (described.statistics, described.fingerprint)
    assert opened.description.preparation == {"sources": []}
    monkeypatch.setattr("utils.data.token_dataset.measure", None)
    assert open_token_dataset(path).fingerprint == described.fingerprint


def test_what_is_too_large_to_be_read_again_counts_as_described_with_a_log_line(
    tmp_path, monkeypatch, caplog
):
    path = save(tmp_path / "d", [[2, 300], [4, 5]])
    described = describe_split(path)
    edit_in_place(path / ARROW_FILE, [2, 300], [2, 299])
    monkeypatch.setattr("utils.data.token_dataset.READ_AGAIN_TOKENS", 3)
    assert open_token_dataset(path).fingerprint == described.fingerprint
    assert "it has too many tokens (4) to read them again" in caplog.text
    monkeypatch.setattr("utils.data.token_dataset.READ_AGAIN_TOKENS", 4)
    with pytest.raises(ConfigurationError, match="describes other contents"):
        open_token_dataset(path)
