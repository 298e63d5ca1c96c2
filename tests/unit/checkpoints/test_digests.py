"""Digests by parts: of a file and of its pieces the same, and of every byte."""

import hashlib
import zipfile

import pytest
import torch

from utils.checkpoints import files as digests
from utils.checkpoints.files import PartsDigest, file_digests, in_place_of_crc32

PART = 1000


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(digests, "PART_BYTES", PART)
    monkeypatch.setattr(digests, "PIECE_BYTES", 300)


def content(size: int) -> bytes:
    return bytes((7 * place + place // 251) % 256 for place in range(size))


def saved(path, data: bytes):
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART])
def test_a_small_file_has_the_digest_of_sha256sum(tmp_path, size):
    data = content(size)
    assert file_digests([saved(tmp_path / "a", data)]) == [hashlib.sha256(data).hexdigest()]


@pytest.mark.parametrize("size", [PART + 1, 2 * PART, 2 * PART + 1, 7 * PART - 3])
def test_a_large_file_has_the_digest_of_its_parts_digests(tmp_path, size):
    data = content(size)
    parts = [hashlib.sha256(data[at : at + PART]).digest() for at in range(0, size, PART)]
    expected = hashlib.sha256(b"".join(parts)).hexdigest()
    assert file_digests([saved(tmp_path / "a", data)]) == [expected]


@pytest.mark.parametrize("size", [0, 1, PART, PART + 1, 2 * PART, 3 * PART + 7])
@pytest.mark.parametrize("piece", [1, 333, PART, 2500])
def test_pieces_of_any_length_give_the_digest_of_the_file(tmp_path, size, piece):
    data, digest = content(size), PartsDigest()
    for begin in range(0, size, piece):
        digest.update(memoryview(data)[begin : begin + piece])
    assert [digest.hexdigest()] == file_digests([saved(tmp_path / "a", data)])


def test_every_byte_counts_and_so_does_the_order_of_parts(tmp_path):
    data = content(3 * PART)
    [whole] = file_digests([saved(tmp_path / "whole", data)])
    for place in (0, PART - 1, PART, 2 * PART, 3 * PART - 1):
        changed = bytearray(data)
        changed[place] ^= 1
        assert file_digests([saved(tmp_path / "changed", bytes(changed))]) != [whole]
    swapped = data[PART : 2 * PART] + data[:PART] + data[2 * PART :]
    assert file_digests([saved(tmp_path / "swapped", swapped)]) != [whole]


def test_digests_come_in_the_order_of_the_files(tmp_path):
    paths = [saved(tmp_path / str(size), content(size)) for size in (2500, 3, 1500)]
    assert file_digests(paths) == [file_digests([path])[0] for path in paths]
    with pytest.raises(FileNotFoundError):
        file_digests([*paths, tmp_path / "none"])


def test_torch_saves_without_crc32_and_loads_just_that(tmp_path):
    """Also after a save that failed, torch's own choice is back."""
    state = {"exp_avg": torch.arange(1000.0)}
    with in_place_of_crc32():
        torch.save(state, tmp_path / "without.pt")
    with pytest.raises(OSError, match="full"), in_place_of_crc32():
        raise OSError("full")
    torch.save(state, tmp_path / "with.pt")
    assert damaged_entry(tmp_path / "without.pt")
    assert damaged_entry(tmp_path / "with.pt") is None
    for mmap in (False, True):
        loaded = torch.load(tmp_path / "without.pt", weights_only=True, mmap=mmap)
        assert torch.equal(loaded["exp_avg"], state["exp_avg"])


def test_torch_load_looks_at_no_crc32(tmp_path):
    """Else leaving it out would take something away."""
    torch.save(torch.ones(1000), tmp_path / "a.pt")
    content = bytearray((tmp_path / "a.pt").read_bytes())
    content[content.index(torch.ones(1000).numpy().tobytes()) + 500] ^= 0x40
    (tmp_path / "a.pt").write_bytes(content)
    assert damaged_entry(tmp_path / "a.pt")
    assert not torch.equal(torch.load(tmp_path / "a.pt", weights_only=True), torch.ones(1000))


def damaged_entry(path) -> str | None:
    """The first entry that is not as its CRC-32 says."""
    with zipfile.ZipFile(path) as archive:
        return archive.testzip()
