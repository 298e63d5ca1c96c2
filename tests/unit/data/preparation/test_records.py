import gzip

import pytest
import zstandard

from utils.config.errors import ConfigurationError
from utils.data.preparation import records
from utils.data.preparation.records import BadRow, Record, read_records
from utils.data.preparation.sources import list_sources
from utils.data.preparation.work_units import Piece


def read(path, columns=("text",)) -> list[Record | BadRow]:
    (file,) = list_sources([str(path)], "text").files
    return list(read_records(Piece(file, 0, file.size, file.size), columns))


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
@pytest.mark.parametrize("suffix", ["jsonl", "txt"])
def test_a_compressed_file_that_was_cut_short_is_refused(tmp_path, compress, suffix):
    content = b"".join(b'{"text": "%d"}\n' % (i * 7919) for i in range(5000))
    ending = "gz" if compress is gzip.compress else "zst"
    path = tmp_path / f"a.{suffix}.{ending}"
    path.write_bytes(compress(content)[:-500])
    if ending == "zst":
        # A zstd stream without its end frame reads like an end of file at some cuts; damage it.
        path.write_bytes(b"\0" * 40 + compress(content)[40:])
    with pytest.raises(ConfigurationError, match=rf"a\.{suffix}\.{ending}: cannot be read"):
        read(path)


def test_blank_lines_and_a_byte_order_mark_are_no_records(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b"}')
    found = read(path)
    assert [record.fields["text"] for record in found] == ["a", "b"]
    assert str(found[1].place).endswith("a.jsonl:4")


def test_a_line_that_is_too_long_is_a_bad_row_and_the_next_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "LARGEST_LINE_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "' + "x" * 5000 + '"}\n{"text": "b"}\n')
    bad, good = read(path)
    assert bad.reason == "line_too_long"
    assert good.fields == {"text": "b"}
    assert str(good.place).endswith("a.jsonl:2")


def test_json_nested_without_end_is_a_bad_row(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ' + "[" * 100_000 + "\n")
    (bad,) = read(path)
    assert bad.reason == "malformed_json"


def test_a_text_file_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo ß\n", encoding="utf-8")
    (record,) = read(path)
    assert record.fields == {"text": "one\n\ntwo ß\n"}


def test_a_text_file_that_is_not_utf8_is_a_bad_row_with_the_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait")
    (bad,) = read(tmp_path / "a.txt")
    assert bad.reason == "invalid_utf8"
    assert str(bad).endswith("a.txt: not UTF-8 at byte 3")


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
