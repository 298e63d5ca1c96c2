"""The files of a preparation, obstacles in its folder, and the merge of shards."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import datasets
import numpy as np
import preparation_samples as samples
import pytest

from utils.config.errors import ConfigurationError
from utils.data.columns import open_columns
from utils.data.token_dataset import open_token_dataset
from utils.prepare.pipeline import decoded_example
from utils.prepare.workspace import WORKSPACE, Workspace


def test_load_from_disk_opens_every_split_with_the_smallest_type(tmp_path, source, prepare):
    more = samples.text_source(tmp_path / "more.jsonl", 20, seed=5)
    out = prepare("out", sources=[source], eval_sources=[f"more={more}"], validation_fraction=0.1)
    counts, fingerprints = {}, set()
    for split in ("train", "validation", "more"):
        dataset = datasets.load_from_disk(str(out / split))
        assert dataset.features == {"input_ids": datasets.List(datasets.Value("uint16"))}
        opened = open_token_dataset(out / split)
        assert opened.statistics.documents == len(dataset)
        assert samples.document(opened, 0)[0].tolist() == dataset[0]["input_ids"]
        counts[split] = len(dataset)
        fingerprints.add(dataset._fingerprint)
    assert counts["train"] + counts["validation"] == 200
    assert counts["more"] == 20
    assert len(fingerprints) == 3  # datasets keys its caches by them
    assert not (out / ".shards").exists()


def test_the_description_holds_the_figures_of_the_report(source, prepare):
    train = prepare("out", sources=[source]) / "train"
    content = samples.description(train)
    preparation = content["preparation"]
    lengths = [len(row) for row in samples.rows(train)]
    assert preparation["tokens"] == content["statistics"]["tokens"] == sum(lengths)
    assert preparation["loss_token_share"] == 1.0
    percentiles = preparation["length_percentiles_tokens"]
    assert percentiles.pop("max") == max(lengths)
    for name, length in percentiles.items():
        assert length == np.percentile(lengths, float(name[1:]), method="inverted_cdf")
    text_bytes = sum(len(text.encode()) for text in samples.sentences(200))
    assert preparation["bytes_per_token"] == pytest.approx(text_bytes / sum(lengths))
    assert content["tokenizer"]["vocabulary_size"] == 320


def test_an_example_marks_what_is_trained_on_and_escapes_what_steers_a_terminal(tmp_path):
    tokenizer = samples.tiny_tokenizer()
    prompt = tokenizer("say \x1b[31m")["input_ids"]
    answer = tokenizer("red\n\u202e<|im_end|>")["input_ids"]
    mask = [0] * len(prompt) + [1] * len(answer)
    columns = {"input_ids": [prompt + answer], "completion_mask": [mask]}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "train")
    shown = decoded_example(open_columns(tmp_path / "train"), tokenizer)
    assert shown == "say \\x1b[31m[[red\n\\u202e<|im_end|>]]"


@pytest.mark.slow
@pytest.mark.usefixtures("workers_for_little")
def test_a_mixture_is_the_same_however_the_work_is_divided(tmp_path, prepare, two):
    shards = 15  # more shards than work units
    other = samples.text_source(tmp_path / "other.jsonl", 40, seed=9)
    given = {
        "sources": [
            {"path": two[0], "weight": 1.5, "max_tokens": 2000},
            {"path": two[1], "filter": {"language": "en"}},
        ],
        "eval_sources": [f"other={other}"],
        "validation_fraction": 0.1,
    }
    one = samples.data_bytes(prepare("one", **given))
    for shard in reversed(range(shards)):
        prepare("parts", shard=f"{shard}/{shards}", **given)
    assert one == samples.data_bytes(prepare("parts", merge=shards, **given))
    assert one == samples.data_bytes(prepare("workers", num_proc=2, **given))


def test_an_interrupted_preparation_is_continued(prepare, source, monkeypatch):
    whole = prepare("whole", sources=[source])
    finish, finished = Workspace.finish, []

    def interrupted(self, unit, counts):
        if len(finished) == 4:
            assert self.unit_file(unit, "train").exists()
            finished.append(None)
            raise KeyboardInterrupt
        finished.append(unit)
        finish(self, unit, counts)

    monkeypatch.setattr(Workspace, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare("out", sources=[source])
    resumed = prepare("out", sources=[source])
    assert finished[:6] == [0, 1, 2, 3, None, 4]
    assert samples.data_bytes(whole) == samples.data_bytes(resumed)


@pytest.mark.parametrize("last", ["data-00003", ".shards.finished"])
def test_an_interrupted_assembly_is_continued(tmp_path, prepare, source, last, monkeypatch):
    settings = {"sources": [source], "validation_fraction": 0.3}
    whole = prepare("whole", **settings)
    original = Path.replace

    def interrupted(self, target):
        if Path(target).name.startswith(last):
            raise KeyboardInterrupt
        return original(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare("out", **settings)
    assert (tmp_path / "out" / "tokenizer").exists() == (last == ".shards.finished")
    assert samples.data_bytes(whole) == samples.data_bytes(prepare("out", **settings))


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
    # Remove the record of one unit, and give another unit the digest of other settings.
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
