"""The plan of a preparation: formats, entries of recipes, splits of folders."""

import json
import re
from pathlib import Path

import datasets
import preparation_samples as samples
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from utils.config.errors import ConfigurationError
from utils.config.preparation import PreparationArguments, parse_sources
from utils.prepare.work_plan import plan_preparation


def plan(*sources, **settings):
    given = {"output_dir": "out", "tokenizer_name_or_path": "t", **settings}
    sources = [source if isinstance(source, dict) else str(source) for source in sources]
    return plan_preparation(PreparationArguments(sources=sources, **given))


def test_columns_decide_the_format_unless_it_is_given(tmp_path):
    source = samples.write_jsonl(tmp_path / "a.jsonl", [{"body": "a"}])
    assert plan(source, columns=["body=text"]).settings.document_format == "text"
    with pytest.raises(ConfigurationError, match=r"a\.jsonl:1: no known format.*\(columns: body\)"):
        plan(source)
    both = samples.write_jsonl(tmp_path / "b.jsonl", [{"text": "a", **samples.chat("q", "a")}])
    with pytest.raises(ConfigurationError, match="could be text or messages: choose one with"):
        plan(both)
    assert plan(both, format="messages").settings.document_format == "messages"
    with pytest.raises(ConfigurationError, match="it looks like text: --format text"):
        plan(both, format="sharegpt")
    lines = plan(source, columns=["body=text", "contxt=input"]).lines
    assert "--columns names contxt, which the first record does not have" in str(lines)
    keys = {"messages": '[{"who": "user", "content": "q"}, {"who": "assistant", "content": "a"}]'}
    chat = samples.write_jsonl(tmp_path / "c.jsonl", [keys])
    lines = plan(chat, columns=["who=role", "loud=weight", "robot=assistant"]).lines
    assert "--columns names loud, which the first record does not have" in str(lines)


def test_a_name_that_the_first_record_does_not_have_is_told(tmp_path):
    path = samples.write_jsonl(tmp_path / "a.jsonl", [samples.chat("q", "a")])
    with pytest.raises(ConfigurationError, match=r"names mesages, .* \(columns: messages\)"):
        plan({"path": str(path), "columns": {"mesages": "messages"}})


def test_sources_of_several_formats_make_one_dataset_of_chats(tmp_path):
    rows = {
        "messages": samples.chat("q", "a"),
        "sharegpt": {
            "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
        },
        "renamed": {"question": "q", "answer": "a"},
        # This row could be alpaca or text. The format of the earlier sources decides.
        "alpaca": {"instruction": "i", "output": "o", "text": "t"},
    }
    paths = [samples.write_jsonl(tmp_path / f"{name}.jsonl", [rows[name]]) for name in rows]
    sources = [{"path": str(path)} for path in paths]
    sources[2]["columns"] = {"question": "instruction", "answer": "output"}
    settings = plan(*sources).settings
    assert settings.document_format == "messages"
    formats = [rows.row_format for rows in settings.sources]
    assert formats == ["messages", "sharegpt", "alpaca", "alpaca"]
    sources[2]["columns"] = {"question": "prompt", "answer": "completion"}
    with pytest.raises(ConfigurationError, match=r"makes prompt_completion, but .* messages"):
        plan(*sources)


