"""Several sources in one recipe: weights, filters, caps and splits, whatever divides the work."""

import json
import re
from pathlib import Path

import datasets
import preparation_samples as samples
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from prepare_data import main
from utils.config.errors import ConfigurationError
from utils.config.preparation import PreparationArguments, sources_of
from utils.data.prepare import plan as plan_module
from utils.data.prepare.plan import plan_preparation


def plan(sources, **settings):
    given = {"output_dir": "out", "tokenizer_name_or_path": "t", **settings}
    return plan_preparation(PreparationArguments(sources=sources, **given))


def texts(output, tokenizer_folder, split="train"):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    return tokenizer.batch_decode(samples.rows(output / split), skip_special_tokens=True)


def test_a_weight_says_how_often_each_document_is_written(tmp_path, tokenizer, two):
    sources = [{"path": two[0], "weight": 2.5}, two[1]]
    out = tmp_path / "out"
    samples.prepare(
        sources=sources, output_dir=out, tokenizer_name_or_path=tokenizer, validation_fraction=0.1
    )
    written = texts(out, tokenizer)
    held_out = texts(out, tokenizer, "validation")
    counts = [sum(text == each for each in written) for text in dict.fromkeys(written)]
    assert set(counts) == {1, 2, 3}
    assert 440 < sum(text.startswith("a ") for text in written) * 200 / 180 < 560
    assert len(set(held_out)) == len(held_out)
    assert not set(held_out) & set(written)


@pytest.mark.parametrize("cap", [50, 3000])
def test_a_cap_is_never_exceeded_and_nearly_reached(
    tmp_path, tokenizer, two, small_units, monkeypatch, cap
):
    monkeypatch.setattr(plan_module, "LEAST_TOKENS_OF_A_UNIT", 200)
    out = tmp_path / "out"
    source = {"path": two[0], "max_tokens": cap}
    samples.prepare(sources=[source], output_dir=out, tokenizer_name_or_path=tokenizer)
    lengths = [len(row) for row in samples.rows(out / "train")]
    assert cap - 15 * max(lengths) <= sum(lengths) <= cap
    assert sum(lengths) > 0.5 * cap


def test_sources_of_several_formats_make_one_dataset_of_chats(tmp_path):
    shares = [{"conversations": [{"from": "human", "value": "q"}]}]
    samples.write_jsonl(tmp_path / "a.jsonl", [samples.chat("q", "a")])
    samples.write_jsonl(tmp_path / "b.jsonl", shares)
    samples.write_jsonl(tmp_path / "c.jsonl", [{"question": "q", "answer": "a"}])
    both = {"instruction": "i", "output": "o", "text": "t"}  # what comes before decides
    samples.write_jsonl(tmp_path / "d.jsonl", [both])
    sources = [{"path": str(tmp_path / f"{name}.jsonl")} for name in "abcd"]
    sources[2]["columns"] = {"question": "instruction", "answer": "output"}
    settings = plan(sources).settings
    assert settings.document_format == "messages"
    formats = [rows.row_format for rows in settings.sources]
    assert formats == ["messages", "sharegpt", "alpaca", "alpaca"]
    sources[2]["columns"] = {"question": "prompt", "answer": "completion"}
    with pytest.raises(ConfigurationError, match=r"makes prompt_completion, but .* messages"):
        plan(sources)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"path": "a", "wieght": 2}, "unknown key 'wieght': known are path"),
        ({"path": "a", "filter": {"score": {"least": 3}}}, "give a value, a list of values, or"),
        ({"weight": 2}, "needs a path"),
        ({"path": "a", "weight": 0}, "weight is 0: give a number above 0"),
        ({"path": "a", "max_tokens": 1.5}, "max_tokens is 1.5"),
        ({"path": "a", "format": "csv"}, "format 'csv' is none of auto, text"),
        ({"path": "a", "columns": {"x": "y"}}, "columns: x=y: give THEIRS=OURS"),
        ({"path": "a", "columns": ["a=text", "b=text"]}, "a=text: give THEIRS=OURS, .* each once"),
    ],
)
def test_an_entry_that_cannot_be_read_says_why(entry, message):
    with pytest.raises(ConfigurationError, match=message):
        plan([entry])


