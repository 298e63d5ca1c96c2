"""The files of a checkpoint: their owners, digests, copies, and what differs from a record."""

import hashlib
import os
import zipfile
from pathlib import Path

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


@pytest.mark.parametrize("record", ["in place", "copied"])
def test_records_hold_what_sha256sum_says_and_all_is_flushed(record, tmp_path, monkeypatch):
    flushed = []
    real = os.fsync

    def fsync(descriptor):
        flushed.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    directory = write_files(tmp_path, 1)
    if record == "in place":
        records = flush_and_record(directory, FILES)
    else:
        source, directory = directory, tmp_path / "target"
        records = copy_and_record(source, directory, FILES)
    for name, content in FILES.items():
        whole = content + b"1"
        assert records[name] == FileRecord(len(whole), hashlib.sha256(whole).hexdigest())
        assert (directory / name).read_bytes() == whole
    folders = {str(directory), str(directory / "pytorch_model_fsdp_0")}
    assert set(flushed) == {str(directory / name) for name in FILES} | folders
    last_file = max(flushed.index(str(directory / name)) for name in FILES)
    assert min(flushed.index(folder) for folder in folders) > last_file


def test_a_flush_that_fails_is_an_error(tmp_path, monkeypatch):
    def fail(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == "optimizer.pt":
            raise OSError(5, "Input/output error")

    directory = write_files(tmp_path, 1)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        flush_and_record(directory, FILES)


def test_what_differs_is_named(tmp_path):
    directory = write_files(tmp_path, 1)
    records = flush_and_record(directory, FILES)
    assert file_problems(directory, records) == []
    content = bytearray((directory / "optimizer.pt").read_bytes())
    content[77] ^= 1
    (directory / "optimizer.pt").write_bytes(content)
    assert file_problems(directory, records) == ["optimizer.pt has other contents"]
    assert file_problems(directory, records, {".json"}) == [], "of these alone all is read"
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


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model_fsdp_0"])
def test_a_link_is_no_file_of_a_checkpoint(tmp_path, name):
    directory = write_files(tmp_path, 1)
    records = flush_and_record(directory, FILES)
    (directory / name).rename(tmp_path / "elsewhere")
    (directory / name).symlink_to(tmp_path / "elsewhere")
    assert file_problems(directory, records)


PART = 1000


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(module, "PART_BYTES", PART)
    monkeypatch.setattr(module, "PIECE_BYTES", 300)
    monkeypatch.setattr(module, "COPY_PIECE_BYTES", 333)


def content(size: int) -> bytes:
    return bytes((7 * at + at // 251) % 256 for at in range(size))


def saved(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 2 * PART, 7 * PART - 3])
def test_a_large_file_has_the_digest_of_its_parts_digests(size, tmp_path, small_parts):
    data = content(size)
    parts = [hashlib.sha256(data[at : at + PART]) for at in range(0, max(size, 1), PART)]
    whole = hashlib.sha256(b"".join(part.digest() for part in parts))
    expected = (parts[0] if len(parts) == 1 else whole).hexdigest()
    path = saved(tmp_path / "a", data)
    assert file_digests([path]) == [expected]
    assert copy_and_record(tmp_path, tmp_path / "b", ["a"]) == {"a": FileRecord(size, expected)}
    assert (tmp_path / "b" / "a").read_bytes() == data


def test_every_byte_counts_and_so_do_the_orders_of_parts_and_files(tmp_path, small_parts):
    data = content(3 * PART)
    changes = [data[PART : 2 * PART] + data[:PART] + data[2 * PART :], data]
    for at in (0, PART - 1, PART, 2 * PART, 3 * PART - 1):
        changes.append(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    paths = [saved(tmp_path / str(number), change) for number, change in enumerate(changes)]
    digests = file_digests(paths)
    assert len(set(digests)) == len(paths)
    assert digests == [file_digests([path])[0] for path in paths]
    with pytest.raises(FileNotFoundError):
        file_digests([*paths, tmp_path / "none"])


def damaged_entry(path: Path) -> str | None:
    """The first entry that is not as its CRC-32 says."""
    with zipfile.ZipFile(path) as archive:
        return archive.testzip()


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


@pytest.fixture
def weights(tmp_path, monkeypatch) -> list[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    paths = [tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"]
    return [saved(path, path.name.encode()) for path in paths]


def expected(paths: list[Path]) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_digests_of_weights_are_computed_again_once_a_file_was_written_to(weights, caplog):
    caplog.set_level("INFO")
    assert cached_digests(weights) == cached_digests(weights) == expected(weights)
    assert caplog.text.count("of weights once") == 1
    stat = weights[1].stat()
    weights[1].write_bytes(weights[1].read_bytes()[::-1])  # of the same size
    os.utime(weights[1], ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert cached_digests(weights) == expected(weights)
    assert caplog.text.count("of weights once") == 2


@pytest.mark.parametrize("content", ["{", "[1]", '{"other": "1"}'])
def test_a_cache_entry_that_cannot_be_used_is_replaced(content, weights, caplog):
    caplog.set_level("INFO")
    cached_digests(weights)
    (entry,) = (weights[0].parent / "cache").rglob("*.json")
    entry.write_text(content)
    assert cached_digests(weights) == cached_digests(weights) == expected(weights)
    assert caplog.text.count("of weights once") == 2
