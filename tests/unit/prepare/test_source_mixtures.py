"""Several sources in one recipe: weights, filters and caps."""

import datasets
import preparation_samples as samples
import pytest
import yaml

from prepare_data import main
from utils.prepare import work_plan


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


def test_a_recipe_with_a_filter_and_flags(tmp_path, tokenizer, two):
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
    row = {"question": "q", "prompt": 7, "answer": "a"}  # `question` replaces the column `prompt`
    samples.write_jsonl(tmp_path / "qa.jsonl", [row])
    flags = ["--sources", str(tmp_path / "qa.jsonl"), "--output_dir", str(tmp_path / "qa")]
    flags += ["--tokenizer_name_or_path", tokenizer, "--columns", "question=prompt"]
    assert main([*flags, "answer=completion"]) == 0
    made = datasets.load_from_disk(str(tmp_path / "qa" / "train"))
    assert made.column_names == ["input_ids", "completion_mask"]
