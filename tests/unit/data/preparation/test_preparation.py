import gzip
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import preparation_samples as samples
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from utils.config.errors import ConfigurationError
from utils.config.preparation import PreparationArguments
from utils.data.preparation import documents, unit_pool, work_units
from utils.data.preparation.pipeline import Preparation
from utils.data.preparation.unit import UnitPreparation
from utils.data.preparation.workspace import Workspace
from utils.data.token_dataset import open_token_dataset

REPOSITORY = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def _small_units(monkeypatch):
    monkeypatch.setattr(work_units, "SMALLEST_UNIT_BYTES", 2000)


@pytest.fixture
def source(tmp_path):
    return samples.text_source(tmp_path / "texts.jsonl")


@pytest.fixture
def tokenizer(tmp_path):
    return samples.saved_tokenizer(tmp_path / "tokenizer")


def rows(folder) -> list[list[int]]:
    return datasets.load_from_disk(str(folder))["input_ids"][:]


@pytest.fixture
def workers_for_little(monkeypatch):
    """Let the few documents here be enough work for worker processes."""
    worth = dict.fromkeys(unit_pool.LEAST_BYTES_A_WORKER, 1)
    monkeypatch.setattr(unit_pool, "LEAST_BYTES_A_WORKER", worth)


# Equivalences


@pytest.mark.slow
def test_two_processes_write_the_same_bytes_as_one(tmp_path, source, workers_for_little):
    settings = {"sources": [source], "train_tokenizer": 300, "validation_fraction": 0.2}
    samples.prepare(**settings, output_dir=tmp_path / "one")
    samples.prepare(**settings, output_dir=tmp_path / "two", num_proc=2)
    written = samples.data_bytes(tmp_path / "one")
    assert sum(name.startswith("train/data-") for name in written) > 3
    assert written == samples.data_bytes(tmp_path / "two")


@pytest.mark.parametrize("document_format", ["text", "prompt_completion"])
def test_gigatoken_writes_the_same_bytes_as_the_tokenizer(tmp_path, tokenizer, document_format):
    texts = samples.sentences(40)
    records = {
        "text": [{"text": text} for text in texts],
        "prompt_completion": [{"prompt": text[:9], "completion": text[9:]} for text in texts],
    }
    source = samples.write_jsonl(tmp_path / "a.jsonl", records[document_format])
    for backend in ("tokenizers", "gigatoken"):
        samples.prepare(
            sources=[source],
            output_dir=tmp_path / backend,
            tokenizer_name_or_path=tokenizer,
            tokenizer_backend=backend,
        )
    written = samples.data_bytes(tmp_path / "gigatoken")
    assert written == samples.data_bytes(tmp_path / "tokenizers")
    assert any(name.startswith("train/data-") for name in written)


@pytest.mark.parametrize("shards", [2, 3, 50])
def test_shards_merged_are_the_undivided_preparation(tmp_path, source, tokenizer, shards):
    settings = {
        "sources": [source],
        "eval_sources": [f"other={samples.text_source(tmp_path / 'other.jsonl', 40, seed=9)}"],
        "tokenizer_name_or_path": tokenizer,
        "validation_fraction": 0.2,
    }
    samples.prepare(**settings, output_dir=tmp_path / "whole")
    for shard in reversed(range(shards)):
        samples.prepare(**settings, output_dir=tmp_path / "parts", shard=f"{shard}/{shards}")
    samples.prepare(**settings, output_dir=tmp_path / "parts", merge=shards)
    assert samples.data_bytes(tmp_path / "whole") == samples.data_bytes(tmp_path / "parts")


