import hashlib
import os
from pathlib import Path

import pytest
from made import FILES, write_files

from utils.checkpoints.files import (
    FileRecord,
    file_problems,
    flush_and_record,
    list_files,
    owner,
)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("model.safetensors", 0),
        ("model-00003-of-00007.safetensors", 0),
        ("rng_state.pth", 0),
        ("rng_state_13.pth", 13),
        ("pytorch_model_fsdp_0/__2_0.distcp", 2),
        ("optimizer_0/__11_3.distcp", 11),
        ("optimizer_0/.metadata", 0),
        ("global_step8/zero_pp_rank_3_mp_rank_00_optim_states.pt", 3),
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


def test_records_hold_what_sha256sum_says_and_all_is_flushed(tmp_path, monkeypatch):
    flushed = []
    real = os.fsync

    def fsync(descriptor):
        flushed.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    directory = write_files(tmp_path, 1)
    records = flush_and_record(directory, FILES)
    for name, content in FILES.items():
        whole = content + b"1"
        assert records[name] == FileRecord(len(whole), hashlib.sha256(whole).hexdigest())
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


def test_nothing_differs_in_an_untouched_checkpoint(tmp_path):
    directory = write_files(tmp_path, 1)
    assert file_problems(directory, flush_and_record(directory, FILES)) == []


def test_what_differs_is_named(tmp_path):
    directory = write_files(tmp_path, 1)
    records = flush_and_record(directory, FILES)
    content = bytearray((directory / "optimizer.pt").read_bytes())
    content[77] ^= 1
    (directory / "optimizer.pt").write_bytes(content)
    assert file_problems(directory, records) == ["optimizer.pt has other contents"]
    (directory / "trainer_state.json").unlink()
    (directory / "adapter_model.bin").touch()
    with (directory / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert file_problems(directory, records) == [
        "trainer_state.json is missing",
        "adapter_model.bin was not committed",
        "model.safetensors has 7,005 bytes, not 7,001",
    ]


def test_a_linked_folder_that_was_not_committed_is_found(tmp_path):
    directory = write_files(tmp_path, 1)
    records = flush_and_record(directory, FILES)
    (directory / "more").symlink_to(tmp_path)
    assert file_problems(directory, records) == ["more was not committed"]


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model_fsdp_0"])
def test_a_link_is_no_file_of_a_checkpoint(tmp_path, name):
    directory = write_files(tmp_path, 1)
    records = flush_and_record(directory, FILES)
    (directory / name).rename(tmp_path / "elsewhere")
    (directory / name).symlink_to(tmp_path / "elsewhere")
    assert file_problems(directory, records)
