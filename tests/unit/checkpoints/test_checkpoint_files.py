"""The files of a checkpoint: their owners, digests, copies, and what differs from a record."""

import hashlib

import pytest
from made import FILES, write_files

from utils.checkpoints import files as module
from utils.checkpoints.files import (
    FileRecord,
    file_digests,
    file_problems,
    flush_and_record,
    list_files,
    owner,
)


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


def test_files_are_listed_at_any_depth_without_the_manifest(tmp_path):
    directory = write_files(tmp_path, 1)
    for name in ("manifest.json", ".nfs000001"):
        (directory / name).touch()
    assert list_files(directory) == sorted(FILES)


def test_what_differs_is_named(tmp_path):
    directory = write_files(tmp_path, 1)
    records = flush_and_record(directory, FILES)
    assert file_problems(directory, records) == []
    whole = FILES["optimizer.pt"] + b"1"
    assert records["optimizer.pt"] == FileRecord(len(whole), hashlib.sha256(whole).hexdigest())
    content = bytearray((directory / "optimizer.pt").read_bytes())
    content[77] ^= 1
    (directory / "optimizer.pt").write_bytes(content)
    assert file_problems(directory, records) == ["optimizer.pt has other contents"]
    assert file_problems(directory, records, tensors=False) == []
    (directory / "trainer_state.json").unlink()
    (directory / "adapter_model.bin").touch()
    (directory / "more").symlink_to(tmp_path)
    with (directory / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert file_problems(directory, records) == [
        "trainer_state.json is missing",
        "adapter_model.bin was not committed",
        "more was not committed",
        "model.safetensors has 7,005 bytes, not 7,001",
    ]


PART = 1000


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(module, "PART_BYTES", PART)
    monkeypatch.setattr(module, "PIECE_BYTES", 300)


def content(size: int) -> bytes:
    return bytes((7 * at + at // 251) % 256 for at in range(size))


@pytest.mark.parametrize("size", [0, 1, PART, PART + 1, 2 * PART, 7 * PART - 3])
def test_a_large_file_has_the_digest_of_its_parts_digests(size, tmp_path, small_parts):
    data = content(size)
    parts = [hashlib.sha256(data[at : at + PART]) for at in range(0, max(size, 1), PART)]
    whole = hashlib.sha256(b"".join(part.digest() for part in parts))
    expected = (parts[0] if len(parts) == 1 else whole).hexdigest()
    path = tmp_path / "a"
    path.write_bytes(data)
    assert file_digests([path]) == [expected]
    assert flush_and_record(tmp_path / "b", ["a"], tmp_path) == {"a": FileRecord(size, expected)}
    assert (tmp_path / "b" / "a").read_bytes() == data