@pytest.mark.parametrize("units_done", [0, 1, 4])
def test_an_interrupted_preparation_is_continued(
    tmp_path, source, tokenizer, units_done, monkeypatch
):
    settings = {"sources": [source], "tokenizer_name_or_path": tokenizer}
    samples.prepare(**settings, output_dir=tmp_path / "whole")
    calls = []
    original = UnitPreparation.__call__

    def interrupted(self, unit, files, progress):
        calls.append(unit.index)
        if len(calls) > units_done:
            next(iter(files.values())).write_bytes(b"half a file")
            raise KeyboardInterrupt
        return original(self, unit, files, progress)

    monkeypatch.setattr(UnitPreparation, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        samples.prepare(**settings, output_dir=tmp_path / "out")
    monkeypatch.setattr(UnitPreparation, "__call__", original)
    again = []

    def counted(self, unit, files, progress):
        again.append(unit.index)
        return original(self, unit, files, progress)

    monkeypatch.setattr(UnitPreparation, "__call__", counted)
    samples.prepare(**settings, output_dir=tmp_path / "out")
    assert again[0] == units_done
    assert samples.data_bytes(tmp_path / "whole") == samples.data_bytes(tmp_path / "out")


@pytest.mark.parametrize("moves", [0, 1, 3, 6])
def test_an_interrupted_assembly_is_continued(tmp_path, source, moves, monkeypatch):
    settings = {"sources": [source], "train_tokenizer": 300, "validation_fraction": 0.3}
    samples.prepare(**settings, output_dir=tmp_path / "whole")
    count = []
    original = Path.replace

    def interrupted(self, target):
        if self.suffix == ".arrow" and Path(target).name.startswith("data-"):
            count.append(target)
            if len(count) > moves:
                raise KeyboardInterrupt
        return original(self, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        samples.prepare(**settings, output_dir=tmp_path / "out")
    monkeypatch.setattr(Path, "replace", original)
    samples.prepare(**settings, output_dir=tmp_path / "out")
    assert samples.data_bytes(tmp_path / "whole") == samples.data_bytes(tmp_path / "out")


def test_the_tokenizer_survives_an_interruption_after_it_was_moved(tmp_path, source, monkeypatch):
    settings = {"sources": [source], "train_tokenizer": 300}
    samples.prepare(**settings, output_dir=tmp_path / "whole")
    original = Workspace.remove
    monkeypatch.setattr(Workspace, "remove", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        samples.prepare(**settings, output_dir=tmp_path / "out")
    monkeypatch.setattr(Workspace, "remove", original)
    assert (tmp_path / "out" / "tokenizer").exists()
    samples.prepare(**settings, output_dir=tmp_path / "out")
    assert samples.data_bytes(tmp_path / "whole") == samples.data_bytes(tmp_path / "out")


def _interrupted(_):
    raise KeyboardInterrupt


def test_every_source_kind_gives_the_same_rows(tmp_path, tokenizer):
    records = [{"text": text} for text in samples.sentences(60)]
    plain = samples.write_jsonl(tmp_path / "a.jsonl", records)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(plain.read_bytes()))
    table = pa.Table.from_pylist(records)
    pq.write_table(table, tmp_path / "d.parquet", row_group_size=7)
    datasets.Dataset(table).save_to_disk(str(tmp_path / "e"))
    (tmp_path / "f").mkdir()
    for number, record in enumerate(records):
        (tmp_path / "f" / f"{number:03d}.txt").write_text(record["text"], encoding="utf-8")
    found = []
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "e", "f"):
        samples.prepare(
            sources=[tmp_path / name],
            output_dir=tmp_path / f"out-{name}",
            tokenizer_name_or_path=tokenizer,
        )
        found.append(rows(tmp_path / f"out-{name}" / "train"))
    assert len(found[0]) == 60
    assert all(other == found[0] for other in found[1:])


def test_rows_of_a_datasets_folder_with_an_indices_mapping_are_the_mapped_ones(tmp_path, tokenizer):
    records = [{"text": text} for text in samples.sentences(30)]
    datasets.Dataset.from_list(records).shuffle(seed=1).save_to_disk(str(tmp_path / "d"))
    shuffled = datasets.load_from_disk(str(tmp_path / "d"))["text"][:]
    samples.prepare(
        sources=[tmp_path / "d"], output_dir=tmp_path / "out", tokenizer_name_or_path=tokenizer
    )
    expected = [samples.tiny_tokenizer()(text)["input_ids"] + [0] for text in shuffled]
    assert rows(tmp_path / "out" / "train") == expected


# The held-out split


def test_the_held_out_split_depends_on_content_alone(tmp_path, tokenizer):
    records = [{"text": text} for text in samples.sentences(300)]
    shuffled = [*records, *records[:100]]
    random.Random(3).shuffle(shuffled)
    held_out = []
    for name, order in (("a", records), ("b", shuffled)):
        samples.prepare(
            sources=[samples.write_jsonl(tmp_path / f"{name}.jsonl", order)],
            output_dir=tmp_path / name,
            tokenizer_name_or_path=tokenizer,
            validation_fraction=0.25,
        )
        held_out.append({tuple(row) for row in rows(tmp_path / name / "validation")})
        train = {tuple(row) for row in rows(tmp_path / name / "train")}
        assert not train & held_out[-1]
        assert len(train | held_out[-1]) == 300
    assert held_out[0] == held_out[1]
    assert 45 < len(held_out[0]) < 105


def test_a_very_long_text_stays_whole_in_one_split_and_its_parts_are_counted(
    tmp_path, tokenizer, monkeypatch
):
    monkeypatch.setattr(documents, "LARGEST_DOCUMENT_BYTES", 64)
    texts = [f"name{number:03d}\n" * 40 for number in range(20)]
    samples.prepare(
        sources=[samples.write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])],
        output_dir=tmp_path / "out",
        tokenizer_name_or_path=tokenizer,
        validation_fraction=0.4,
    )
    plain = samples.tiny_tokenizer()
    found = {}
    for split in ("train", "validation"):
        parts = [plain.decode(row[:-1]) for row in rows(tmp_path / "out" / split)]
        found[split] = "".join(parts)
        for text in texts:
            assert found[split].count(text[:8]) in (0, 40)
    assert all(text in found["train"] or text in found["validation"] for text in texts)
    assert found["validation"]
    content = json.loads((tmp_path / "out" / "train" / "stoker.json").read_text())["preparation"]
    assert content["sources"]["continued"] == 20 * 4