def test_a_first_record_that_is_missing_or_broken_stops_at_once_unless_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(ConfigurationError, match="train: empty source: no record in its files"):
        plan(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text('{oops\n{"text": 1}\n')
    with pytest.raises(ConfigurationError, match=r"a\.jsonl:2: 'text' must be a string.*skip"):
        plan(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text("{oops\n" * 200)
    with pytest.raises(ConfigurationError, match=r"a\.jsonl:1: malformed JSON.*on_bad_row skip"):
        plan(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text('{oops\n{"text": 1}\n{"text": "a"}\n')
    assert plan(tmp_path / "a.jsonl").settings.document_format == "text"  # units name all bad rows
    assert plan(tmp_path / "a.jsonl", on_bad_row="skip").settings.document_format == "text"


def test_all_paths_are_checked_at_once(source):
    with pytest.raises(ConfigurationError) as caught:
        plan(
            source, "gone.jsonl", "none*.txt", eval_sources=["b=gone2.jsonl"], chat_template="c.jin"
        )
    joined = "\n".join(caught.value.problems)
    for part in ("chat_template: c.jin", "gone.jsonl", "none*.txt", "gone2.jsonl"):
        assert part in joined
    assert len(caught.value.problems) == 4


def test_a_file_in_two_entries_and_a_filter_without_its_column_are_refused(source):
    with pytest.raises(
        ConfigurationError, match=r"texts\.jsonl: is given for both train and other"
    ):
        plan(source, eval_sources=[f"other={source}"])
    with pytest.raises(ConfigurationError, match="is given twice for train; give it a weight"):
        plan({"path": str(source)}, {"path": str(source)})
    with pytest.raises(ConfigurationError, match=r"texts\.jsonl:1: no 'lang', which the filter"):
        plan({"path": str(source), "filter": {"lang": "en"}})


UNREADABLE = [
    ({"path": "a", "wieght": 2}, "unknown key 'wieght': known are path"),
    ({"path": "a", "filter": {"score": {"least": 3}}}, "give a value, a list of values, or"),
    ({"weight": 2}, "needs a path"),
    ({"path": "a", "weight": 0}, "weight is 0: give a number above 0"),
    ({"path": "a", "max_tokens": 1.5}, "max_tokens is 1.5"),
    ({"path": "a", "format": "csv"}, "format 'csv' is none of auto, text"),
    ({"path": "a", "format": 5}, "format 5 is none of auto, text"),
    ({"path": "a", "columns": ["a=text", "b=text"]}, "a=text: give THEIRS=OURS, .* each once"),
    ("name=", "give NAME=PATH"),
    ("Big Name=x.jsonl", "use lower-case letters"),
    ("validation=x.jsonl", "none of train, tokenizer, validation"),
]


def test_an_entry_that_cannot_be_read_says_why(source):
    for entry, message in UNREADABLE:
        given = {"eval_sources": [entry]} if isinstance(entry, str) else {}
        with pytest.raises(ConfigurationError, match=message):
            plan(source if given else entry, **given, validation_fraction=0.1)


def test_the_documented_recipes_are_read():
    text = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    local, hub, thoughts = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    given = PreparationArguments(output_dir="out", **yaml.safe_load(thoughts))
    plain, thinking = parse_sources(given)
    assert (plain.chat_template_kwargs, given.chat_template_kwargs) == (
        None,
        {"enable_thinking": False},
    )
    assert thinking.chat_template_kwargs == {"enable_thinking": True}
    (smoltalk,) = parse_sources(
        PreparationArguments(output_dir="out", tokenizer_name_or_path="x", **yaml.safe_load(hub))
    )
    assert (smoltalk.subset, smoltalk.from_split, smoltalk.max_files) == ("all", "train", 1)
    arguments = PreparationArguments(output_dir="out", **yaml.safe_load(local))
    alpaca, tulu, gsm8k, test = parse_sources(arguments)
    assert (alpaca.weight, tulu.from_split, tulu.max_tokens) == (2, "train_sft", 50_000_000)
    assert tulu.filters == (("language", ["en", "de"]), ("score", {"min": 3}))
    assert gsm8k.columns == (("question", "instruction"), ("answer", "output"))
    assert (test.split, test.paths) == ("gsm8k", ("data/gsm8k/test.jsonl",))


def hub_folder(folder, **splits):
    """Write Parquet files as on the Hub: one file of one document per letter of a split's texts."""
    (folder / "data").mkdir(parents=True)
    for split, texts in splits.items():
        for number, text in enumerate(texts):
            name = f"{split}-{number:05d}-of-{len(texts):05d}.parquet"
            pq.write_table(pa.table({"text": [text]}), folder / "data" / name)
    (folder / "README.md").write_text("# a card")
    return folder


def taken(*sources, split="train", **settings):
    found = plan(*sources, **settings).sources[split]
    return [Path(file.path).name.removesuffix(".parquet") for file in found]


def test_of_a_folder_of_the_hub_the_train_split_is_taken(tmp_path):
    folder = hub_folder(tmp_path / "hub", train="ab", test="c", validation="d")
    assert taken(folder) == ["train-00000-of-00002", "train-00001-of-00002"]
    for split in ("test", "validation"):
        found = taken(folder, eval_sources=[f"{split}={folder}"], split=split)
        assert found == [f"{split}-00000-of-00001"]
    lines = str(plan(folder).lines)
    assert "of its splits train is read here, not test, validation" in lines
    both = str(plan(folder, eval_sources=[f"test={folder}"]).lines)
    assert "not used" not in both
    assert f"--eval_sources NAME={folder}" in lines
    assert "1 x README" in lines
    samples.text_source(folder / "data" / "train.jsonl", 3)
    with pytest.raises(ConfigurationError, match="has train in several formats"):
        plan(folder)


def test_numbers_behind_a_dot_are_no_formats(tmp_path):
    """As in allenai/c4."""
    names = [f"c4-train.0000{number}-of-00002.jsonl" for number in range(2)]
    for name in [*names, "c4-validation.00000-of-00001.jsonl"]:
        samples.text_source(tmp_path / name, 3)
    assert taken(tmp_path) == names


def test_splits_of_other_names_are_named_by_the_user_and_one_or_none_is_taken_whole(tmp_path):
    folder = hub_folder(tmp_path / "hub", train_sft="a", test_sft="b")
    with pytest.raises(ConfigurationError, match=r"has no split 'train'; .* test_sft, train_sft"):
        plan(folder)
    assert taken({"path": str(folder), "split": "train_sft"}) == ["train_sft-00000-of-00001"]
    with pytest.raises(ConfigurationError, match="has no split 'gone'"):
        plan({"path": str(folder), "split": "gone"})
    alone = hub_folder(tmp_path / "one", test="ab")
    no_splits = hub_folder(tmp_path / "two", books="ab", wiki="c")
    (tmp_path / "plain").mkdir()
    for name in ("train.jsonl", "more.jsonl", "notes.txt"):
        samples.text_source(tmp_path / "plain" / name, 3)
    for folder, number in ((alone, 2), (no_splits, 3), (tmp_path / "plain", 3)):
        assert len(taken(folder)) == number


def test_plain_names_folders_and_a_dataset_dict_tell_splits_too(tmp_path):
    for name in ("names/alpaca_train", "names/alpaca_test", "names/extra", "tree/train/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        samples.text_source(tmp_path / f"{name}.jsonl", 3)
    assert taken(tmp_path / "names") == ["alpaca_train.jsonl"]
    tree, both = tmp_path / "tree", tmp_path / "dict"
    (tree / "dev").mkdir()
    samples.text_source(tree / "dev" / "y.jsonl", 3)
    table = datasets.Dataset.from_dict({"text": ["a"]})
    splits = {"train": table, "train_sft": table, "validation": table}
    datasets.DatasetDict(splits).save_to_disk(str(both))
    for folder, train, validation in ((tree, "x.jsonl", "y.jsonl"), (both, "train", "validation")):
        assert taken(folder) == [train]
        evaluated = [f"validation={folder}"]
        assert taken(folder, eval_sources=evaluated, split="validation") == [validation]
    assert taken({"path": str(both), "split": "train_sft"}) == ["train_sft"]


@pytest.mark.parametrize("kind", ["_data_files", "_indices_files"])
def test_a_folder_of_save_to_disk_that_names_files_elsewhere_is_not_read(kind, tmp_path):
    table = datasets.Dataset.from_dict({"text": ["a", "b"]})
    for name in ("secret", "foreign"):
        table.save_to_disk(str(tmp_path / name))
    state = tmp_path / "foreign" / "state.json"
    named = "../secret/data-00000-of-00001.arrow"
    state.write_text(json.dumps(json.loads(state.read_text()) | {kind: [{"filename": named}]}))
    with pytest.raises(ConfigurationError, match=rf"names '{named}', which is no path inside"):
        plan(tmp_path / "foreign")
