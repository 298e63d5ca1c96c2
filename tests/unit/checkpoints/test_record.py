"""The record of a run: a damaged file is replaced by its copy in a checkpoint.

tests/integration/test_damaged_records.py resumes whole runs with damaged records.
"""

import json
import shutil
from pathlib import Path

import pytest
from made import RUN, commit, write_files

from utils.checkpoints.record import RunRecord, copy_record, is_run
from utils.config.errors import ConfigurationError

STARTS = [{"script": "pretrain.py"}, {"script": "pretrain.py", "resumed_from": "checkpoint-2"}]
NAMES = ("config.yaml", "provenance.json")


def write_record(run: Path, starts: list[dict]) -> None:
    (run / "config.yaml").write_text("seed: 1\n")
    (run / "provenance.json").write_text(json.dumps({"run_id": RUN, "starts": starts}))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Make a run of two starts; its checkpoint has the record of the first start."""
    assert not is_run(tmp_path)
    record = RunRecord(tmp_path)
    assert (record.exists, record.run_id, record.starts, record.damage) == (False, None, [], {})
    write_record(tmp_path, STARTS[:1])
    copy_record(tmp_path, write_files(tmp_path, 2))
    commit(tmp_path, 2)
    write_record(tmp_path, STARTS)
    record = RunRecord(tmp_path)
    assert (record.run_id, record.starts, record.settings) == (RUN, STARTS, {"seed": 1})
    assert record.damage == {}, "although the copy is older"
    return tmp_path


@pytest.mark.parametrize("content", [None, "{", json.dumps({"run_id": RUN, "starts": []})])
def test_a_damaged_file_is_replaced_by_its_copy(run, content):
    for name in NAMES:
        (run / name).unlink()
        if content is not None:
            (run / name).write_text(content)
    record = RunRecord(run)
    assert record.exists
    assert (record.run_id, record.starts, record.settings) == (RUN, STARTS[:1], {"seed": 1})
    assert record.damage.keys() == {*NAMES}
    record.restore()
    assert RunRecord(run).damage == {}
    assert RunRecord(run).settings == {"seed": 1}


def test_without_a_whole_copy_damage_is_an_error_that_names_the_weights(run):
    (run / "checkpoint-2/run/config.yaml").write_text("seed: 2\n")
    (run / "provenance.json").write_text("{")
    record = RunRecord(run)
    assert record.settings == {"seed": 1}
    assert "no checkpoint here has a whole copy" in record.damage["provenance.json"]
    with pytest.raises(ConfigurationError, match=r"--init_from \S+/checkpoint-2 with another"):
        record.starts  # noqa: B018 - reading it is what is tested
    viewed = RunRecord(run, lenient=True)
    assert (viewed.run_id, viewed.starts, viewed.settings) == (None, [], {"seed": 1})
    assert "no checkpoint here has a whole copy" in viewed.damage["provenance.json"]
    (run / "config.yaml").write_text("[")
    assert RunRecord(run, lenient=True).settings == {}


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
    for each in NAMES:
        shutil.copy(run / each, run / "checkpoint-3/run")
    commit(run, 3)
    if not is_damaged:
        (run / name).write_text(whole)
    record = RunRecord(run)
    assert bool(record.damage) == is_damaged
    assert record._copies == run / "checkpoint-2/run"
    copy_record(run, write_files(run, 4))
    assert RunRecord(run).settings == {"seed": 1}
