"""Rows that cannot be used: named or skipped, never silently."""

import json
import logging
from collections import Counter

import preparation_samples as samples
import pytest

from utils.config.errors import ConfigurationError

pytestmark = pytest.mark.usefixtures("small_units")


BAD_LINES = {
    "malformed_json": (b'{"text": ', r"malformed JSON"),
    "not_an_object": (b"[1]", r"a record must be a JSON object, found list"),
    "missing_field": (b'{"messages": []}', r"no 'text', which the format text needs"),
    "wrong_type": (b'{"text": 7}', r"'text' must be a string, found int"),
    "empty": (b'{"text": " \\n"}', r"empty document"),
    "invalid_utf8": (b'{"text": "\xff"}', r"not UTF-8"),
}


def test_bad_rows_are_named_or_skipped_counted_and_shown(tmp_path, tokenizer, caplog):
    caplog.set_level(logging.INFO)
    source = samples.text_source(tmp_path / "a.jsonl", 100)
    good = source.read_bytes().splitlines(keepends=True)
    settings = {"sources": [source], "output_dir": tmp_path / "out", "format": "text"}
    for line, message in BAD_LINES.values():
        source.write_bytes(b"".join([*good[:77], line + b"\n", *good[77:]]))
        with pytest.raises(ConfigurationError, match=rf"a\.jsonl:78: {message}.*--on_bad_row skip"):
            samples.prepare(**settings, tokenizer_name_or_path=tokenizer)
    bad = [line + b"\n" for line, _ in BAD_LINES.values()]
    source.write_bytes(b"".join([*bad, *good, *bad[:2]]))
    samples.prepare(**settings, tokenizer_name_or_path=tokenizer, on_bad_row="skip")
    assert len(samples.rows(tmp_path / "out" / "train")) == 100
    content = json.loads((tmp_path / "out" / "train" / "stoker.json").read_text())["preparation"]
    dropped = Counter(dict.fromkeys(BAD_LINES, 1))
    dropped.update({"malformed_json": 1, "not_an_object": 1})
    assert content["sources"]["dropped"] == dict(dropped)
    assert "2 malformed_json" in caplog.text
    assert "a.jsonl:1: malformed JSON" in caplog.text


def test_a_split_that_is_left_without_documents_is_named(tmp_path, tokenizer):
    source = samples.text_source(tmp_path / "a.jsonl", 5)
    with pytest.raises(ConfigurationError, match="validation: no document is left"):
        samples.prepare(
            sources=[source],
            output_dir=tmp_path / "out",
            tokenizer_name_or_path=tokenizer,
            validation_fraction=1e-9,
        )
