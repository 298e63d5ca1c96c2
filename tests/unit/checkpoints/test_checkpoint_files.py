"""The files of a checkpoint: owners, digests, copies, the manifest; what a save commits."""

import dataclasses
import hashlib
import json

import pytest
import torch
from made import FACTS, FILES, commit, store, write_files

from utils.checkpoints import files as module
from utils.checkpoints.files import (
    DamagedCheckpointError,
    FileRecord,
    check_layout,
    file_digests,
    flush_and_record,
    owner,
    read_manifest,
    write_manifest,
)
from utils.config.errors import ConfigurationError, StorageError


def test_the_owner_of_a_file_is_the_rank_that_writes_it():
    owners = {
        "model-00003-of-00007.safetensors": 0,
        "rng_state.pth": 0,
        "rng_state_13.pth": 13,
        "pytorch_model_fsdp_0/__2_0.distcp": 2,
        "optimizer_0/.metadata": 0,
        "global_step8/bf16_zero_pp_rank_5_mp_rank_00_optim_states.pt": 5,
        "global_step8/zero_pp_rank_1_mp_rank_00_model_states.pt": 1,
        "global_step8/mp_rank_00_model_states.pt": 0,
    }
    assert {name: owner(name) for name in owners} == owners


PART = 1000


@pytest.mark.parametrize("size", [0, 1, PART, PART + 1, 7 * PART - 3])
def test_a_large_file_has_the_digest_of_its_parts_digests(size, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PART_BYTES", PART)
    monkeypatch.setattr(module, "PIECE_BYTES", 300)
    data = bytes((7 * at + at // 251) % 256 for at in range(size))
    parts = [hashlib.sha256(data[at : at + PART]) for at in range(0, max(size, 1), PART)]
    whole = hashlib.sha256(b"".join(part.digest() for part in parts))
    expected = (parts[0] if len(parts) == 1 else whole).hexdigest()
    path = tmp_path / "a"
    path.write_bytes(data)
    assert file_digests([path]) == [expected]
    assert flush_and_record(tmp_path / "b", ["a"], tmp_path) == {"a": FileRecord(size, expected)}
    assert (tmp_path / "b" / "a").read_bytes() == data


MANIFEST = dataclasses.replace(
    FACTS,
    step=12,
    samples=96,
    tokens=12_000,
    time="2026-01-01T00:00:00+00:00",
    files={"model.safetensors": FileRecord(3, "ab" * 32), "ä.json": FileRecord(0, "cd" * 32)},
)


def test_a_manifest_is_read_as_written_and_any_change_is_found(tmp_path):
    write_manifest(tmp_path, MANIFEST)
    path = tmp_path / "manifest.json"
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert read_manifest(tmp_path) == MANIFEST
    assert read_manifest(tmp_path).size_bytes == 3
    whole = path.read_bytes()
    for place in range(0, len(whole), 23):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << 3
        path.write_bytes(damaged)
        with pytest.raises((DamagedCheckpointError, ConfigurationError)):
            read_manifest(tmp_path)
    path.write_text(json.dumps({"format": 2, "of a later": "version"}))
    with pytest.raises(ConfigurationError, match="has format 2, a later version of Stoker"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_a_checkpoint_is_loaded_under_a_strategy_that_writes_alike(strategy, tmp_path):
    alike = {"single": "ddp", "ddp": "single", "zero1": "zero2", "zero2": "zero1"}.get(strategy)
    for written in ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3"):
        write_manifest(tmp_path, dataclasses.replace(MANIFEST, strategy=written))
        if written in (strategy, alike):
            check_layout(tmp_path, strategy)
            continue
        with pytest.raises(ConfigurationError, match=f"cannot be loaded under {strategy}: "):
            check_layout(tmp_path, strategy)


def test_a_commit_holds_every_file_and_none_that_no_rank_wrote(tmp_path, caplog):
    caplog.set_level("INFO")
    commit(tmp_path, 12)
    manifest = read_manifest(tmp_path / "checkpoint-12")
    assert (manifest.step, manifest.samples, manifest.tokens) == (12, 96, 1200)
    assert manifest.files.keys() == FILES.keys()
    assert "checkpoint-12 committed (20.5 KiB" in caplog.text
    (write_files(tmp_path, 4) / "rng_state_7.pth").touch()
    with pytest.raises(StorageError, match=r"no rank wrote \(rng_state_7\.pth\)"):
        store(tmp_path).commit(4, tokens=0)
    assert not (tmp_path / "checkpoint-4" / "manifest.json").exists()


def test_a_best_checkpoint_that_is_damaged_or_not_torchs_is_not_loaded(tmp_path):
    directory = write_files(tmp_path, 4)
    (directory / "pytorch_model_fsdp_0" / "__0_0.distcp").unlink()
    torch.save({"moments": torch.zeros(3)}, directory / "optimizer.pt")
    store(tmp_path).commit(4, tokens=0)
    store(tmp_path).check(directory)
    (directory / "optimizer.pt").write_bytes(b"")
    with pytest.raises(StorageError, match=r"checkpoint-4 is damaged \(optimizer.pt has 0 bytes"):
        store(tmp_path).check(directory)
    commit(tmp_path, 6)
    with pytest.raises(ConfigurationError, match=r"optimizer\.pt is nothing that torch\.save"):
        store(tmp_path).check(tmp_path / "checkpoint-6")
