"""Datasets and models of the Hub by name: downloads, records and refusals.

The real clients run against a stand-in on loopback with the layout of published datasets.
"""

import json
import shutil
from pathlib import Path

import datasets
import preparation_samples as samples
import pytest
from stand_in_hub import CHATS, ROOT, TOKEN, Preparer, parquet, publish

from utils.config.errors import StorageError
from utils.prepare import fetch

NOBODY = "http://127.0.0.1:9"  # nothing answers at this port
SMOLTALK = {"path": "HuggingFaceTB/smoltalk", "subset": "all"}
QWEN = "Qwen/Qwen3-8B"
NAMED_TEMPLATE = "additional_chat_templates/tool_use.jinja"  # as transformers saves it
WEIGHTS = "model-00001-of-00001.safetensors"

LOCAL = {"demo_chats", "demo_pretrain", "real_text"}  # their files are made by hand
RECIPES = sorted(path for path in ROOT.glob("recipes/data/*.yaml") if path.stem not in LOCAL)

pytestmark = pytest.mark.slow


@pytest.fixture
def recipe(tmp_path):
    """Write a recipe with a source; for smoltalk also with its test split."""

    def written(*sources: dict, **settings) -> str:
        held_out = (
            [SMOLTALK | {"name": "heldout", "split": "test"}] if sources == (SMOLTALK,) else []
        )
        settings = {"sources": list(sources), "eval_sources": held_out, **settings}
        path = tmp_path / f"recipe-{len(list(tmp_path.iterdir()))}.json"
        path.write_text(json.dumps({"tokenizer_name_or_path": QWEN, **settings}))
        return str(path)

    return written


def test_a_dataset_is_fetched_by_name_once_and_found_without_a_network(
    hub, preparer, recipe, tmp_path
):
    config = recipe(SMOLTALK)
    hub.downloads()
    code, told = preparer("--config", config, "--models", QWEN, "--output_dir", tmp_path / "a")
    assert code == 0, told
    data = [
        f"data/all/{name}-0000{n}-of-00002.parquet" for name in ("test", "train") for n in (0, 1)
    ]
    model = [NAMED_TEMPLATE, "chat_template.jinja", "config.json"]
    assert hub.downloads() == ["README.md", *model, *data, WEIGHTS, "tokenizer.json",
                               "tokenizer_config.json"]  # fmt: skip
    assert "smoltalk, all, train, commit" in told
    assert "are free" in told.split("downloaded:")[0], "size and room come before"

    commit = hub.repositories["datasets/HuggingFaceTB/smoltalk"].refs["main"]
    origin = samples.description(tmp_path / "a/train")["preparation"]
    assert origin["sources"]["hub"] == {"HuggingFaceTB/smoltalk@main": commit}
    first = next(iter(origin["sources"]["first_files"]))
    assert first == f"hf://datasets/HuggingFaceTB/smoltalk@{commit}/data/all/{data[2][9:]}"
    assert origin["settings"]["template_date"] == "2026-11-03", "the day of the commit"

    # The same files as local sources give the same documents in the same order.
    snapshot = preparer.home / f"hub/datasets--HuggingFaceTB--smoltalk/snapshots/{commit}/data/all"
    for name in data[2:]:
        shutil.copy(snapshot / Path(name).name, tmp_path)
    tokenizer = str(tmp_path / "a/tokenizer")
    local = [str(tmp_path / Path(name).name) for name in data[2:]]
    samples.prepare(local, tmp_path / "local", tokenizer_name_or_path=tokenizer)
    assert samples.rows(tmp_path / "local/train") == samples.rows(tmp_path / "a/train")

    # Prepare again; then in another folder; then without a connection to the Hub.
    code, told = preparer("--config", config, "--models", QWEN, "--output_dir", tmp_path / "a")
    assert "already prepared" in told
    assert hub.downloads() == []
    hub.fails = True
    code, told = preparer("--config", config, "--models", QWEN, "--output_dir", tmp_path / "c")
    hub.fails = False
    assert code == 0, told
    words, alone = ["--config", config, "--models", QWEN], Preparer(NOBODY, preparer.home)
    refused, why = alone(*words, "--output_dir", "x", "--offline_dir", tmp_path / "empty")
    code, told = alone(*words, "--output_dir", tmp_path / "b")
    alone.close()
    assert refused == 2, why
    assert f"HuggingFaceTB/smoltalk, {QWEN}: {NOBODY} cannot be reached (ConnectError" in why
    assert "with --offline_dir" not in why, "it was given"
    assert code == 0, told
    assert "using the cache of the Hub" in told
    found = samples.description(tmp_path / "b/train")
    assert found["fingerprint"] == samples.description(tmp_path / "a/train")["fingerprint"]
    assert found["preparation"]["settings_sha256"] == origin["settings_sha256"]