def test_another_seed_holds_out_other_documents(tmp_path, source, tokenizer):
    for seed in (0, 1):
        samples.prepare(
            sources=[source],
            output_dir=tmp_path / f"{seed}",
            tokenizer_name_or_path=tokenizer,
            validation_fraction=0.3,
            seed=seed,
        )
    assert rows(tmp_path / "0" / "validation") != rows(tmp_path / "1" / "validation")


def test_the_tokenizer_never_sees_held_out_documents(tmp_path):
    # The odd word is in one document; it is held out with some seed and trained on with another.
    texts = [*samples.sentences(300), "Xylophon " * 400]
    source = samples.write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    knows = {}
    for seed in range(4):
        out = tmp_path / f"{seed}"
        samples.prepare(
            sources=[source],
            output_dir=out,
            train_tokenizer=300,
            validation_fraction=0.5,
            seed=seed,
        )
        vocabulary = json.loads((out / "tokenizer" / "tokenizer.json").read_text())["model"]
        longest = max(open_token_dataset(out / "validation").lengths)
        knows[bool(longest > 400)] = any("Xylo" in token for token in vocabulary["vocab"])
    assert knows == {True: False, False: True}


def test_the_tokenizer_is_trained_on_a_sample_of_every_unit(tmp_path):
    # Every work unit (2000 bytes) begins with words of its own; only its beginning is read.
    lines = []
    for unit in range(6):
        lines += [{"text": f"opening{unit} " * 30}, {"text": f"closing{unit} " * 150}]
    source = samples.write_jsonl(tmp_path / "a.jsonl", lines)
    knows = {}
    for sample_bytes in (600, 100_000):
        out = tmp_path / f"{sample_bytes}"
        samples.prepare(
            sources=[source],
            output_dir=out,
            train_tokenizer=266,
            tokenizer_sample_bytes=sample_bytes,
        )
        vocabulary = json.loads((out / "tokenizer" / "tokenizer.json").read_text())["model"]
        merged = "".join(token for token in vocabulary["vocab"] if len(token) > 1)
        knows[sample_bytes] = ("pen" in merged, "los" in merged)
    assert knows[600] == (True, False)
    assert knows[100_000][1]


# The written layout


def test_load_from_disk_opens_every_split_with_the_smallest_type(tmp_path, source, tokenizer):
    samples.prepare(
        sources=[source],
        eval_sources=[f"more={samples.text_source(tmp_path / 'more.jsonl', 20, seed=5)}"],
        output_dir=tmp_path / "out",
        tokenizer_name_or_path=tokenizer,
        validation_fraction=0.1,
    )
    counts = {}
    for split in ("train", "validation", "more"):
        dataset = datasets.load_from_disk(str(tmp_path / "out" / split))
        assert dataset.features == datasets.Features(
            {"input_ids": datasets.List(datasets.Value("uint16"))}
        )
        opened = open_token_dataset(tmp_path / "out" / split)
        assert opened.statistics.documents == len(dataset)
        assert opened.tokens(0).tolist() == dataset[0]["input_ids"]
        counts[split] = len(dataset)
    assert counts["train"] + counts["validation"] == 200
    assert counts["more"] == 20
    assert not (tmp_path / "out" / ".shards").exists()


