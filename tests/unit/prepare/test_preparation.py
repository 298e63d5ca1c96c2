"""The files of a preparation, its division into work, held-out documents and mixtures."""

import gzip
import hashlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from threading import Barrier

import datasets
import numpy as np
import preparation_samples as samples
import pytest
import yaml

from prepare_data import main
from utils.config.errors import ConfigurationError, LostProcessError, OutOfMemoryError
from utils.data.arrow_columns import open_columns
from utils.data.token_dataset import open_token_dataset
from utils.data.tokenizers import load_tokenizer
from utils.prepare import pipeline, units, work_plan
from utils.prepare.pipeline import decoded_example
from utils.prepare.rows import ChatDocument, RowSettings
from utils.prepare.units import content_digest
from utils.prepare.values import Location
from utils.prepare.work_plan import PreparationPlan, UnitSettings
from utils.prepare.workspace import WORKSPACE, Workspace
from utils.run.documents import source_locations


def test_load_from_disk_opens_every_split_with_the_smallest_type(tmp_path, source, prepare):
    more = samples.text_source(tmp_path / "more.jsonl", 20, seed=5)
    out = prepare("out", sources=[source], eval_sources=[f"more={more}"], validation_fraction=0.1)
    counts, fingerprints = {}, set()
    for split in ("train", "validation", "more"):
        dataset = datasets.load_from_disk(str(out / split))
        assert dataset.features == {"input_ids": datasets.List(datasets.Value("uint16"))}
        opened = open_token_dataset(out / split)
        assert opened.description.statistics.documents == len(dataset)
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


def test_each_document_is_traced_to_the_line_that_it_was_made_from(
    tmp_path, prepare, two, monkeypatch
):
    """Also with filtered rows, weights, held-out documents and units that begin inside a file."""
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")  # a relative path is found from any other folder
    kept = {"path": f"../{Path(two[1]).name}", "filter": {"language": "en"}, "weight": 1.5}
    out = prepare("out", sources=[two[0], kept], validation_fraction=0.1)
    tokenizer = load_tokenizer(str(out / "tokenizer"))
    lines = {path: Path(path).read_text().splitlines() for path in two}
    for split in ("train", "validation"):
        rows = samples.rows(out / split)
        found = source_locations(out / split, range(len(rows)))
        assert sorted(found) == [*range(len(rows))]
        for document, source in found.items():
            file, _, line = source.rpartition(":")
            text = json.loads(lines[file][int(line) - 1])["text"]
            assert rows[document] == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id], source
    Path(two[0]).unlink()
    moved = source_locations(out / "train", [5, 100]).values()
    assert [re.sub(r"\d+ after byte \d+", "N after byte M", each) for each in moved] == [
        f"{two[0]}:6",
        f"{two[0]} (missing), line N after byte M",
    ]


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


def test_the_digest_of_a_preparation_begun_before_own_formats_is_the_same():
    """Otherwise finished data would be refused, and unfinished work would be done again."""
    rows = {
        "row_format": "text", "columns": [], "filters": [], "weight": 1.0, "max_tokens": None,
        "chat_template_kwargs": None,
    }  # fmt: skip
    settings = {
        "document_format": "text", "sources": [rows], "on_bad_row": "error",
        "on_overlong": "error", "sequence_length": None, "validation_fraction": 0.0, "seed": 0,
        "template_date": None,
    }  # fmt: skip
    content = {
        "output_version": 3, "sources": {}, "settings": settings, "tokenizer": {},
        "versions": {name: version(name) for name in ("tokenizers", "transformers")},
    }  # fmt: skip
    begun = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def digest(own_format=""):
        sources = (RowSettings("text", own_format=own_format),)
        made = UnitSettings("text", sources, "error", "error", None, 0.0, 0)
        return PreparationPlan({}, [], made, False, {}, []).digest({})

    assert digest() == begun != digest("my:f")


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


def test_datasets_copied_with_their_sources_need_no_second_preparation(tmp_path, tokenizer, caplog):
    (tmp_path / "here").mkdir()
    source = samples.text_source(tmp_path / "here" / "a.jsonl", 20)
    given = {"tokenizer_name_or_path": tokenizer}
    samples.prepare(output_dir=tmp_path / "here/out", sources=[source], **given)
    there = shutil.copytree(tmp_path / "here", tmp_path / "there")
    with caplog.at_level("INFO"):
        samples.prepare(output_dir=there / "out", sources=[there / "a.jsonl"], **given)
    assert "already prepared with these settings" in caplog.text
    samples.text_source(there / "a.jsonl", 21)
    with pytest.raises(ConfigurationError, match="which was not made"):
        samples.prepare(output_dir=there / "out", sources=[there / "a.jsonl"], **given)


