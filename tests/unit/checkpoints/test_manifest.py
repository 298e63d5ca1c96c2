import dataclasses
import json

import pytest
from made import FACTS

from utils.checkpoints.files import (
    DamagedCheckpointError,
    FileRecord,
    check_layout,
    read_manifest,
    write_manifest,
)
from utils.config.errors import ConfigurationError

MANIFEST = dataclasses.replace(
    FACTS,
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


def test_flipped_bits_and_a_truncated_file_are_found(tmp_path):
    write_manifest(tmp_path, MANIFEST)
    path = tmp_path / "manifest.json"
    whole = path.read_bytes()
    for length in (0, 1, 100, -1):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedCheckpointError, match=r"manifest\.json"):
            read_manifest(tmp_path)
    for place in range(0, len(whole), 23):
        for bit in (0, 3, 7):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises((DamagedCheckpointError, ConfigurationError)):
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


def test_a_checkpoint_is_loaded_under_a_strategy_that_writes_alike(tmp_path):
    for written in STRATEGIES:
        write_manifest(tmp_path, dataclasses.replace(MANIFEST, strategy=written))
        for strategy in STRATEGIES:
            if strategy == written or (written, strategy) in ALIKE:
                check_layout(tmp_path, strategy)
                continue
            words = f"under {written} and cannot be loaded under {strategy}: "
            with pytest.raises(ConfigurationError, match=words):
                check_layout(tmp_path, strategy)
