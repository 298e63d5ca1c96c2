"""The output directory: what is done already, what is in the way, and the merge of shards."""

import json

import preparation_samples as samples
import pytest

from utils.config.errors import ConfigurationError

pytestmark = pytest.mark.usefixtures("small_units")


def test_a_finished_preparation_is_not_done_again_nor_written_over(tmp_path, source, tokenizer):
    settings = {"sources": [source], "tokenizer_name_or_path": tokenizer}
    out = tmp_path / "out"
    assert not samples.prepare(**settings, output_dir=out).is_finished
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert samples.prepare(**settings, output_dir=out, num_proc=2).is_finished
    samples.tiny_tokenizer().save_pretrained(tmp_path / "other")
    config = tmp_path / "other" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token": "<|im_end|>"}))
    more = samples.text_source(tmp_path / "more.jsonl", 201)
    for changed in (
        {"validation_fraction": 0.5},
        {"sources": [more]},
        {"tokenizer_name_or_path": str(tmp_path / "other")},
    ):
        with pytest.raises(ConfigurationError, match="holds tokenizer, train, which was not made"):
            samples.prepare(**{**settings, **changed}, output_dir=out)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_unfinished_work_of_other_settings_is_not_mixed_in(tmp_path, source, tokenizer):
    settings = {"sources": [source], "tokenizer_name_or_path": tokenizer}
    samples.prepare(**settings, output_dir=tmp_path / "out", shard="0/2")
    with pytest.raises(ConfigurationError, match="unfinished work of other settings"):
        samples.prepare(
            **settings, output_dir=tmp_path / "out", shard="1/2", validation_fraction=0.5
        )


def test_merge_names_the_shards_that_are_incomplete(tmp_path, source, tokenizer):
    settings = {"sources": [source], "tokenizer_name_or_path": tokenizer}
    for shard in (0, 2):
        samples.prepare(**settings, output_dir=tmp_path / "out", shard=f"{shard}/4")
    # A unit without a record, and one of a job that was started with other settings.
    (tmp_path / "out" / ".shards" / "unit-000002.json").unlink()
    record = tmp_path / "out" / ".shards" / "unit-000000.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "digest": "another"}))
    with pytest.raises(ConfigurationError) as caught:
        samples.prepare(**settings, output_dir=tmp_path / "out", merge=4)
    named = [problem.split(" is incomplete")[0] for problem in caught.value.problems]
    assert named == [f"shard {shard}/4" for shard in range(4)]
    assert "--shard 0/4" in caught.value.problems[0]


def test_merge_refuses_files_that_do_not_hold_what_was_counted(tmp_path, source, tokenizer):
    settings = {"sources": [source], "output_dir": tmp_path / "out"}
    samples.prepare(**settings, tokenizer_name_or_path=tokenizer, shard="0/1")
    record = next((tmp_path / "out/.shards").glob("unit-*.json"))
    content = json.loads(record.read_text())
    content["counts"]["tokens"]["train"] += 1
    record.write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match=r"tokens, but .* were counted as they were"):
        samples.prepare(**settings, tokenizer_name_or_path=tokenizer, merge=1)


def test_a_tokenizer_trained_first_serves_the_shards_of_the_same_folder(tmp_path, source):
    out = tmp_path / "out"
    samples.prepare(sources=[source], output_dir=out, train_tokenizer=300, tokenizer_only=True)
    assert [path.name for path in out.iterdir()] == ["tokenizer"]
    settings = {"sources": [source], "tokenizer_name_or_path": str(out / "tokenizer")}
    for shard in (0, 1):
        samples.prepare(**settings, output_dir=out, shard=f"{shard}/2")
    samples.prepare(**settings, output_dir=out, merge=2)
    assert len(samples.rows(out / "train")) == 200


def test_a_failed_preparation_starts_again_with_other_settings(tmp_path, source, tokenizer, caplog):
    with source.open("a") as stream:
        stream.write("{oops\n")
    settings = {
        "sources": [source],
        "output_dir": tmp_path / "out",
        "tokenizer_name_or_path": tokenizer,
    }
    with pytest.raises(ConfigurationError, match="malformed JSON"):
        samples.prepare(**settings)
    assert list((tmp_path / "out" / ".shards").glob("unit-*.json"))
    samples.prepare(**settings, on_bad_row="skip")
    assert "units of other settings are discarded" in caplog.text
    assert len(samples.rows(tmp_path / "out" / "train")) == 200
