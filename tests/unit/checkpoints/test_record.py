"""The record of a run: a damaged file is replaced by its copy in a checkpoint."""

import json
import shutil
from pathlib import Path

import pytest
from made import RUN, commit, write_files

from utils.checkpoints.record import RunRecord, copy_record, is_run
from utils.config.errors import ConfigurationError

STARTS = [{"script": "pretrain.py"}, {"script": "pretrain.py", "resumed_from": "checkpoint-2"}]


def write_record(run: Path, starts: list[dict]) -> None:
    (run / "config.yaml").write_text("seed: 1\n")
    (run / "provenance.json").write_text(json.dumps({"run_id": RUN, "starts": starts}))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Make a run of two starts; its checkpoint has the record of the first start."""
    write_record(tmp_path, STARTS[:1])
    copy_record(tmp_path, write_files(tmp_path, 2))
    commit(tmp_path, 2)
    write_record(tmp_path, STARTS)
    return tmp_path


def test_a_whole_record_counts_although_its_copy_is_older(run):
    record = RunRecord(run)
    assert (record.run_id, record.starts, record.settings) == (RUN, STARTS, {"seed": 1})
    assert record.damage == {}


@pytest.mark.parametrize("content", [None, "{", json.dumps({"run_id": RUN, "starts": []})])
def test_a_damaged_file_is_replaced_by_its_copy(run, content):
    for name in ("config.yaml", "provenance.json"):
        (run / name).unlink()
        if content is not None:
            (run / name).write_text(content)
    record = RunRecord(run)
    assert record.exists
    assert (record.run_id, record.starts, record.settings) == (RUN, STARTS[:1], {"seed": 1})
    assert record.damage.keys() == {"config.yaml", "provenance.json"}
    record.restore()
    assert RunRecord(run).damage == {}
    assert RunRecord(run).settings == {"seed": 1}


def test_the_copies_are_read_once(run):
    """Hashing the copies again would be slow, and a reader should see one state of the run."""
    (run / "provenance.json").unlink()
    record = RunRecord(run)
    assert record.exists
    copies = record._copies
    shutil.move(run / "checkpoint-2" / "manifest.json", run / "manifest.json")
    assert record._copies is copies
    assert record.starts == STARTS[:1]
    assert not RunRecord(run).exists


def test_without_a_whole_copy_damage_is_an_error_that_names_the_weights(run):
    (run / "checkpoint-2/run/config.yaml").write_text("seed: 2\n")
    (run / "provenance.json").write_text("{")
    record = RunRecord(run)
    assert record.settings == {"seed": 1}
    assert "no checkpoint here has a whole copy" in record.damage["provenance.json"]
    with pytest.raises(ConfigurationError, match=r"--init_from \S+/checkpoint-2 with another"):
        record.starts  # noqa: B018 - reading it is what is tested


@pytest.mark.parametrize("is_damaged", [False, True])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("provenance.json", "{}"),
        ("provenance.json", json.dumps({"run_id": "../x", "starts": []})),
        ("provenance.json", json.dumps({"run_id": RUN, "starts": [{"argv": 1}]})),
        ("config.yaml", "["),
    ],
)
def test_a_committed_copy_that_cannot_be_parsed_is_no_copy(run, name, content, is_damaged):
    """A save goes on, and a page shows the run."""
    whole = (run / name).read_text()
    (run / name).write_text(content)
    (write_files(run, 3) / "run").mkdir()
    for each in ("config.yaml", "provenance.json"):
        shutil.copy(run / each, run / "checkpoint-3/run")
    commit(run, 3)
    if not is_damaged:
        (run / name).write_text(whole)
    record = RunRecord(run)
    assert bool(record.damage) == is_damaged
    assert record._copies == run / "checkpoint-2/run"
    copy_record(run, write_files(run, 4))
    assert RunRecord(run).settings == {"seed": 1}


def test_a_copy_without_a_run_id_is_read(run):
    (run / "provenance.json").write_text(json.dumps({"starts": STARTS}))
    (write_files(run, 3) / "run").mkdir()
    for name in ("config.yaml", "provenance.json"):
        shutil.copy(run / name, run / "checkpoint-3/run")
    commit(run, 3)
    assert RunRecord(run).damage == {}


def test_a_new_directory_has_no_record(tmp_path):
    record = RunRecord(tmp_path)
    assert not record.exists
    assert not is_run(tmp_path)
    assert (record.run_id, record.starts, record.damage) == (None, [], {})


def test_a_viewer_reads_what_is_left_of_a_record(run):
    (run / "checkpoint-2/manifest.json").unlink()
    (run / "provenance.json").write_text("{")
    record = RunRecord(run, lenient=True)
    assert (record.run_id, record.starts, record.settings) == (None, [], {"seed": 1})
    assert "no checkpoint here has a whole copy" in record.damage["provenance.json"]
    (run / "config.yaml").write_text("[")
    assert RunRecord(run, lenient=True).settings == {}
