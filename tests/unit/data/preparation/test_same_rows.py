"""The same rows give the same tokens from every kind of file that can hold them."""

import csv
import json

import datasets
import preparation_samples as samples
import pyarrow as pa
import pyarrow.parquet as pq
import pytest


def call(arguments):
    return {"type": "function", "function": {"name": "go", "arguments": arguments}}


def answer(*calls):
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def as_jsonl(folder, rows):
    return samples.write_jsonl(folder / "a.jsonl", rows)


def as_json(folder, rows):
    (folder / "a.json").write_text(json.dumps(rows, indent=1))
    return folder / "a.json"


def as_struct_parquet(folder, rows):
    """What pyarrow and pandas write: one struct with the keys of all rows."""
    pq.write_table(pa.Table.from_pylist(_with_all_columns(rows)), folder / "a.parquet")
    return folder / "a.parquet"


def as_struct_folder(folder, rows):
    table = pa.Table.from_pylist(_with_all_columns(rows))
    datasets.Dataset(table).save_to_disk(folder / "dataset")
    return folder / "dataset"


def _json_features(rows):
    features = datasets.Features(
        {name: datasets.List(datasets.Json()) for name in _with_all_columns(rows)[0]}
    )
    return datasets.Dataset.from_list(_with_all_columns(rows), features=features)


def as_json_parquet(folder, rows):
    """What datasets writes with `Json()` features."""
    _json_features(rows).to_parquet(folder / "j.parquet")
    return folder / "j.parquet"


def as_json_folder(folder, rows):
    _json_features(rows).save_to_disk(folder / "json")
    return folder / "json"


def as_csv(folder, rows):
    names = list(_with_all_columns(rows)[0])
    with (folder / "a.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(names)
        writer.writerows(
            [json.dumps(row[name]) if name in row else "" for name in names] for row in rows
        )
    return folder / "a.csv"


def _with_all_columns(rows):
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


WRITERS = (as_json, as_struct_parquet, as_struct_folder, as_json_parquet, as_json_folder, as_csv)


def in_one_order(value):
    if isinstance(value, dict):
        return {key: in_one_order(value[key]) for key in sorted(value)}
    return [in_one_order(item) for item in value] if isinstance(value, list) else value


# With tools and calls as they are, so that every key and null of them shows in the tokens.
TEMPLATE = """{%- if tools %}{{ tools | tojson }}{% endif %}{% for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == "assistant" -%}
{% generation %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}\
{% endfor %}<|im_end|>{% endgeneration %}
{%- else %}{{ m.content }}<|im_end|>{% endif %}
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SCHEMA = {"type": "object", "properties": {"days": {"type": "integer"}}}
ANSWERED = [
    # So that every file has a column with every key, as real ones do.
    {"messages": [answer(call({"city": "Bonn", "days": 2, "metric": True}))]},
    {
        "messages": [
            {"role": "user", "content": "Is it cold there? ß"},
            answer(call({"days": 3})),
            {"role": "assistant", "content": "Yes."},
        ],
        "tools": [{"type": "function", "function": {"name": "go", "parameters": SCHEMA}}],
    },
]


@pytest.fixture
def tokenizer(tmp_path):
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    return samples.saved_tokenizer(tmp_path / "tokenizer")


def described(tmp_path, tokenizer, write, rows):
    """Prepare rows from one kind of file; return what describes the data, its example as made."""
    folder = tmp_path / write.__name__
    folder.mkdir()
    samples.prepare(
        sources=[write(folder, rows)],
        output_dir=folder / "out",
        tokenizer_name_or_path=tokenizer,
        chat_template=str(tmp_path / "template.jinja"),
    )
    return json.loads((folder / "out" / "train" / "stoker.json").read_text())


def test_the_same_data_in_seven_kinds_of_file_gives_one_token_dataset(tmp_path, tokenizer):
    rows = in_one_order(ANSWERED)
    found = [described(tmp_path, tokenizer, write, rows) for write in (as_jsonl, *WRITERS)]
    assert all(one["statistics"]["documents"] == 2 for one in found)
    assert len({one["fingerprint"] for one in found}) == 1


def test_nulls_that_were_written_stay_where_the_file_can_hold_them(tmp_path, tokenizer):
    rows = [{"messages": [answer(call({"city": None})) | {"content": "x"}]}]
    expected = described(tmp_path, tokenizer, as_jsonl, rows)
    assert '{"city": null}' in expected["preparation"]["example"]
    for write in (as_json, as_json_parquet, as_json_folder, as_csv):
        found = described(tmp_path, tokenizer, write, rows)
        assert found["fingerprint"] == expected["fingerprint"]
