"""Reading of files: every record once, the same rows from every kind, and unreadable files."""

import csv
import gzip
import json

import datasets
import preparation_samples as samples
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from utils.config.errors import ConfigurationError
from utils.config.preparation import Source
from utils.prepare import work_plan
from utils.prepare.records import FilePart, read_records
from utils.prepare.rows import RowSettings, parse_document
from utils.prepare.source_files import SourceFile, list_sources
from utils.prepare.work_plan import cut_into_units


def read(path):
    (file,), _ = list_sources([str(path)], "text")
    return list(read_records(FilePart(file, 0, file.size, file.size), ("text",)))


@given(
    lines=st.lists(st.binary(max_size=30).map(lambda b: b.hex()), max_size=30),
    cut=st.integers(1, 80),
    ends_with_newline=st.booleans(),
)
def test_every_line_is_in_exactly_one_piece_wherever_the_cuts_fall(
    tmp_path_factory, lines, cut, ends_with_newline
):
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    text = "\n".join(json.dumps({"text": line}) for line in lines)
    path.write_text(text + "\n" * ends_with_newline)
    size = path.stat().st_size
    file = SourceFile(str(path), "jsonl", None, size, 0)
    pieces = [FilePart(file, at, min(at + cut, size), cut) for at in range(0, size, cut)]
    found = [record for piece in pieces for record in read_records(piece, ["text"])]
    assert [record.fields["text"] for record in found] == lines
    numbers = range(1, len(lines) + 1)
    assert [str(record.location) for record in found] == [f"{path}:{n}" for n in numbers]


def units_of(path):
    return cut_into_units([(Source((), "train"), list_sources([str(path)], "auto")[0])])


def test_parquet_row_groups_are_read_once_with_their_row_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(work_plan, "SMALLEST_UNIT_BYTES", 100)
    rows = [{"text": f"row {i}"} for i in range(40)]
    table = pa.Table.from_pylist([row | {"other": 1} for row in rows])
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=6)
    units = units_of(tmp_path / "a.parquet")
    assert len(units) > 2
    assert [unit.index for unit in units] == list(range(len(units)))
    parts = [part for unit in units for part in unit.parts]
    found = [record for part in parts for record in read_records(part, ["text"])]
    assert [record.fields for record in found] == rows
    assert str(found[33].location).endswith("a.parquet row 33")


@pytest.mark.parametrize("suffix", ["jsonl", "txt"])
def test_a_compressed_file_that_was_cut_short_is_refused(tmp_path, suffix):
    content = b"".join(b'{"text": "%d"}\n' % (i * 7919) for i in range(5000))
    for ending, compress in (("gz", gzip.compress), ("zst", zstandard.compress)):
        path = tmp_path / f"a.{suffix}.{ending}"
        path.write_bytes(compress(content)[:-500])
        with pytest.raises(ConfigurationError, match=rf"a\.{suffix}\.{ending}: cannot be read"):
            read(path)


def test_a_zstd_file_of_any_window_and_of_several_frames_is_read(tmp_path):
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    wide = zstandard.ZstdCompressor(compression_params=parameters)
    frames = [b'{"text": "%d"}\n' % number for number in range(3)]
    path = tmp_path / "a.jsonl.zst"
    # The header of a streamed frame has no size, so reading needs the frame's whole window.
    begun = wide.compressobj()
    path.write_bytes(
        begun.compress(frames[0])
        + begun.flush()
        + b"".join(zstandard.compress(frame) for frame in frames[1:])
    )
    assert [record.fields["text"] for record in read(path)] == ["0", "1", "2"]
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ConfigurationError, match="the compressed stream is incomplete"):
        read(path)


BYTES = [
    *(pa.binary(), pa.large_binary(), pa.binary_view(), pa.string_view(), pa.large_string()),
    pa.dictionary(pa.int32(), pa.binary()),
]


