"""A file is the old one or the new one, whatever ended its writing."""

import errno
import os
import socket

import pytest

from utils.support.files import replace_text


def test_a_failed_write_leaves_the_old_file_and_no_draft(tmp_path, monkeypatch):
    path = tmp_path / "file"
    replace_text(path, "old")
    seen = []

    def fail(_descriptor):
        seen.extend(file.name for file in tmp_path.iterdir())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        replace_text(path, "new")
    assert sorted(seen) == [f".file.{socket.gethostname()}.{os.getpid()}.tmp", "file"]
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]
    monkeypatch.undo()
    replace_text(path, "new")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["new"]
