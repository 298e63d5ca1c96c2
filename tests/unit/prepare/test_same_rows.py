"""The same rows give the same tokens from every kind of file."""

import csv
import gzip
import json

import datasets
import preparation_samples as samples
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard


def written(folder, rows):
    """Write rows as every kind of file. Files named "struct" cannot represent a real null."""
    plain = samples.write_jsonl(folder / "a.jsonl", rows)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (folder / "a.jsonl.zst").write_bytes(zstandard.compress(plain.read_bytes()))
    (folder / "a.json").write_text(json.dumps(rows, indent=1))
    names = dict.fromkeys(name for row in rows for name in row)
    with (folder / "a.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(names)
        writer.writerows(
            [json.dumps(row[name]) if name in row else "" for name in names] for row in rows
        )
    complete = [{name: row.get(name) for name in names} for row in rows]
    # pyarrow and pandas write one struct with the keys of all rows.
    structs = pa.Table.from_pylist(complete)
    pq.write_table(structs, folder / "struct.parquet", row_group_size=1)
    # Write the rows in another order, with an indices mapping that restores the order.
    order = range(len(rows) - 1, -1, -1)
    datasets.Dataset(structs.take(list(order))).select(order).save_to_disk(folder / "struct")
    features = datasets.Features({name: datasets.List(datasets.Json()) for name in names})
    kept = datasets.Dataset.from_list(complete, features=features)
    kept.to_parquet(folder / "json.parquet")
    kept.save_to_disk(folder / "json")
    return list(folder.iterdir())


# The template prints tools and calls unchanged, so that every key and null shows in tokens.
TEMPLATE = """{%- if tools %}{{ tools | tojson }}{% endif %}{% for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == "assistant" -%}
{% generation %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}\
{% endfor %}<|im_end|>{% endgeneration %}
{%- else %}{{ m.content }}<|im_end|>{% endif %}
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def described(tmp_path, rows, kinds=""):
    """Prepare rows from each file with a name that begins with `kinds`; return descriptions."""
    (folder := tmp_path / "rows").mkdir()
    tokenizer = samples.saved_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    found = []
    for path in written(folder, rows):
        if not path.name.startswith(kinds):
            continue
        out = tmp_path / f"from-{path.name}"
        samples.prepare(sources=[path], output_dir=out, tokenizer_name_or_path=tokenizer)
        found.append(samples.description(out / "train"))
    return found


def call(arguments):
    function = {"arguments": arguments, "name": "go"}
    called = [{"function": function, "type": "function"}]
    return {"content": None, "role": "assistant", "tool_calls": called}


def test_the_same_data_in_nine_kinds_of_file_gives_one_token_dataset(tmp_path):
    schema = {"properties": {"days": {"type": "integer"}}, "type": "object"}
    turns = [{"content": "Is it cold there? ß", "role": "user"}, call({"days": 3})]
    tool = {"function": {"name": "go", "parameters": schema}, "type": "function"}
    rows = [
        # With this row every file has a column with every key, as real files have.
        {"messages": [call({"city": "Bonn", "days": 2, "metric": True})]},
        {"messages": [*turns, {"content": "Yes.", "role": "assistant"}], "tools": [tool]},
    ]
    found = described(tmp_path, rows)
    assert [one["statistics"]["documents"] for one in found] == [2] * 9
    assert len({one["fingerprint"] for one in found}) == 1


def test_nulls_that_were_written_stay_where_the_file_can_hold_them(tmp_path):
    rows = [{"messages": [call({"city": None}) | {"content": "x"}]}]
    found = described(tmp_path, rows, ("a", "json"))
    assert len(found) == 7
    assert len({one["fingerprint"] for one in found}) == 1
    assert '{"city": null}' in found[0]["preparation"]["example"]