def test_splits_have_different_fingerprints_for_the_caches_of_datasets(tmp_path, source, tokenizer):
    samples.prepare(
        sources=[source],
        output_dir=tmp_path / "out",
        tokenizer_name_or_path=tokenizer,
        validation_fraction=0.3,
    )
    fingerprints = {
        datasets.load_from_disk(str(tmp_path / "out" / split))._fingerprint
        for split in ("train", "validation")
    }
    assert len(fingerprints) == 2


def test_text_documents_end_with_the_end_of_text_token(tmp_path, source, tokenizer):
    samples.prepare(sources=[source], output_dir=tmp_path / "out", tokenizer_name_or_path=tokenizer)
    plain = samples.tiny_tokenizer()
    decoded = [plain.decode(row) for row in rows(tmp_path / "out" / "train")]
    assert decoded == [text + "<|endoftext|>" for text in samples.sentences(200)]


def test_the_description_holds_the_figures_of_the_report(tmp_path, source, tokenizer):
    samples.prepare(sources=[source], output_dir=tmp_path / "out", tokenizer_name_or_path=tokenizer)
    content = json.loads((tmp_path / "out" / "train" / "stoker.json").read_text())
    preparation = content["preparation"]
    lengths = [len(row) for row in rows(tmp_path / "out" / "train")]
    assert preparation["tokens"] == content["statistics"]["tokens"] == sum(lengths)
    assert preparation["loss_token_share"] == 1.0
    percentiles = preparation["length_percentiles_tokens"]
    for name in ("p1", "p50", "p99"):
        share = float(name[1:])
        assert percentiles[name] == np.percentile(lengths, share, method="inverted_cdf")
    assert percentiles["max"] == max(lengths)
    text_bytes = sum(len(text.encode()) for text in samples.sentences(200))
    assert preparation["bytes_per_token"] == pytest.approx(text_bytes / sum(lengths))
    assert content["tokenizer"]["vocabulary_size"] == 320


# Chats


def test_loss_bearing_text_is_the_assistant_turns_and_their_ends(tmp_path):
    records = [
        samples.chat("hi", "def f():\n    return 1", "more?", "  no ß", system="be brief"),
        samples.chat("x", "y"),
    ]
    samples.prepare(
        sources=[samples.write_jsonl(tmp_path / "chats.jsonl", records)],
        output_dir=tmp_path / "out",
        tokenizer_name_or_path=samples.saved_tokenizer(tmp_path / "tokenizer"),
        chat_template=samples.CHATML,
    )
    dataset = open_token_dataset(tmp_path / "out" / "train")
    tokenizer = samples.tiny_tokenizer()
    trained = [
        tokenizer.decode(dataset.tokens(i)[dataset.loss_mask_of(i)]) for i in range(len(dataset))
    ]
    assert trained == ["def f():\n    return 1<|im_end|>  no ß<|im_end|>", "y<|im_end|>"]
    assert dataset.loss_mask == "assistant_masks"
    content = json.loads((tmp_path / "out" / "train" / "stoker.json").read_text())["preparation"]
    assert "[[y<|im_end|>]]" not in content["example"]
    assert "[[def f():\n    return 1<|im_end|>]]" in content["example"]
    assert tokenizer.decode([content["end_of_turn_token_id"]]) == "<|im_end|>"


