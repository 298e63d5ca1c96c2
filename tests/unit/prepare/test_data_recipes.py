"""Every data recipe prepares rows in the layout that its dataset is published in."""

from pathlib import Path

import datasets
import preparation_samples as samples
import pytest
from stand_in_hub import CHATS

ROOT = Path(__file__).parents[3]
RECIPES = sorted(path for path in ROOT.glob("recipes/data/*.yaml") if "demo" not in path.name)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a tokenizer and a user's own chats."""
    folder = tmp_path_factory.mktemp("here")
    samples.write_jsonl(folder / "my_chats.jsonl", CHATS)
    samples.saved_tokenizer(folder / "tokenizer", Path(samples.CHATML).read_text())
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_data_recipe_prepares_what_is_published(recipe, here, preparer, tmp_path):
    flags = ["--tokenizer_name_or_path", "tokenizer", "--output_dir", tmp_path / "out"]
    held_out = ["--validation_fraction", "0.1"] if "fraction" in recipe.read_text() else []
    code, told = preparer("--config", recipe, *flags, *held_out, folder=here)
    assert code == 0, told
    rows = datasets.load_from_disk(str(tmp_path / "out" / "train"))
    assert 10 < len(rows) <= 300
    if "fineweb" not in recipe.stem:
        mask = rows[0].get("completion_mask") or rows[0]["assistant_masks"]
        assert 0 < sum(mask) < len(mask) / 3, "an answer is a small part of these chats"
