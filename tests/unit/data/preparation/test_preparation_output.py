"""The output directory: what is done already, what is in the way, and the merge of shards."""

import json
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import preparation_samples as samples
import pytest

from utils.config.errors import ConfigurationError
from utils.data.prepare.workspace import WORKSPACE, Workspace

pytestmark = pytest.mark.usefixtures("small_units")


def test_a_finished_preparation_is_not_done_again_nor_written_over(
    tmp_path, prepare, source, caplog
):
    out = prepare("out", sources=[source])
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    with caplog.at_level("INFO"):
        prepare("out", sources=[source], num_proc=2)
    assert "already prepared with these settings" in caplog.text
    other = tmp_path / "other"
    tokenizer = samples.tiny_tokenizer()
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained(other)
    more = samples.text_source(tmp_path / "more.jsonl", 201)
    for changed in (
        {"sources": [source], "validation_fraction": 0.5},
        {"sources": [more]},
        {"sources": [source], "tokenizer_name_or_path": str(other)},
    ):
        with pytest.raises(ConfigurationError, match="holds tokenizer, train, which was not made"):
            prepare("out", **changed)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_shards_of_other_settings_are_not_mixed_in_and_merge_names_the_incomplete(prepare, source):
    for shard in (0, 2):
        out = prepare("out", sources=[source], shard=f"{shard}/4")
    with pytest.raises(ConfigurationError, match="unfinished work of other settings"):
        prepare("out", sources=[source], shard="1/4", validation_fraction=0.5)
    # A unit without a record, and one of a job that was started with other settings.
    (out / WORKSPACE / "unit-000002.json").unlink()
    record = out / WORKSPACE / "unit-000000.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "digest": "another"}))
    with pytest.raises(ConfigurationError) as caught:
        prepare("out", sources=[source], merge=4)
    named = [problem.split(" is incomplete")[0] for problem in caught.value.problems]
    assert named == [f"shard {shard}/4" for shard in range(4)]
    assert "--shard 0/4" in caught.value.problems[0]


def test_merge_refuses_files_that_do_not_hold_what_was_counted(prepare, source):
    out = prepare("out", sources=[source], shard="0/1")
    record = next((out / WORKSPACE).glob("unit-*.json"))
    content = json.loads(record.read_text())
    content["counts"]["tokens"]["train"] += 1
    record.write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match=r"tokens, but .* were counted as they were"):
        prepare("out", sources=[source], merge=1)


def test_a_tokenizer_trained_first_serves_the_shards_of_the_same_folder(prepare, source):
    out = prepare("out", sources=[source], train_tokenizer=300, tokenizer_only=True)
    assert [path.name for path in out.iterdir()] == ["tokenizer"]
    settings = {"sources": [source], "tokenizer_name_or_path": str(out / "tokenizer")}
    for step in ({"shard": "0/2"}, {"shard": "1/2"}, {"merge": 2}):
        prepare("out", **settings, **step)
    assert len(samples.rows(out / "train")) == 200


def test_a_failed_preparation_starts_again_with_other_settings(tmp_path, prepare, source, caplog):
    with source.open("a") as stream:
        stream.write("{oops\n")
    with pytest.raises(ConfigurationError, match="malformed JSON"):
        prepare("out", sources=[source])
    assert list((tmp_path / "out" / WORKSPACE).glob("unit-*.json"))
    out = prepare("out", sources=[source], on_bad_row="skip")
    assert "units of other settings are discarded" in caplog.text
    assert len(samples.rows(out / "train")) == 200


def test_one_task_of_an_array_merges_and_resumes_after_a_requeue(tmp_path):
    (tmp_path / WORKSPACE).mkdir()
    shared = Workspace(tmp_path, "digest")
    assert not shared.is_last_of_array("7", 0, 2)
    assert shared.is_last_of_array("7", 1, 2)
    assert not shared.is_last_of_array("7", 0, 2)
    assert shared.is_last_of_array("7", 1, 2), "requeued while it merged"
    assert not shared.is_last_of_array("8", 0, 2), "another array counts anew"
    assert shared.is_last_of_array("8", 1, 2)
    shared.remove()
    assert not shared.is_last_of_array("8", 1, 2), "merged meanwhile"


def test_of_tasks_that_end_at_once_exactly_one_merges(tmp_path):
    (tmp_path / WORKSPACE).mkdir()
    shared, barrier = Workspace(tmp_path, "digest"), Barrier(4)

    def finish(array, task):
        barrier.wait()
        return shared.is_last_of_array(array, task, 4)

    with ThreadPoolExecutor(4) as pool:
        for number in range(20):
            claims = pool.map(finish, [f"round{number}"] * 4, range(4))
            assert sorted(claims) == [False, False, False, True]