def test_the_saved_tokenizer_generates_with_the_template_of_the_data(tmp_path):
    from transformers import AutoTokenizer

    samples.prepare(
        sources=[samples.write_jsonl(tmp_path / "a.jsonl", [samples.chat("q", "answer")])],
        output_dir=tmp_path / "out",
        tokenizer_name_or_path=samples.saved_tokenizer(tmp_path / "tokenizer"),
        chat_template=samples.CHATML,
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "q"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    dataset = open_token_dataset(tmp_path / "out" / "train")
    first_trained = int(np.argmax(dataset.loss_mask_of(0)))
    assert dataset.tokens(0)[:first_trained].tolist() == prompt


@pytest.mark.parametrize("tokenizer", ["given", "trained"])
@pytest.mark.parametrize("kind", ["messages", "prompt_completion"])
def test_chats_without_a_template_are_refused_before_any_work(tmp_path, tokenizer, kind):
    turns = samples.chat("q", "a")["messages"]
    row = {"messages": turns} if kind == "messages" else {"prompt": turns[:1]}
    row |= {} if kind == "messages" else {"completion": turns[1:]}
    settings = {"train_tokenizer": 300}
    if tokenizer == "given":
        settings = {"tokenizer_name_or_path": samples.saved_tokenizer(tmp_path / "tokenizer")}
    with pytest.raises(ConfigurationError, match="the tokenizer has no chat template"):
        samples.prepare(
            sources=[samples.write_jsonl(tmp_path / "a.jsonl", [row])],
            output_dir=tmp_path / "out",
            **settings,
        )
    assert not (tmp_path / "out").exists()


def test_completions_made_of_messages_bear_loss_in_the_completion_alone(tmp_path):
    turns = samples.chat("q", "old", "q2", "new")["messages"]
    samples.prepare(
        sources=[
            samples.write_jsonl(
                tmp_path / "a.jsonl", [{"prompt": turns[:3], "completion": turns[3:]}]
            )
        ],
        output_dir=tmp_path / "out",
        tokenizer_name_or_path=samples.saved_tokenizer(tmp_path / "tokenizer"),
        chat_template=samples.CHATML,
    )
    dataset = open_token_dataset(tmp_path / "out" / "train")
    trained = dataset.tokens(0)[dataset.loss_mask_of(0)]
    assert samples.tiny_tokenizer().decode(trained) == "new<|im_end|>"
    assert dataset.loss_mask == "completion_mask"


def overlong_chats(tmp_path):
    long_answer, long_question = samples.chat("q", "a " * 200), samples.chat("q " * 200, "a")
    return samples.write_jsonl(
        tmp_path / "chats.jsonl", [samples.chat("q", "a"), long_answer, long_question]
    )


@pytest.mark.parametrize(
    ("on_overlong", "documents", "dropped", "truncated"),
    [
        ("drop", 1, {"overlong": 2}, 0),
        ("truncate", 2, {"truncated_without_loss": 1}, 1),
    ],
)
def test_overlong_chats_are_dropped_or_truncated_and_counted(
    tmp_path, on_overlong, documents, dropped, truncated
):
    samples.prepare(
        sources=[overlong_chats(tmp_path)],
        output_dir=tmp_path / "out",
        tokenizer_name_or_path=samples.saved_tokenizer(tmp_path / "tokenizer"),
        chat_template=samples.CHATML,
        sequence_length=64,
        on_overlong=on_overlong,
    )
    content = json.loads((tmp_path / "out" / "train" / "stoker.json").read_text())
    assert content["statistics"]["documents"] == documents
    assert content["statistics"]["longest_document"] <= 64
    assert content["preparation"]["sources"]["dropped"] == dropped
    assert content["preparation"]["sources"]["truncated"] == truncated


def test_an_overlong_chat_is_an_error_that_names_its_line(tmp_path):
    with pytest.raises(ConfigurationError, match=r"chats\.jsonl:2: \d+ tokens, more than the sequ"):
        samples.prepare(
            sources=[overlong_chats(tmp_path)],
            output_dir=tmp_path / "out",
            tokenizer_name_or_path=samples.saved_tokenizer(tmp_path / "tokenizer"),
            chat_template=samples.CHATML,
            sequence_length=64,
        )


def test_long_texts_are_kept_whole(tmp_path, tokenizer):
    source = samples.write_jsonl(tmp_path / "a.jsonl", [{"text": "a b " * 500}])
    samples.prepare(
        sources=[source],
        output_dir=tmp_path / "out",
        tokenizer_name_or_path=tokenizer,
        sequence_length=64,
    )
    assert len(rows(tmp_path / "out" / "train")[0]) > 500


# Bad rows


BAD_LINES = {
    "malformed_json": (b'{"text": ', r"malformed JSON"),
    "not_an_object": (b"[1]", r"a JSON object is needed on each line, found list"),
    "missing_field": (b'{"messages": []}', r"no 'text', which the format text needs"),
    "wrong_type": (b'{"text": 7}', r"'text' must be a string, found int"),
    "empty": (b'{"text": " \\n"}', r"empty document"),
    "invalid_utf8": (b'{"text": "\xff"}', r"not UTF-8"),
}


@pytest.mark.parametrize("reason", BAD_LINES)
def test_a_bad_row_is_an_error_that_names_file_and_line(tmp_path, tokenizer, reason):
    line, message = BAD_LINES[reason]
    good = samples.text_source(tmp_path / "a.jsonl", 100).read_bytes().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_bytes(b"".join([*good[:77], line + b"\n", *good[77:]]))
    with pytest.raises(ConfigurationError, match=rf"a\.jsonl:78: {message}.*--on_bad_row skip"):
        samples.prepare(
            sources=[tmp_path / "a.jsonl"],
            output_dir=tmp_path / "out",
            tokenizer_name_or_path=tokenizer,
            format="text",
        )


def test_bad_rows_are_skipped_counted_and_shown(tmp_path, tokenizer, caplog):
    caplog.set_level(logging.INFO)
    good = samples.text_source(tmp_path / "a.jsonl", 100).read_bytes().splitlines(keepends=True)
    bad = [line + b"\n" for line, _ in BAD_LINES.values()]
    (tmp_path / "a.jsonl").write_bytes(b"".join([*bad, *good, *bad[:2]]))
    samples.prepare(
        sources=[tmp_path / "a.jsonl"],
        output_dir=tmp_path / "out",
        tokenizer_name_or_path=tokenizer,
        format="text",
        on_bad_row="skip",
    )
    assert len(rows(tmp_path / "out" / "train")) == 100
    content = json.loads((tmp_path / "out" / "train" / "stoker.json").read_text())["preparation"]
    dropped = Counter(dict.fromkeys(BAD_LINES, 1))
    dropped.update({"malformed_json": 1, "not_an_object": 1})
    assert content["sources"]["dropped"] == dict(dropped)
    assert "2 malformed_json" in caplog.text
    assert "a.jsonl:1: malformed JSON" in caplog.text


def test_a_chat_without_assistant_is_a_bad_row(tmp_path):
    source = samples.write_jsonl(
        tmp_path / "a.jsonl", [samples.chat("q", "a"), samples.chat("only a question")]
    )
    with pytest.raises(ConfigurationError, match=r"a\.jsonl:2: no assistant token"):
        samples.prepare(
            sources=[source],
            output_dir=tmp_path / "out",
            tokenizer_name_or_path=samples.saved_tokenizer(tmp_path / "tokenizer"),
            chat_template=samples.CHATML,
        )


@pytest.mark.slow
def test_a_bad_row_found_by_a_worker_process_names_file_and_line(
    tmp_path, source, tokenizer, workers_for_little
):
    with source.open("a") as stream:
        stream.write("{oops\n")
    with pytest.raises(ConfigurationError, match=r"texts\.jsonl:201: malformed JSON") as caught:
        samples.prepare(
            sources=[source],
            output_dir=tmp_path / "out",
            tokenizer_name_or_path=tokenizer,
            num_proc=2,
        )
    assert len(caught.value.problems) == 1
    assert not caught.value.problems[0].startswith("-")


def test_a_split_that_is_left_without_documents_is_named(tmp_path, tokenizer):
    source = samples.text_source(tmp_path / "a.jsonl", 5)
    with pytest.raises(ConfigurationError, match="validation: no document is left"):
        samples.prepare(
            sources=[source],
            output_dir=tmp_path / "out",
            tokenizer_name_or_path=tokenizer,
            validation_fraction=1e-9,
        )


# The output directory


def test_a_finished_preparation_is_not_done_again(tmp_path, source, tokenizer):
    settings = {
        "sources": [source],
        "output_dir": tmp_path / "out",
        "tokenizer_name_or_path": tokenizer,
    }
    assert not samples.prepare(**settings).is_finished
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert samples.prepare(**settings, num_proc=2).is_finished
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


@pytest.mark.parametrize("change", ["settings", "sources", "tokenizer"])
def test_another_dataset_in_the_output_directory_is_not_written_over(
    tmp_path, source, tokenizer, change
):
    settings = {"sources": [source], "tokenizer_name_or_path": tokenizer}
    samples.prepare(**settings, output_dir=tmp_path / "out")
    if change == "settings":
        settings["validation_fraction"] = 0.5
    elif change == "sources":
        samples.text_source(source, 201)
    else:
        samples.tiny_tokenizer().save_pretrained(tmp_path / "other")
        config = json.loads((tmp_path / "other" / "tokenizer_config.json").read_text())
        config["eos_token"] = "<|im_end|>"
        (tmp_path / "other" / "tokenizer_config.json").write_text(json.dumps(config))
        settings["tokenizer_name_or_path"] = str(tmp_path / "other")
    before = samples.data_bytes(tmp_path / "out")
    with pytest.raises(ConfigurationError, match="prepared with other settings or"):
        samples.prepare(**settings, output_dir=tmp_path / "out")
    assert samples.data_bytes(tmp_path / "out") == before


def test_a_folder_with_other_files_is_not_written_into(tmp_path, source, tokenizer):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigurationError, match=r"holds other files \(thesis\.tex\)"):
        samples.prepare(
            sources=[source], output_dir=tmp_path / "out", tokenizer_name_or_path=tokenizer
        )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_a_file_is_no_output_directory(tmp_path, source, tokenizer):
    with pytest.raises(ConfigurationError, match="is a file, not a folder"):
        samples.prepare(sources=[source], output_dir=source, tokenizer_name_or_path=tokenizer)


