"""stoker.json: when it speaks for the files beside it, and when they are measured again."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from saved_datasets import ARROW_FILE, LABELS, MASKS, save

from utils.config.errors import ConfigurationError
from utils.data.token_dataset import describe_split, open_token_dataset

pytestmark = pytest.mark.usefixtures("own_cache")


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
        ({"files": {ARROW_FILE: 1}}, rf"{ARROW_FILE}: 1 bytes described, \d+ found.*delete stoker"),
        ({"files": None}, "it lists no files"),
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


def test_what_is_too_large_to_be_read_again_counts_as_described_aloud(
    tmp_path, monkeypatch, caplog
):
    path = save(tmp_path / "d", [[2, 300], [4, 5]])
    described = describe_split(path)
    edit_in_place(path / ARROW_FILE, [2, 300], [2, 299])
    monkeypatch.setattr("utils.data.token_dataset.READ_AGAIN_TOKENS", 3)
    assert open_token_dataset(path).fingerprint == described.fingerprint
    assert "its 4 tokens are too many to be read again before a start" in caplog.text
    monkeypatch.setattr("utils.data.token_dataset.READ_AGAIN_TOKENS", 4)
    with pytest.raises(ConfigurationError, match="describes other contents"):
        open_token_dataset(path)