def test_revisions_files_and_splits_that_a_source_names(hub, preparer, recipe, tmp_path):
    old = publish(hub, "lab/data", {"default": {"train": "data/train-*"}}, CHATS[:5])
    hub.repositories["datasets/lab/data"].refs["v1"] = old
    new = publish(hub, "lab/data", {"default": {"train": "data/train-*"}}, CHATS)
    script = {"README.md": b"# A dataset", "scripted.py": b"import datasets"}
    hub.add("datasets/lab/scripted", script)
    converted = {f"{name}/{split}/0000.parquet": parquet(CHATS[:n]) for name, split, n in
                 (("a", "train", 3), ("a", "partial-test", 4), ("b", "train", 5))}  # fmt: skip
    hub.add("datasets/lab/scripted", converted, ref="refs/convert/parquet")
    branch = {"path": "lab/scripted", "revision": "refs/convert/parquet"}
    rows = {
        "old": ({"path": "lab/data", "revision": "v1"}, 12, old),
        "commit": ({"path": f"hf://datasets/lab/data@{old}"}, 12, old),
        "new": ({"path": "lab/data"}, 62, new),
        "one": ({"path": "lab/data", "max_files": 1}, 31, new),
        "parquet": ({**branch, "subset": "a"}, 3, None),
        "partial": ({**branch, "subset": "a", "split": "test"}, 4, None),
        "sft": ({"path": "HuggingFaceH4/ultrachat_200k", "split": "train_sft"}, 62, None),
        # Two of this dataset's four files have the same content. They are read only once.
        "default": ({"path": "HuggingFaceFW/fineweb-edu"}, 17, None),
    }
    hub.downloads()
    for name, (source, number, commit) in rows.items():
        code, told = preparer("--config", recipe(source), "--output_dir", tmp_path / name)
        assert code == 0, told
        assert len(datasets.load_from_disk(str(tmp_path / name / "train"))) == number, name
        found = samples.description(tmp_path / name / "train")["preparation"]["sources"]["hub"]
        assert commit is None or list(found.values()) == [commit], name
        assert ("converted only the first 5 GB" in told) == (name == "partial")
        if name == "one":
            assert "data/train-00001-of-00002.parquet" not in told
    assert "subset default; not sample-10BT, sample-100BT" in told


def test_shards_and_later_starts_stay_with_the_commit_they_began_with(
    hub, preparer, recipe, tmp_path
):
    subsets = {"default": {"train": "data/train-*"}}
    began = publish(hub, "lab/moving", subsets, CHATS[:20])
    words = ["--config", recipe({"path": "lab/moving"}), "--output_dir", tmp_path / "out"]
    assert preparer(*words, "--shard", "0/2")[0] == 0
    publish(hub, "lab/moving", subsets, CHATS)  # between two tasks of the array
    assert preparer(*words, "--shard", "1/2")[0] == 0
    code, told = preparer(*words, "--merge", 2)
    assert code == 0, told
    origin = samples.description(tmp_path / "out/train")["preparation"]["sources"]
    assert list(origin["hub"].values()) == [began]
    assert len(samples.rows(tmp_path / "out/train")) == 42
    assert "already prepared" in preparer(*words)[1]
    assert preparer(*words[:2], "--output_dir", tmp_path / "next")[0] == 0
    assert len(samples.rows(tmp_path / "next/train")) == 62


def test_what_the_hub_does_not_give_is_refused_at_once_with_what_to_type(
    hub, preparer, recipe, tmp_path
):
    (tmp_path / "mine.jsonl").write_text(json.dumps(CHATS[0]))
    hub.add("datasets/lab/gated", {"README.md": b"# A", "train.jsonl": b"{}"}, gated=True)
    hub.add("datasets/lab/script", {"README.md": b"# A", "script.py": b""})
    hub.add("datasets/lab/images", {"README.md": b"# A", "notes.xyz": b"?"})
    hub.add("models/lab/pickled", {"config.json": b"{}", "pytorch_model.bin": b""})
    gsm8k = {"path": "openai/gsm8k"}
    faults = [
        (gsm8k, "['main', 'socratic']: choose one in a recipe"),
        (
            gsm8k | {"subset": "mian"},
            "'mian' not found. Available: ['main', 'socratic']: choose one",
        ),
        (gsm8k | {"subset": "main", "split": "dev"}, "has no split 'dev' but train, test"),
        (gsm8k | {"subset": "main", "revision": "v9"}, "Revision Not Found"),
        ({"path": "openai/gsm9k"}, "gsm9k, lab/nothing: no such local path, and no such name on"),
        ({"path": "lab/gated"}, "HF_TOKEN of an account that has accepted its terms into .env"),
        ({"path": "lab/script"}, "have Parquet files: give revision: refs/convert/parquet"),
        ({"path": "lab/images"}, "data files"),
        ({"path": "hf://buckets/lab/x"}, "give hf://datasets/OWNER/NAME"),
        ({"path": "lab/chats.jsonl"}, "no such file or folder"),
        ({"path": str(tmp_path / "mine.jsonl"), "subset": "a"}, "this is a local path"),
    ]
    hub.downloads()
    config = recipe(*[source for source, _ in faults])
    names = ["lab/pickled", "lab/nothing", str(tmp_path), f"{QWEN}@v9"]
    words = ["--config", config, "--output_dir", tmp_path / "out"]
    code, told = preparer(*words, "--models", *names)
    assert code == 2
    lines = [line for line in told.splitlines() if line.startswith("  - ")]
    of_models = ["no weights as safetensors", "is a local path", "Revision Not Found"]
    for line, fault in zip(lines, [*(fault for _, fault in faults), *of_models], strict=True):
        assert fault in line
    assert [name for name in hub.downloads() if name != "README.md"] == []

    gated = ["--config", recipe({"path": "lab/gated"}), "--output_dir", tmp_path / "gated"]
    assert "HF_TOKEN" in preparer(*gated, HF_TOKEN=f"{TOKEN}2")[1]
    told = preparer(*gated, HF_TOKEN=TOKEN)[1]
    assert "downloaded: lab/gated" in told