@pytest.mark.parametrize("kind", BYTES, ids=str)
def test_text_in_a_parquet_column_of_bytes_is_read(tmp_path, kind):
    texts = pa.array(["ß", "b"])
    if pa.types.is_dictionary(kind):
        texts = texts.cast(kind.value_type).dictionary_encode()
    table = pa.table({"text": texts.cast(kind), "other": pa.array([1, 2])})
    if kind in BYTES[:2]:  # pyarrow cannot write the other types inside a list
        turns = [[{"role": "user", "content": "ß"}], []]
        nested = pa.list_(pa.struct({"role": kind, "content": kind}))
        table = table.append_column("messages", pa.array(turns, nested))
    pq.write_table(table, tmp_path / "a.parquet")
    (part,) = units_of(tmp_path / "a.parquet")[0].parts
    first, second = read_records(part, ["text", "messages"])
    assert first.fields["text"] == "ß"
    assert first.left_out == ("other",)
    assert first.fields.get("messages") in (None, [{"role": "user", "content": "ß"}])
    assert second.fields["text"] == "b"


def test_bytes_that_are_no_text_are_a_bad_row_where_a_text_is_needed(tmp_path):
    table = pa.table({"text": pa.array([b"\xff", b"a"]), "image": pa.array([b"\xff", None])})
    pq.write_table(table, tmp_path / "a.parquet")
    (part,) = units_of(tmp_path / "a.parquet")[0].parts
    rows = RowSettings("text")
    found = [parse_document(r, rows) for r in read_records(part, rows.read_columns)]
    assert str(found[0]).endswith("a.parquet row 0: 'text' is not UTF-8")
    assert found[1].text == "a"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b'text\n"a" b\n', r"a\.csv:2: malformed CSV"),
        ("a.json", b'[{"text": "a"}, {"text": oops}]', r"malformed JSON \(Expecting value: line 1"),
        ("a.json", b"[" * 100_000, "recursion"),
        ("a.csv", "text\na\n".encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
        ("a.parquet", b"PAR1 nothing PAR1", r"a\.parquet: cannot be opened"),
    ],
)
def test_files_that_cannot_be_read_to_their_end_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=message):
        units_of(tmp_path / name) if name == "a.parquet" else read(tmp_path / name)


def test_blank_lines_and_a_byte_order_mark_are_no_records(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b"}')
    found = read(path)
    assert [record.fields["text"] for record in found] == ["a", "b"]
    assert str(found[1].location).endswith("a.jsonl:4")


def test_a_very_long_text_file_is_one_record(tmp_path):
    text = "line of text ß\n" * 300_000
    (tmp_path / "a.txt").write_text("\ufeff" + text, encoding="utf-8")
    (found,) = read(tmp_path / "a.txt")
    assert found.fields["text"] == text


def test_a_text_file_from_windows_has_no_mark_and_ends_lines_as_in_datasets(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\ntwo\r\r\nthree\n".encode())
    (found,) = read(path)
    (expected,) = datasets.load_dataset(
        "text", data_files=str(path), sample_by="document", split="train"
    )
    assert expected["text"] == "\ufeffone\ntwo\n\nthree\n", "datasets keeps the mark"
    assert found.fields["text"] == expected["text"].removeprefix("\ufeff")


def test_a_text_file_of_another_encoding_is_a_bad_row(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait")
    (bad,) = read(tmp_path / "a.txt")
    assert bad.reason == "invalid_utf8"
    assert str(bad).endswith("a.txt: not UTF-8 at byte 3")


def test_a_json_array_is_read(tmp_path):
    text = '\ufeff[{"text": "ß, ] {"}, {"text": "b\\n"},\n {"text": "c", "n": [1, {}]}]'
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    found = read(tmp_path / "a.json")
    assert [record.fields["text"] for record in found] == ["ß, ] {", "b\n", "c"]
    assert str(found[2].location).endswith("a.json record 2")


def test_csv_is_read_with_quotes_line_ends_and_places(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes('\ufefftext,n\r\n"a, ""b""\nc",1\r\nß,2\r\nshort\r\n'.encode())
    first, second, bad = read(path)
    assert first.fields == {"text": 'a, "b"\nc', "n": "1"}
    assert second.fields == {"text": "ß", "n": "2"}
    assert bad.reason == "malformed_csv"
    assert str(bad).endswith("a.csv:5: 1 cells where the header names 2 columns")


# --- the same rows from every kind of file


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
