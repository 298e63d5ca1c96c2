"""Digests of files are computed once, and again as soon as a file was written to."""

import hashlib
import json
import os

import pytest

from utils.checkpoints import files as module
from utils.checkpoints.files import kept_digests


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = [tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"]
    for file in made:
        file.write_bytes(file.name.encode())
    return made


@pytest.fixture
def reads(monkeypatch):
    """The number of times that files were read."""
    counted = []
    real = module.file_digests

    def counting(paths):
        counted.append(list(paths))
        return real(paths)

    monkeypatch.setattr(module, "file_digests", counting)
    return counted


def expected(files):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_they_are_computed_once(files, reads, caplog):
    caplog.set_level("INFO")
    assert kept_digests(files) == kept_digests(files) == expected(files)
    assert len(reads) == 1
    assert caplog.text.count("of weights once") == 1


def test_a_file_written_to_at_the_same_size_is_read_again(files, reads):
    before = kept_digests(files)
    stat = files[1].stat()
    files[1].write_bytes(files[1].read_bytes()[::-1])
    os.utime(files[1], ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    after = kept_digests(files)
    assert len(reads) == 2
    assert after == expected(files)
    assert before[files[0].name] == after[files[0].name]
    assert before[files[1].name] != after[files[1].name]


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"other": "1"})])
def test_an_entry_that_cannot_be_used_is_said_and_replaced(content, files, reads, caplog):
    kept_digests(files)
    (entry,) = (files[0].parent / "cache").rglob("*.json")
    entry.write_text(content)
    assert kept_digests(files) == kept_digests(files) == expected(files)
    assert len(reads) == 2
    assert caplog.text.count("it is made again") == 1


def test_a_cache_that_cannot_be_written_is_said(files, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(files[0]))
    assert kept_digests(files) == expected(files)
    assert "cannot be written" in caplog.text