def test_the_documented_recipe_is_read():
    text = (Path(__file__).parents[4] / "docs" / "data.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    arguments = PreparationArguments(output_dir="out", **yaml.safe_load(block))
    alpaca, tulu, gsm8k, test = sources_of(arguments)
    assert (alpaca.weight, tulu.from_split, tulu.max_tokens) == (2, "train_sft", 50_000_000)
    assert tulu.filters == (("language", ["en", "de"]), ("score", {"min": 3}))
    assert gsm8k.columns == (("question", "instruction"), ("answer", "output"))
    assert (test.split, test.paths) == ("gsm8k", ("data/gsm8k/test.jsonl",))


def test_a_filter_without_its_column_and_a_file_in_two_entries_are_refused(two):
    with pytest.raises(ConfigurationError, match=r"a\.jsonl:1: no 'lang', which the filter"):
        plan([{"path": two[0], "filter": {"lang": "en"}}])
    with pytest.raises(ConfigurationError, match="is given twice for train; give it a weight"):
        plan([{"path": two[0]}, {"path": two[0]}])


def test_a_recipe_with_a_filter_and_flags(tmp_path, tokenizer, two):
    kept = {"language": "en", "score": {"min": 3}}
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump(
            {
                "sources": [{"path": two[0], "filter": kept}],
                "eval_sources": [{"name": "other", "path": two[1]}],
                "tokenizer_name_or_path": tokenizer,
                "output_dir": str(tmp_path / "out"),
            }
        )
    )
    assert main(["--config", str(tmp_path / "recipe.yaml")]) == 0
    assert len(samples.rows(tmp_path / "out" / "train")) == 40
    described = json.loads((tmp_path / "out" / "train" / "stoker.json").read_text())
    assert described["preparation"]["sources"]["dropped"] == {"filtered": 160}
    assert len(samples.rows(tmp_path / "out" / "other")) == 200
    samples.write_jsonl(tmp_path / "qa.jsonl", [{"question": "q", "answer": "a"}])
    flags = ["--sources", str(tmp_path / "qa.jsonl"), "--output_dir", str(tmp_path / "qa")]
    flags += ["--tokenizer_name_or_path", tokenizer, "--columns", "question=prompt"]
    assert main([*flags, "answer=completion"]) == 0
    assert datasets.load_from_disk(str(tmp_path / "qa" / "train")).column_names == [
        "input_ids",
        "completion_mask",
    ]


def hub_folder(folder, splits):
    for split, names in splits.items():
        for number, name in enumerate(names):
            path = folder / "data" / f"{split}-{number:05d}-of-{len(names):05d}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table({"text": [name]}), path)
    (folder / "README.md").write_text("# a card")
    return str(folder)


def taken(found, split="train"):
    return [file.path.rsplit("/", 1)[1].removesuffix(".parquet") for file in found[split]]


def test_of_a_folder_of_the_hub_the_train_split_is_taken(tmp_path, caplog):
    folder = hub_folder(tmp_path / "hub", {"train": "ab", "test": "c", "validation": "d"})
    samples.text_source(tmp_path / "hub" / "data" / "train.jsonl", 3)  # once more
    with caplog.at_level("WARNING"):
        found = plan([folder], eval_sources=[f"test={folder}", f"validation={folder}"]).sources
    assert taken(found) == ["train-00000-of-00002", "train-00001-of-00002"]
    assert taken(found, "test") == ["test-00000-of-00001"]
    assert taken(found, "validation") == ["validation-00000-of-00001"]
    assert "split train is taken; not used: test, validation" in caplog.text
    assert f"--eval_sources NAME={folder}" in caplog.text
    assert "1 x README" in caplog.text
    assert "in several formats (.parquet, .jsonl) .parquet is taken" in caplog.text


def test_splits_of_other_names_are_named_by_the_user(tmp_path):
    folder = hub_folder(tmp_path / "hub", {"train_sft": "a", "test_sft": "b"})
    with pytest.raises(ConfigurationError, match=r"has no split 'train'; .* test_sft, train_sft"):
        plan([folder])
    found = plan([{"path": folder, "split": "train_sft"}]).sources
    assert taken(found) == ["train_sft-00000-of-00001"]
    with pytest.raises(ConfigurationError, match="has no split 'gone'"):
        plan([{"path": folder, "split": "gone"}])


def test_a_folder_of_one_split_or_of_none_is_taken_whole(tmp_path):
    alone = hub_folder(tmp_path / "one", {"test": "ab"})
    no_splits = hub_folder(tmp_path / "two", {"books": "ab", "wiki": "c"})
    (tmp_path / "plain").mkdir()
    for name in ("train.jsonl", "more.jsonl", "notes.txt"):
        samples.text_source(tmp_path / "plain" / name, 3)
    for folder, number in ((alone, 2), (no_splits, 3), (str(tmp_path / "plain"), 3)):
        assert len(plan([folder]).sources["train"]) == number


def test_plain_names_folders_and_a_dataset_dict_tell_splits_too(tmp_path):
    for name in ("names/alpaca_train", "names/alpaca_test", "names/extra", "tree/train/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        samples.text_source(tmp_path / f"{name}.jsonl", 3)
    (tmp_path / "tree" / "dev").mkdir()
    samples.text_source(tmp_path / "tree" / "dev" / "x.jsonl", 3)
    table = datasets.Dataset.from_dict({"text": ["a"]})
    both = datasets.DatasetDict({"train": table, "train_sft": table, "validation": table})
    both.save_to_disk(str(tmp_path / "dict"))
    assert taken(plan([str(tmp_path / "names")]).sources) == ["alpaca_train.jsonl"]
    for name, ends in (
        ("tree", ["train/x.jsonl", "dev/x.jsonl"]),
        ("dict", ["train", "validation"]),
    ):
        folder = tmp_path / name
        found = plan([str(folder)], eval_sources=[f"validation={folder}"]).sources
        (files,) = zip(*found.values(), strict=True)
        assert [Path(file.path).relative_to(folder).as_posix() for file in files] == ends
    named = plan([{"path": str(tmp_path / "dict"), "split": "train_sft"}]).sources["train"]
    assert [Path(file.path).name for file in named] == ["train_sft"]
