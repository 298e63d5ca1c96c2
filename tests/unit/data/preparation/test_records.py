import gzip

import pytest
import zstandard

from utils.config.errors import ConfigurationError
from utils.data.prepare import records
from utils.data.prepare.records import BadRow, FilePart, Record, read_records
from utils.data.prepare.sources import list_sources


def read(path, columns=("text",)) -> list[Record | BadRow]:
    (file,), _ = list_sources([str(path)], "text")
    return list(read_records(FilePart(file, 0, file.size, file.size), columns))


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
@pytest.mark.parametrize("suffix", ["jsonl", "txt"])
def test_a_compressed_file_that_was_cut_short_is_refused(tmp_path, compress, suffix):
    content = b"".join(b'{"text": "%d"}\n' % (i * 7919) for i in range(5000))
    ending = "gz" if compress is gzip.compress else "zst"
    path = tmp_path / f"a.{suffix}.{ending}"
    path.write_bytes(compress(content)[:-500])
    with pytest.raises(ConfigurationError, match=rf"a\.{suffix}\.{ending}: cannot be read"):
        read(path)


def test_blank_lines_and_a_byte_order_mark_are_no_records(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b"}')
    found = read(path)
    assert [record.fields["text"] for record in found] == ["a", "b"]
    assert str(found[1].location).endswith("a.jsonl:4")


@pytest.mark.parametrize("text", ["line of text ß\n" * 300, "ß" * 2500, "a" * 1024, "ab\n" * 341])
def test_a_very_long_text_file_is_cut_without_losing_a_character(tmp_path, monkeypatch, text):
    monkeypatch.setattr(records, "LARGEST_DOCUMENT_BYTES", 1024)
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    found = read(tmp_path / "a.txt")
    assert "".join(record.fields["text"] for record in found) == text
    assert [record.part for record in found] == list(range(len(found)))
    assert max(len(record.fields["text"].encode()) for record in found) <= 1024
    if "\n" in text:
        assert all(record.fields["text"].endswith("\n") for record in found)


@pytest.mark.parametrize(
    "text",
    [
        '[{"text": "ß, ] {"}, {"text": "b\\n"},\n {"text": "c", "n": [1, {}]}]',
        '\ufeff {"version": "1.0", "data": [{"text": "ß, ] {"},{"text": "b\\n"}, {"text": "c"}]}',
    ],
)
def test_a_json_array_is_read(tmp_path, text):
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


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b'text\n"a" b\n', r"a\.csv:2: malformed CSV"),
        ("a.json", b'[{"text": "a"}, {"text": oops}]', r"malformed JSON \(Expecting value: line 1"),
        ("a.json", b"[" * 100_000, "recursion"),
    ],
)
def test_files_that_cannot_be_read_to_their_end_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=message):
        read(tmp_path / name)
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait")
    (bad,) = read(tmp_path / "a.txt")
    assert bad.reason == "invalid_utf8"
    assert str(bad).endswith("a.txt: not UTF-8 at byte 3")
