"""The files of a checkpoint: their owners, digests, copies, and what differs from a record."""

import hashlib
import os
import zipfile

import pytest
import torch
from made import FILES, write_files

from utils.checkpoints import files as module
from utils.checkpoints.files import (
    FileRecord,
    cached_digests,
    copy_and_record,
    file_digests,
    file_problems,
    flush_and_record,
    in_place_of_crc32,
    list_files,
    owner,
)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("model-00003-of-00007.safetensors", 0),
        ("rng_state.pth", 0),
        ("rng_state_13.pth", 13),
        ("pytorch_model_fsdp_0/__2_0.distcp", 2),
        ("optimizer_0/.metadata", 0),
        ("global_step8/bf16_zero_pp_rank_5_mp_rank_00_optim_states.pt", 5),
        ("global_step8/zero_pp_rank_1_mp_rank_00_model_states.pt", 1),
        ("global_step8/mp_rank_00_model_states.pt", 0),
    ],
)
def test_the_owner_of_a_file_is_the_rank_that_writes_it(name, rank):
    assert owner(name) == rank


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
    monkeypatch.setattr(module, "COPY_PIECE_BYTES", 333)


def content(size: int) -> bytes:
    return bytes((7 * at + at // 251) % 256 for at in range(size))


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 2 * PART, 7 * PART - 3])
def test_a_large_file_has_the_digest_of_its_parts_digests(size, tmp_path, small_parts):
    data = content(size)
    parts = [hashlib.sha256(data[at : at + PART]) for at in range(0, max(size, 1), PART)]
    whole = hashlib.sha256(b"".join(part.digest() for part in parts))
    expected = (parts[0] if len(parts) == 1 else whole).hexdigest()
    path = tmp_path / "a"
    path.write_bytes(data)
    assert file_digests([path]) == [expected]
    assert copy_and_record(tmp_path, tmp_path / "b", ["a"]) == {"a": FileRecord(size, expected)}
    assert (tmp_path / "b" / "a").read_bytes() == data


def test_every_byte_counts_and_so_do_the_orders_of_parts_and_files(tmp_path, small_parts):
    data = content(3 * PART)
    changes = [data[PART : 2 * PART] + data[:PART] + data[2 * PART :], data]
    for at in (0, PART - 1, PART, 2 * PART, 3 * PART - 1):
        changes.append(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    paths = [tmp_path / str(number) for number in range(len(changes))]
    for path, change in zip(paths, changes, strict=True):
        path.write_bytes(change)
    digests = file_digests(paths)
    assert len(set(digests)) == len(paths)
    assert digests == [file_digests([path])[0] for path in paths]
    with pytest.raises(FileNotFoundError):
        file_digests([*paths, tmp_path / "none"])


def test_digests_of_weights_are_computed_again_once_a_file_was_written_to(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level("INFO")
    path = tmp_path / "model.safetensors"
    for times in (1, 2):
        content = str(times).encode()  # of the same size
        path.write_bytes(content)
        os.utime(path, ns=(0, times))
        for _ in range(2):
            assert cached_digests([path]) == {path.name: hashlib.sha256(content).hexdigest()}
        assert caplog.text.count("of weights once") == times
    for entry in (tmp_path / "cache").rglob("*.json"):
        entry.write_text("{")
    assert cached_digests([path]) == {path.name: hashlib.sha256(b"2").hexdigest()}


def test_torch_saves_without_crc32_and_looks_at_none(tmp_path):
    """Also after a save that failed, torch's own choice is back."""
    with in_place_of_crc32():
        torch.save(torch.ones(1000), tmp_path / "without.pt")
    with pytest.raises(OSError, match="full"), in_place_of_crc32():
        raise OSError("full")
    torch.save(torch.ones(1000), tmp_path / "with.pt")
    for name in ("without.pt", "with.pt"):
        with zipfile.ZipFile(tmp_path / name) as archive:
            assert bool(archive.testzip()) == (name == "without.pt")
        content = (tmp_path / name).read_bytes()
        place = content.index(torch.ones(1000).numpy().tobytes()) + 500
        (tmp_path / name).write_bytes(content[:place] + b"\x01" + content[place + 1 :])
        loaded = torch.load(tmp_path / name, weights_only=True)
        assert (loaded != 1).sum() == 1, "no checksum is compared"
