"""Every data recipe prepares rows in the layout that its dataset is published in."""

import json
from pathlib import Path

import datasets
import preparation_samples as samples
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import prepare_data

ROOT = Path(__file__).parents[4]
RECIPES = sorted(path for path in ROOT.glob("recipes/data/*.yaml") if "demo" not in path.name)
QUESTIONS = [f"What is two and {n}? Think about it for as long as you like." for n in range(30)]
CHATS = [samples.chat(question, "4") | {"source": "tests"} for question in QUESTIONS]
PROBLEMS = [{"question": f"And what is {n} plus one?", "answer": f"#### {n}"} for n in range(30)]
PAGES = [{"text": f"Page {n} of the web.", "url": "u", "score": 3.5} for n in range(30)]
SAID = [
    {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": "4"}]}
    for question in QUESTIONS
]
# What `hf download` leaves: folder, files, rows. Layouts as of November 2026.
PUBLISHED = {
    "smoltalk/data/all": (["train-00000-of-00009", "test-00000-of-00001"], CHATS),
    "ultrachat/data": (["train_sft-00000-of-00003", "test_sft-00000-of-00001"], CHATS),
    "tulu3/data": (["train-00000-of-00006"], CHATS),
    "gsm8k/main": (["train-00000-of-00001", "test-00000-of-00001"], PROBLEMS),
    "fineweb-edu/sample/10BT": (["000_00000"], PAGES),
    "fineweb-edu/sample/100BT": (["000_00000"], PAGES),
}


@pytest.fixture(scope="module")
def downloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a tokenizer and data/hub, as the recipes' commands fill it."""
    here = tmp_path_factory.mktemp("downloaded")
    for folder, (files, rows) in PUBLISHED.items():
        (here / "data/hub" / folder).mkdir(parents=True)
        for name in files:
            pq.write_table(pa.Table.from_pylist(rows), here / f"data/hub/{folder}/{name}.parquet")
    (here / "data/hub/openhermes").mkdir()
    (here / "data/hub/openhermes/openhermes2_5.json").write_text(json.dumps(SAID))
    samples.write_jsonl(here / "my_chats.jsonl", CHATS)
    samples.saved_tokenizer(here / "tokenizer", Path(samples.CHATML).read_text())
    return here


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_data_recipe_prepares_what_is_published(recipe, downloaded, tmp_path, monkeypatch):
    monkeypatch.chdir(downloaded)
    flags = ["--tokenizer_name_or_path", "tokenizer", "--output_dir", str(tmp_path / "out")]
    held_out = ["--validation_fraction", "0.1"] if "fraction" in recipe.read_text() else []
    prepare_data.main(["--config", str(recipe), *flags, *held_out])
    rows = datasets.load_from_disk(str(tmp_path / "out" / "train"))
    assert 10 < len(rows) <= 200
    if "fineweb" not in recipe.stem:
        mask = rows[0].get("completion_mask") or rows[0]["assistant_masks"]
        assert 0 < sum(mask) < len(mask) / 3, "an answer is a small part of these chats"
