"""A file is the old one or the new one, whatever ended its writing."""

import os

import pytest

from utils.support.files import replace_text


def test_a_failed_write_leaves_the_old_file_and_no_draft(tmp_path, monkeypatch):
    def fail(_descriptor):
        raise OSError(28, "No space left on device")

    replace_text(tmp_path / "file", "old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        replace_text(tmp_path / "file", "new")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]