def test_unfinished_work_of_other_settings_is_not_mixed_in(tmp_path, source, tokenizer):
    settings = {"sources": [source], "tokenizer_name_or_path": tokenizer}
    samples.prepare(**settings, output_dir=tmp_path / "out", shard="0/2")
    with pytest.raises(ConfigurationError, match="unfinished work of other settings"):
        samples.prepare(
            **settings, output_dir=tmp_path / "out", shard="1/2", validation_fraction=0.5
        )


def test_a_unit_that_was_prepared_with_other_settings_counts_as_missing(
    tmp_path, source, tokenizer
):
    settings = {"sources": [source], "tokenizer_name_or_path": tokenizer}
    samples.prepare(**settings, output_dir=tmp_path / "out", shard="0/2")
    record = tmp_path / "out" / ".shards" / "unit-000000.json"
    content = json.loads(record.read_text())
    record.write_text(json.dumps({**content, "digest": "that of a job started by mistake"}))
    with pytest.raises(ConfigurationError, match="shard 0/2 is incomplete, 1 of its work units"):
        samples.prepare(**settings, output_dir=tmp_path / "out", merge=2)


def test_merge_names_the_shards_that_are_incomplete(tmp_path, source, tokenizer):
    settings = {"sources": [source], "tokenizer_name_or_path": tokenizer}
    for shard in (0, 2):
        samples.prepare(**settings, output_dir=tmp_path / "out", shard=f"{shard}/4")
    (tmp_path / "out" / ".shards" / "unit-000002.json").unlink()
    with pytest.raises(ConfigurationError) as caught:
        samples.prepare(**settings, output_dir=tmp_path / "out", merge=4)
    named = [problem.split(" is incomplete")[0] for problem in caught.value.problems]
    assert named == ["shard 1/4", "shard 2/4", "shard 3/4"]
    assert "--shard 1/4" in caught.value.problems[0]


