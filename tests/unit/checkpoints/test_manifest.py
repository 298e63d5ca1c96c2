import dataclasses
import json
import os
from pathlib import Path

import pytest
from made import FACTS

from utils.checkpoints.files import FileRecord
from utils.checkpoints.manifest import (
    DamagedCheckpointError,
    Manifest,
    check_layout,
    read_manifest,
    write_manifest,
)
from utils.config.errors import ConfigurationError

MANIFEST = Manifest(
    **vars(FACTS),
    step=12,
    samples=96,
    tokens=12_000,
    time="2026-01-01T00:00:00+00:00",
    files={"model.safetensors": FileRecord(3, "ab" * 32), "ä.json": FileRecord(0, "cd" * 32)},
)


def test_what_was_written_is_read(tmp_path):
    write_manifest(tmp_path, MANIFEST)
    assert read_manifest(tmp_path) == MANIFEST
    assert read_manifest(tmp_path).size_bytes == 3
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_it_appears_in_one_step_after_all_else_is_on_stable_storage(tmp_path, monkeypatch):
    """The order that a loss of power asks for: the directory's entry, the draft, its name."""
    directory = tmp_path / "checkpoint-12"
    directory.mkdir()
    done = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor):
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        done.append(("fsync", "draft" if name.endswith(".tmp") else name))
        fsync(descriptor)

    def note_replace(source, target, **options):
        done.append(("replace", Path(target).name))
        replace(source, target, **options)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    write_manifest(directory, MANIFEST)
    assert done == [
        ("fsync", tmp_path.name),
        ("fsync", "draft"),
        ("replace", "manifest.json"),
        ("fsync", "checkpoint-12"),
    ]


def test_every_flipped_bit_is_found(tmp_path):
    write_manifest(tmp_path, MANIFEST)
    path = tmp_path / "manifest.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises((DamagedCheckpointError, ConfigurationError)):
                read_manifest(tmp_path)


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_a_truncated_one_is_found(tmp_path, length):
    write_manifest(tmp_path, MANIFEST)
    path = tmp_path / "manifest.json"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json"):
        read_manifest(tmp_path)


def test_one_of_a_later_version_is_not_taken_for_damage(tmp_path):
    write_manifest(tmp_path, MANIFEST)
    path = tmp_path / "manifest.json"
    content = json.loads(path.read_text()) | {"format": 2}
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match="has format 2, a later version of Stoker"):
        read_manifest(tmp_path)


STRATEGIES = ["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]
ALIKE = {("single", "ddp"), ("ddp", "single"), ("zero1", "zero2"), ("zero2", "zero1")}


@pytest.mark.parametrize("written", STRATEGIES)
def test_a_checkpoint_is_loaded_under_a_strategy_that_writes_alike(written, tmp_path):
    write_manifest(tmp_path, dataclasses.replace(MANIFEST, strategy=written))
    for strategy in STRATEGIES:
        if strategy == written or (written, strategy) in ALIKE:
            check_layout(tmp_path, strategy)
            continue
        words = f"under {written} and cannot be loaded under {strategy}: .*any number of ranks will"
        with pytest.raises(ConfigurationError, match=words):
            check_layout(tmp_path, strategy)