def test_a_folder_for_jobs_is_filled_and_checked_as_a_job_finds_it(hub, preparer, recipe, tmp_path):
    home, words = tmp_path / "jobs", ["--config", recipe(SMOLTALK), "--models", QWEN]
    hub.downloads()
    code, told = preparer(*words, "--output_dir", tmp_path / "out", "--offline_dir", home)
    assert code == 0, told
    assert not (tmp_path / "out").exists()
    assert WEIGHTS in hub.downloads()
    code, told = preparer(*words, "--offline_dir", home, "--output_dir", "x", SLURM_JOB_ID="1",
                          HF_HUB_OFFLINE="1")  # fmt: skip
    assert hub.downloads() == []

    # A job reads a copy of the folder. If a file is missing there, the error names the file.
    copy = tmp_path / "copy"
    shutil.copytree(home, copy, symlinks=True)
    job = Preparer(NOBODY, copy, SLURM_JOB_ID="1")
    code, told = job(*words[:2], "--output_dir", tmp_path / "out")
    assert code == 0, told
    assert "using the cache of the Hub" not in told, "a job does not try"
    assert preparer(*words[:2], "--output_dir", tmp_path / "here")[0] == 0
    here, found = (samples.description(tmp_path / name / "train") for name in ("here", "out"))
    assert found["fingerprint"] == here["fingerprint"]
    digests = [each["preparation"]["settings_sha256"] for each in (here, found)]
    assert digests[0] == digests[1]
    data = "data/all/train-00001-of-00002.parquet"
    next((copy / "hub").glob(f"*/snapshots/*/{data}")).unlink()
    code, told = job(*words[:2], "--output_dir", tmp_path / "new")
    job.close()
    assert code == 2
    assert f"{data}: is not in the cache" in told

    # The same command downloads missing files, and refuses files that do not load.
    fill = [*words, "--output_dir", tmp_path / "out", "--offline_dir", home]
    for name in (WEIGHTS, data):
        next((home / "hub").glob(f"*/snapshots/*/{name}")).unlink()
    for blob in (home / "hub").glob("*/blobs/*"):
        if not any(link.resolve() == blob for link in (home / "hub").glob("*/snapshots/*/**/*")):
            blob.unlink()
    code, told = preparer(*fill)
    assert code == 0, told
    assert hub.downloads() == [data, WEIGHTS]
    for name in ("config.json", "tokenizer.json"):
        file = next((home / "hub").glob(f"models--*/snapshots/*/{name}")).resolve()
        content = file.read_text()
        file.write_text("{")
        code, told = preparer(*fill)
        file.write_text(content)
        assert code == 2, name
        assert f"{name} is not JSON" in told


def test_what_has_no_room_is_refused_before_it_is_downloaded(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=10**9)
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: usage)
    fetch.check_disk_space(tmp_path / "new/hub", 10**9)
    with pytest.raises(StorageError, match=r"has 1.0 GB free, and 2.9 GB are to be"):
        fetch.check_disk_space(tmp_path / "new/hub", 2_900_000_000)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_data_recipe_prepares_what_is_published(path, preparer, tmp_path):
    """The directory has a tokenizer and a user's own chats."""
    samples.write_jsonl(tmp_path / "my_chats.jsonl", CHATS)
    samples.saved_tokenizer(tmp_path / "tokenizer", Path(samples.CHATML).read_text())
    flags = ["--tokenizer_name_or_path", "tokenizer", "--output_dir", tmp_path / "out"]
    held_out = ["--validation_fraction", "0.1"] if "fraction" in path.read_text() else []
    code, told = preparer("--config", path, *flags, *held_out, folder=tmp_path)
    assert code == 0, told
    rows = datasets.load_from_disk(str(tmp_path / "out" / "train"))
    assert 10 < len(rows) <= 300
    if "fineweb" not in path.stem:
        mask = rows[0].get("completion_mask") or rows[0]["assistant_masks"]
        assert 0 < sum(mask) < len(mask) / 3, "an answer is a small part of these chats"