def test_merge_without_any_shard_is_refused(tmp_path, source, tokenizer):
    with pytest.raises(ConfigurationError, match="no shard has been run into this folder"):
        samples.prepare(
            sources=[source],
            output_dir=tmp_path / "out",
            tokenizer_name_or_path=tokenizer,
            merge=2,
        )
    assert not (tmp_path / "out").exists()


def test_merge_refuses_a_file_that_was_cut_short(tmp_path, source, tokenizer):
    settings = {"sources": [source], "tokenizer_name_or_path": tokenizer}
    samples.prepare(**settings, output_dir=tmp_path / "out", shard="0/1")
    # "0/1" is a whole preparation: start over with two shards and damage a file of the first.
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    for shard in (0, 1):
        samples.prepare(**settings, output_dir=tmp_path / "out", shard=f"{shard}/2")
    file = tmp_path / "out" / ".shards" / "unit-000001-train.arrow"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigurationError, match=r"unit-000001-train\.arrow: has 100 bytes where"):
        samples.prepare(**settings, output_dir=tmp_path / "out", merge=2)


def test_merge_refuses_files_that_do_not_hold_what_was_counted(tmp_path, source, tokenizer):
    settings = {"sources": [source], "output_dir": tmp_path / "out"}
    samples.prepare(**settings, tokenizer_name_or_path=tokenizer, shard="0/1")
    record = next((tmp_path / "out/.shards").glob("unit-*.json"))
    content = json.loads(record.read_text())
    content["counts"]["splits"]["train"]["tokens"] += 1
    record.write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match=r"tokens, but .* were counted as they were"):
        samples.prepare(**settings, tokenizer_name_or_path=tokenizer, merge=1)


