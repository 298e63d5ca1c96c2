"""What is no dataset, is damaged or cannot be trained on: refused by name and row."""

import json
from dataclasses import replace

import numpy as np
import pytest
from datasets import Dataset
from saved_datasets import ARROW_FILE, DOCUMENTS, MASKS, save

from utils.config.errors import ConfigurationError
from utils.data import statistics
from utils.data.token_dataset import dataset_problems, open_token_dataset

pytestmark = pytest.mark.usefixtures("own_cache")


def test_a_path_that_holds_no_dataset_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="no such directory"):
        open_token_dataset(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="is a file"):
        open_token_dataset(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="not a token dataset"):
        open_token_dataset(tmp_path / "empty")
    (tmp_path / "empty" / "dataset_dict.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="no split is; copy the whole folder"):
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
    path = save(tmp_path / "d", shards=2)
    other = save(tmp_path / "other", dtype="int32", shards=2)
    name = "data-00001-of-00002.arrow"
    (path / name).write_bytes((other / name).read_bytes())
    with pytest.raises(ConfigurationError, match=rf"{name}: its columns .*int32.*int64"):
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
    with pytest.raises(ConfigurationError, match="broken list offsets from row 0 on"):
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


def test_statistics_survive_their_json_form():
    full = replace(statistics.Statistics(documents=3), first_empty_row=2)
    assert statistics.Statistics.from_dict(json.loads(json.dumps(full.as_dict()))) == full
