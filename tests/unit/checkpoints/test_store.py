import pytest
import torch
from made import FILES, commit, names, store, write_files

from utils.checkpoints.manifest import read_manifest
from utils.config.errors import ConfigurationError, StorageError


def test_a_commit_says_what_was_consumed_and_holds_every_file(tmp_path, caplog):
    caplog.set_level("INFO")
    commit(tmp_path, 12)
    manifest = read_manifest(tmp_path / "checkpoint-12")
    assert (manifest.step, manifest.samples, manifest.tokens) == (12, 96, 1200)
    assert manifest.files.keys() == FILES.keys()
    assert manifest.fingerprints == {"data": {"train": ["abc"]}}
    assert "checkpoint-12 committed (20.5 KiB" in caplog.text


def test_what_no_rank_wrote_is_not_committed(tmp_path):
    directory = write_files(tmp_path, 4)
    (directory / "rng_state_7.pth").touch()
    with pytest.raises(StorageError, match=r"no rank wrote \(rng_state_7\.pth\)"):
        store(tmp_path).commit(4, tokens=0, best=None)
    assert not store(tmp_path).is_committed(4)


def test_storage_that_fails_commits_nothing(tmp_path, monkeypatch):
    def fail(*_args):
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr("utils.checkpoints.store.write_manifest", fail)
    write_files(tmp_path, 4)
    with pytest.raises(StorageError, match="the disk quota is used up"):
        store(tmp_path).commit(4, tokens=0, best=None)
    assert not store(tmp_path).is_committed(4)


def test_a_damaged_best_checkpoint_is_not_loaded(tmp_path):
    directory = write_files(tmp_path, 4)
    (directory / "pytorch_model_fsdp_0" / "__0_0.distcp").unlink()
    torch.save({"moments": torch.zeros(3)}, directory / "optimizer.pt")
    store(tmp_path).commit(4, tokens=0, best=None)
    store(tmp_path).check(directory)
    (directory / "optimizer.pt").write_bytes(b"")
    with pytest.raises(StorageError, match=r"checkpoint-4 is damaged \(optimizer.pt has 0 bytes"):
        store(tmp_path).check(directory)


def test_a_best_checkpoint_with_a_strangers_pickle_is_not_loaded(tmp_path):
    commit(tmp_path, 4)
    with pytest.raises(
        ConfigurationError, match=r"optimizer\.pt is nothing that torch\.save writes"
    ):
        store(tmp_path).check(tmp_path / "checkpoint-4")


@pytest.mark.parametrize(
    "act",
    [
        lambda checkpoints: checkpoints.begin(6, None),
        lambda checkpoints: checkpoints.begin(2, None),
        lambda checkpoints: checkpoints.see_that_it_is_ours(),
        lambda checkpoints: checkpoints.commit(4, tokens=0, best=None),
    ],
)
def test_a_run_that_lost_its_directory_writes_nothing_more(act, tmp_path, monkeypatch):
    commit(tmp_path, 2)
    write_files(tmp_path, 4)
    lost = "it was taken over by process 7 on n2."
    monkeypatch.setattr("utils.checkpoints.store.taken_over", lambda _directory: lost)
    with pytest.raises(ConfigurationError, match=r"process 7 on n2\. Nothing more is written"):
        act(store(tmp_path))
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    assert not store(tmp_path).is_committed(4)