def test_the_result_is_held_against_the_counts_of_the_shards(tmp_path, source, tokenizer, caplog):
    with caplog.at_level(logging.INFO):
        samples.prepare(
            sources=[source], output_dir=tmp_path / "out", tokenizer_name_or_path=tokenizer
        )
    train = open_token_dataset(tmp_path / "out/train")
    assert (
        f"train: {len(train):,} documents, {train.lengths.sum():,} tokens, as counted while "
        f"tokenizing; fingerprint {train.fingerprint[:16]}"
    ) in caplog.messages


def test_a_tokenizer_trained_first_serves_the_shards_of_the_same_folder(tmp_path, source):
    out = tmp_path / "out"
    first = Preparation(
        PreparationArguments(
            sources=[str(source)], output_dir=str(out), train_tokenizer=300, tokenizer_only=True
        )
    )
    first.provide_tokenizer()
    first.finish_with_tokenizer()
    assert [path.name for path in out.iterdir()] == ["tokenizer"]
    settings = {"sources": [source], "tokenizer_name_or_path": str(out / "tokenizer")}
    for shard in (0, 1):
        samples.prepare(**settings, output_dir=out, shard=f"{shard}/2")
    samples.prepare(**settings, output_dir=out, merge=2)
    assert len(rows(out / "train")) == 200


# The script


@pytest.mark.slow
def test_the_script_prepares_reports_and_refuses(tmp_path, source):
    command = [
        *(sys.executable, "prepare_data.py", "--sources", str(source), "--train_tokenizer", "300"),
        *("--output_dir", str(tmp_path / "out")),
    ]
    first = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    for part in ("documents/s", "tokens/s", "loss-bearing", "p50", "[[0 ", "dropped: none"):
        assert part in first.stderr
    again = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert again.returncode == 0
    assert "already prepared" in again.stderr
    command[3] = str(tmp_path / "nowhere.jsonl")
    refused = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "nowhere.jsonl: no such file or folder" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_with_advice(
    tmp_path, source, tokenizer, workers_for_little, monkeypatch
):
    monkeypatch.setattr(unit_pool, "_run_unit", _killed)
    with pytest.raises(ConfigurationError, match=r"a worker process was killed.*fewer than --num"):
        samples.prepare(
            sources=[source],
            output_dir=tmp_path / "out",
            tokenizer_name_or_path=tokenizer,
            num_proc=2,
        )


def _killed(unit):
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10)


MEASURED = """
import resource, sys
from pathlib import Path
sys.path.insert(0, {repository!r})
import logging
from prepare_data import main
main({first!r})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
main({second!r})
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_source(tmp_path, tokenizer):
    # One unit and one document size, so that what is measured is streaming, not the cut.
    text = " ".join(samples.sentences(60))
    sizes = {"small": 1_000, "large": 10_000}
    for name, number in sizes.items():
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt", compresslevel=1) as stream:
            line = json.dumps({"text": text}) + "\n"
            for _ in range(number * 1000 // len(line)):
                stream.write(line)
    arguments = [
        [
            *("--sources", str(tmp_path / f"{name}.jsonl.gz"), "--output_dir"),
            *(str(tmp_path / name), "--tokenizer_name_or_path", tokenizer),
        ]
        for name in sizes
    ]
    script = MEASURED.format(repository=str(REPOSITORY), first=arguments[0], second=arguments[1])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    grown_mib = float(done.stdout.splitlines()[-1])
    assert grown_mib < 40