def check_planning(folder, given):
    """Check that planning, as a dry run does, changes nothing on disk."""
    before = {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}
    pipeline.begin_preparation(samples.arguments(**given))
    assert {path: path.lstat().st_mtime_ns for path in folder.rglob("*")} == before


def test_overwrite_replaces_finished_datasets_of_ours_when_the_new_ones_are_complete(
    tmp_path, prepare, source, tokenizer, monkeypatch, caplog
):
    caplog.set_level("INFO")
    out = prepare("out", sources=[source])
    old = samples.data_bytes(out)
    changed = {"sources": [source], "validation_fraction": 0.5, "overwrite": True}
    given = {"tokenizer_name_or_path": tokenizer, "output_dir": out, **changed}

    def killed(*_):
        raise KeyboardInterrupt

    # Killed while it assembles, and before it replaces: the old datasets are intact.
    for name, owner in (("assemble_split", pipeline), ("publish", Workspace)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, killed)
            with pytest.raises(KeyboardInterrupt):
                prepare("out", **changed)
        assert samples.data_bytes(out) == old
        check_planning(tmp_path, given)

    (out / "train/notes.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match=r"holds train/notes\.txt, which prepare_data\.py"):
        prepare("out", **changed)
    (out / "train/notes.txt").unlink()
    for state in ("old", "new"):  # hidden folders beside it, which the replacement uses
        mine = tmp_path / f".out.{state}" / "mine.txt"
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("mine")
        with pytest.raises(ConfigurationError, match=r"holds mine\.txt, which prepare_data\.py"):
            prepare("out", **changed)
        mine.unlink()
    assert samples.data_bytes(out) == old

    out.rename(tmp_path / ".out.old")  # killed when there is no folder
    check_planning(tmp_path, given)
    prepare("out", **changed)
    assert "the datasets of other settings are replaced" in caplog.text
    assert samples.data_bytes(out) == samples.data_bytes(
        prepare("other", sources=[source], validation_fraction=0.5)
    )
    assert sorted(path.name for path in tmp_path.glob("*out*")) == ["out"]
    before = (out / "train/stoker.json").stat().st_mtime_ns
    prepare("out", **changed)
    assert (out / "train/stoker.json").stat().st_mtime_ns == before


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


def test_the_held_out_split_depends_on_content_alone(tmp_path, prepare):
    texts = samples.sentences(300)
    shuffled = random.Random(3).sample([*texts, *texts[:100]], 400)
    held_out = []
    for name, order in (("a", texts), ("b", shuffled)):
        source = samples.write_jsonl(tmp_path / f"{name}.jsonl", [{"text": text} for text in order])
        out = prepare(name, sources=[source], validation_fraction=0.25)
        held_out.append({tuple(row) for row in samples.rows(out / "validation")})
        train = {tuple(row) for row in samples.rows(out / "train")}
        assert not train & held_out[-1]
        assert len(train | held_out[-1]) == 300
    assert held_out[0] == held_out[1]
    assert 45 < len(held_out[0]) < 105


def test_the_order_of_the_keys_of_a_chat_does_not_count():
    messages = samples.chat("q", "a")["messages"]
    chats = messages, [dict(reversed(turn.items())) for turn in messages], messages[:1]
    one, same, other = (content_digest(ChatDocument(c, Location("a")), 0) for c in chats)
    assert one == same != other


def test_a_weight_says_how_often_each_document_is_written(prepare, two):
    sources = [{"path": two[0], "weight": 2.5}, two[1]]
    out = prepare("out", sources=sources, validation_fraction=0.1)
    written = samples.tiny_tokenizer().batch_decode(samples.rows(out / "train"))
    held_out = samples.tiny_tokenizer().batch_decode(samples.rows(out / "validation"))
    assert {written.count(text) for text in written} == {1, 2, 3}
    assert 440 < sum(text.startswith("a ") for text in written) * 200 / 180 < 560
    assert len(set(held_out)) == len(held_out)
    assert not set(held_out) & set(written)


@pytest.mark.parametrize("cap", [50, 3000])
def test_a_cap_is_never_exceeded_and_nearly_reached(prepare, two, monkeypatch, cap):
    monkeypatch.setattr(work_plan, "LEAST_TOKENS_OF_A_UNIT", 200)
    out = prepare("out", sources=[{"path": two[0], "max_tokens": cap}])
    lengths = [len(row) for row in samples.rows(out / "train")]
    assert cap - 15 * max(lengths) <= sum(lengths) <= cap
    assert sum(lengths) > 0.5 * cap


def test_a_recipe_with_a_filter_and_flags(tmp_path, tokenizer, two, caplog):
    kept = {"language": "en", "score": {"min": 3}}
    recipe = {
        "sources": [{"path": two[0], "filter": kept}],
        "eval_sources": [{"name": "other", "path": two[1]}],
        "tokenizer_name_or_path": tokenizer,
        "output_dir": str(tmp_path / "out"),
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["--config", str(tmp_path / "recipe.yaml")]) == 0
    train = tmp_path / "out" / "train"
    assert len(samples.rows(train)) == 40
    assert samples.description(train)["preparation"]["sources"]["dropped"] == {"filtered": 160}
    assert len(samples.rows(tmp_path / "out" / "other")) == 200
    (Path(tokenizer) / "chat_template.jinja").write_text("{{ messages }}")
    row = {"question": "q", "prompt": 7, "answer": "a"}  # `question` replaces the column `prompt`
    samples.write_jsonl(tmp_path / "qa.jsonl", [row])
    flags = ["--sources", str(tmp_path / "qa.jsonl"), "--output_dir", str(tmp_path / "qa")]
    flags += ["--tokenizer_name_or_path", tokenizer, "--columns", "question=prompt"]
    assert main([*flags, "answer=completion"]) == 0
    made = datasets.load_from_disk(str(tmp_path / "qa" / "train"))
    assert made.column_names == ["input_ids", "completion_mask"]
    assert caplog.text.count("to train a chat model name the columns instruction and output") == 1


# --- the script as a process


def run(*command):
    environment = {**os.environ, "RAYON_NUM_THREADS": "4", "TOKENIZERS_PARALLELISM": "true"}
    command = [sys.executable, *map(str, command)]
    place = {"cwd": Path(__file__).parents[3], "env": environment}
    return subprocess.run(command, **place, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_script_prepares_reports_and_refuses(tmp_path, source, prepare, tokenizer):
    command = ["prepare_data.py", "--output_dir", tmp_path / "out"]
    command += ["--tokenizer_name_or_path", tokenizer]
    first = run(*command, "--sources", source)
    assert first.returncode == 0, first.stderr
    for part in ("documents/s", "tokens/s", "tokens a document: median", "[[0 "):
        assert part in first.stderr
    last = (
        f"next: python pretrain.py --train_data {tmp_path}/out/train, with a recipe and your other"
    )
    assert last in first.stderr.splitlines()[-1]
    assert not re.search(r"\bMiB|unknown|\bnan\b|\binf\b|dropped|gigatoken", first.stderr)
    assert max(len(line.replace(str(tmp_path), "")) for line in first.stderr.splitlines()) <= 160
    here = prepare("here", sources=[source]) / "tokenizer"
    assert samples.data_bytes(here) == samples.data_bytes(tmp_path / "out" / "tokenizer")
    refused = run(*command, "--sources", tmp_path / "nowhere.jsonl")
    assert refused.returncode == 2
    assert "nowhere.jsonl: no such file or folder" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
def test_a_bad_row_of_a_worker_names_its_line_and_a_killed_worker_ends_the_run_with_advice(
    source, prepare, workers_for_little, monkeypatch
):
    with source.open("a") as stream:
        stream.write("{oops\n")
    with pytest.raises(ConfigurationError, match=r"texts\.jsonl:201: malformed JSON") as caught:
        prepare("out", sources=[source], num_proc=2)
    assert len(caught.value.problems) == 1
    assert not caught.value.problems[0].startswith("-")
    # Forks, because a spawned worker would import this module only to be killed.
    forks = multiprocessing.get_context("fork")
    monkeypatch.setattr(units.multiprocessing, "get_context", lambda _: forks)
    monkeypatch.setattr(units, "_run_unit", _killed)
    with pytest.raises(LostProcessError, match="a worker process was killed: run the same command"):
        prepare("killed", sources=[source], num_proc=2)
    monkeypatch.setattr(units, "memory_kills", iter([3, 4]).__next__)
    with pytest.raises(OutOfMemoryError, match=r"memory ran out: .*fewer than --num_proc 2"):
        prepare("killed", sources=[source], num_proc=2)


def _killed(unit):
    os.kill(os.getpid(), signal.SIGKILL)


MEASURED = """
import resource, sys
sys.path.insert(0, ".")
from prepare_data import main
for name in ("small", "large"):
    flags = ["--sources", f"{sys.argv[1]}/{name}.jsonl.gz", "--output_dir", sys.argv[1] + name]
    main([*flags, "--tokenizer_name_or_path", sys.argv[2]])
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_source(tmp_path, tokenizer):
    # One unit and documents of one size: this measures streaming, not the division into units.
    line = json.dumps({"text": " ".join(samples.sentences(60))}) + "\n"
    for name, kilobytes in (("small", 1_000), ("large", 10_000)):
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt", compresslevel=1) as stream:
            stream.writelines([line] * (kilobytes * 1000 // len(line)))
    done = run("-c", MEASURED, tmp_path, tokenizer)
    assert done.returncode == 0, done.stderr
    small_kib, large_kib = map(int, done.stdout.split())
    assert large_kib - small_kib < 40 * 1024
