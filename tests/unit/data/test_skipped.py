"""skip_documents: the forms of the file, and batches in which skipped documents are padding."""

import json

import numpy as np
import pytest
import torch
from saved_datasets import DOCUMENTS, MASKS, save

from utils.config.errors import ConfigurationError
from utils.data.loader import PackedDataset
from utils.data.packing import plan_packing
from utils.data.token_dataset import open_token_dataset, read_skipped

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def datasets(tmp_path):
    """Two datasets; the path of one ends in train, and the other has a blank in its path."""
    paths = tmp_path / "web" / "train", tmp_path / "my code"
    return [open_token_dataset(save(path, completion_mask=MASKS)) for path in paths]


def skipped(datasets, file, *lines):
    file.write_text("\n".join(lines))
    return [rows.tolist() for rows in read_skipped(str(file), datasets)]


def test_both_forms_of_a_line_name_a_document(datasets, tmp_path, monkeypatch):
    file, (web, code) = tmp_path / "skip", (str(dataset.path) for dataset in datasets)
    line = json.dumps({"loss": 9.1, "dataset": code, "document": 4, "text": "{a b}"})
    assert skipped(datasets, file, line, "", f"{code} 0", line) == [[], [0, 4]]
    by_jq = json.dumps({"dataset": web, "document": 3}, separators=(",", ":"))
    assert skipped(datasets, file, by_jq, f"  {by_jq}") == [[3], []]
    made = {"dataset": web, "document": 3, "fingerprint": datasets[0].description.fingerprint}
    assert skipped(datasets, file, json.dumps(made)) == [[3], []]
    monkeypatch.chdir(tmp_path)
    assert skipped(datasets, file, f"{web} 2", "web 1", "web/train 2\r") == [[1, 2], []]
    assert [rows.tolist() for rows in read_skipped(None, datasets)] == [[], []]


@pytest.mark.parametrize(
    "line",
    [
        "WEB 5", "WEB -1", "WEB x", "WEB", "other 1", '{"dataset": "WEB"}', "{", "[1]", "1",
        '{"dataset": "WEB", "document": 1.7}', '{"dataset": "WEB", "document": 1e999}',
        '{"dataset": "WEB", "document": 1, "fingerprint": "of other data"}',
        "~no-such-user 1", '{"a": ' * 20000 + " 1",
    ],
)  # fmt: skip
def test_a_faulty_line_is_named_with_what_the_run_trains_on(datasets, tmp_path, line):
    web, file = str(datasets[0].path), tmp_path / "skip"
    with pytest.raises(ConfigurationError, match=r"skip, line 2: ") as caught:
        skipped(datasets, file, f"{web} 1", line.replace("WEB", web))
    assert f"{web} has rows 0 to 4" in str(caught.value)
    with pytest.raises(ConfigurationError, match=r"no-file: cannot be read: .*No such file"):
        read_skipped(str(tmp_path / "no-file"), datasets)


@pytest.mark.parametrize("packing", ["best_fit", "concat", "none"])
def test_skipped_documents_become_padding_at_the_end_of_their_sequence(datasets, packing):
    """Padding is no token for the load balance of experts, so sequence_tokens leaves it out."""
    plans = [plan_packing(dataset.lengths, 4, packing) for dataset in datasets]
    rows = [np.array([3]), np.array([0, 4])]
    plain, without = (PackedDataset(datasets, plans, 999, skipped=given) for given in ([], rows))
    for sequence in range(len(plain)):
        whole, cut = plain.__getitems__([sequence]), without.__getitems__([sequence])
        parts = plain.documents_in(np.array([sequence]))
        source = int(sequence >= plain.first_of_source[1])
        kept = np.array([part.document not in rows[source] for part in parts])
        lengths = np.array([part.stop - part.start for part in parts])
        left = np.zeros(4, dtype=bool)
        left[: lengths.sum()] = kept.repeat(lengths)
        ids, mask = (whole[name].numpy().flatten()[left] for name in ("input_ids", "loss_mask"))
        free = 4 - len(ids)
        assert cut["input_ids"].tolist() == [[*ids, *[999] * free]]
        assert cut["loss_mask"].tolist() == [[*mask, *[False] * free]]
        assert cut["sequence_tokens"].tolist() == [len(ids)]
        bounds = np.cumsum([0, *lengths[kept], *[free] * bool(free)])
        assert cut["cu_seq_lens"].tolist() == bounds.tolist()
        assert torch.equal(cut["sources"], whole["sources"])
        positions = cut["loss_mask"].flatten().nonzero().flatten() - 1
        assert cut["loss_positions"].tolist() == positions.tolist()
    everything = [np.arange(len(dataset)) for dataset in datasets]
    empty = PackedDataset(datasets, plans, 999, skipped=everything).__getitems__([0, 1])
    assert empty["cu_seq_lens"].tolist() == [0, 4, 8]
    assert not empty["loss_mask"].any()
    assert len(DOCUMENTS) == 5, "the rows above are those of this dataset"
