"""A checkpoint from a stranger cannot read or write outside of its folder."""

import dataclasses
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from made import RUN, commit, write_files
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from utils.checkpoints import files
from utils.checkpoints.adoption import adopt_checkpoint
from utils.checkpoints.discovery import best_checkpoint, committed_checkpoints, resume_point
from utils.checkpoints.files import (
    DamagedCheckpointError,
    FileRecord,
    flush_and_record,
    list_files,
    read_manifest,
    write_manifest,
)
from utils.checkpoints.pickles import refuse_code
from utils.config.errors import ConfigurationError

BEST = {"best_model_checkpoint": "/gone/run/checkpoint-4"}


@pytest.fixture
def theirs(tmp_path):
    """Make a stranger's run; return its newest checkpoint. The best one is in the same folder."""
    run = tmp_path / "theirs"
    commit(run, 4)
    directory = write_files(run, 6)
    (directory / "trainer_state.json").write_text(json.dumps(BEST))
    (directory / "optimizer.pt").unlink()
    torch.save({"moments": torch.zeros(3)}, directory / "optimizer.pt")
    commit(run, 8)
    shutil.rmtree(run / "checkpoint-8")
    for folder in (run, directory / "run"):
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").write_text("seed: 1\n")
        (folder / "provenance.json").write_text(json.dumps({"run_id": RUN, "starts": []}))
    (run / "metrics.jsonl").write_text("{}\n")
    vouch(directory, step=6)
    return directory


def vouch(checkpoint: Path, names: tuple[str, ...] = (), **changes) -> None:
    """Write an attacker's manifest: it matches all files and lists the additional `names`."""
    manifest = read_manifest(checkpoint.with_name("checkpoint-4"))
    files = flush_and_record(checkpoint, list_files(checkpoint))
    files |= {name: FileRecord(6, "00" * 32) for name in names}
    write_manifest(checkpoint, dataclasses.replace(manifest, **{"files": files, **changes}))


def everything(root: Path) -> dict[str, bytes]:
    """Return all files below a folder, except those of the new run, with their contents."""
    files = (path for path in root.rglob("*") if path.is_file() and "mine" not in path.parts)
    return {str(path): path.read_bytes() for path in files}


def adopt(theirs: Path) -> Path:
    output_dir = theirs.parents[1] / "mine"
    output_dir.mkdir(exist_ok=True)
    adopt_checkpoint(str(theirs), output_dir, needs_best=False)
    return output_dir


def refused(theirs: Path, said: str) -> None:
    """Check that the checkpoint is refused, and that no file has changed."""
    before = everything(theirs.parents[1])
    with pytest.raises(ConfigurationError, match=said):
        adopt(theirs)
    assert everything(theirs.parents[1]) == before
    assert not list((theirs.parents[1] / "mine").iterdir())


def test_an_honest_one_is_taken_with_its_best_also_through_links_of_the_user(theirs, tmp_path):
    (tmp_path / "home").symlink_to(tmp_path)
    link = tmp_path / "home" / "theirs-6"
    link.symlink_to(theirs)
    (new := tmp_path / "new").mkdir()
    (tmp_path / "mine").symlink_to(new)
    mine = adopt(link)
    assert [path.name for path in mine.glob("checkpoint-*")] == ["checkpoint-6"], "no best there"
    shutil.rmtree(mine / "checkpoint-6")
    mine = adopt(tmp_path / "home" / "theirs" / "checkpoint-6")
    assert {path.name for path in mine.iterdir()} == {
        "checkpoint-4", "checkpoint-6", "config.yaml", "metrics.jsonl", "provenance.json",
    }  # fmt: skip
    assert resume_point(mine, RUN) == mine / "checkpoint-6"
    index = {"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}
    (theirs / "model.safetensors.index.json").write_text(json.dumps(index))
    (theirs / "latest").write_text("global_step6\n")
    (theirs / "global_step6").mkdir()
    torch.save({"moments": torch.zeros(3)}, theirs / "global_step6" / "mp_rank_00_model_states.pt")
    vouch(theirs, step=6)
    refuse_code(theirs)
    assert best_checkpoint(mine / "checkpoint-6") == mine / "checkpoint-4"


@pytest.mark.parametrize(
    "name", ["../../../victim.txt", "run/../../../victim.txt", "{root}/victim.txt", "manifest.json"]
)
def test_a_manifest_that_names_what_is_not_in_its_folder_is_refused(name, theirs, tmp_path):
    (tmp_path / "victim.txt").write_text("intact")
    vouch(theirs, (name.format(root=tmp_path),), step=6)
    with pytest.raises(DamagedCheckpointError):
        read_manifest(theirs)
    refused(theirs, "checkpoint-6: it is no committed checkpoint, .*manifest.json ")
    # The checkpoint is also ignored if somebody copied it into the run directory.
    assert not [each for each, _ in committed_checkpoints(theirs.parent, RUN) if each == theirs]
    assert resume_point(theirs.parent, RUN) == theirs.with_name("checkpoint-4")


@pytest.mark.parametrize("kind", ["file", "manifest", "record", "unlisted record", "journal"])
def test_links_are_refused_before_they_are_read(kind, theirs, tmp_path):
    """tests/unit/host/test_files.py has other kinds of files."""
    path = {
        "file": theirs / "optimizer.pt",
        "manifest": theirs / "manifest.json",
        "journal": theirs.parent / "metrics.jsonl",
    }.get(kind, theirs / "run" / "config.yaml")
    if kind == "unlisted record":
        files = read_manifest(theirs).files.items()
        kept = {name: record for name, record in files if name != "run/config.yaml"}
        vouch(theirs, step=6, files=kept)
    path.rename(tmp_path / path.name)
    path.symlink_to(tmp_path / path.name)
    refused(theirs, "without links")


@pytest.mark.parametrize(
    "change",
    [{"step": "6/../../.."}, {"step": "/../x"}, {"step": -1}, {"step": True}, {"step": None},
     {"run_id": "../../x"}, {"run_id": "a'b"}, {"run_id": 7}, {"run_id": ""}, {"world_size": "1"},
     {"files": {"optimizer.pt": FileRecord("1", "00")}}, {"strategy": ["ddp"]}, {"tokens": 1.5}],
)  # fmt: skip
def test_what_becomes_part_of_a_path_has_its_type(change, theirs):
    vouch(theirs, **{"step": 6, **change})
    refused(theirs, "manifest.json cannot be read")


@pytest.mark.parametrize(
    "committed",
    [{}, {"files": []}, [], {"files": {"a": {"size_bytes": 1}}}, {"files": {}, "more": 1}],
)
def test_a_manifest_of_another_shape_is_refused(committed, theirs):
    (theirs / "manifest.json").write_text(files._text(committed))
    refused(theirs, "manifest.json cannot be read")


def test_what_changes_while_it_is_copied_is_not_taken(theirs, monkeypatch):
    """The copy is compared with the manifest: the source may have changed during the copying."""
    copied = shutil.copyfile

    def copy_and_change(source, target, **options):
        Path(source).write_bytes(b"changed")
        return copied(source, target, **options)

    monkeypatch.setattr(shutil, "copyfile", copy_and_change)
    with pytest.raises(ConfigurationError, match="is not as it was committed"):
        adopt(theirs)
    assert not list((theirs.parents[1] / "mine").iterdir())


@pytest.mark.parametrize("named", ["..", "/a/..", "/", "checkpoint-4x", 3, ["a"], None, ""])
def test_the_best_checkpoint_is_one_beside_or_none(named, theirs):
    (theirs / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": named}))
    vouch(theirs, step=6)
    assert best_checkpoint(theirs) is None
    mine = adopt(theirs)
    assert [path.name for path in mine.glob("checkpoint-*")] == ["checkpoint-6"]


def test_a_best_checkpoint_of_another_run_or_step_is_not_taken(theirs):
    best = theirs.with_name("checkpoint-4")
    vouch(best, step=9)
    with pytest.raises(ConfigurationError, match="is not as it was committed"):
        adopt(theirs)
    vouch(best, step=4, run_id="another")
    with pytest.raises(ConfigurationError, match="is a checkpoint of another run"):
        adopt(theirs)
    best.rename(theirs.with_name("elsewhere"))
    best.symlink_to(theirs.with_name("elsewhere"))
    assert [path.name for path in adopt(theirs).glob("checkpoint-*")] == ["checkpoint-6"]


OUTSIDE = "../../victim/__0_0.distcp"


def _metadata(path: Path, named: str) -> None:
    index = dcp.MetadataIndex("weight")
    entries = {"weight": dcp.BytesStorageMetadata()}
    info = filesystem._StorageInfo(named, 0, 4)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pickle.dumps(dcp.Metadata(entries, None, {index: info})))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("model.safetensors.index.json", {"weight_map": {"w": OUTSIDE}}),
        ("pytorch_model.bin.index.json", {"weight_map": {"w": "/etc/passwd"}}),
        ("adapter_model.safetensors.index.json", {"weight_map": {"w": "a\0b"}}),
        ("latest", "../../victim"),
        ("latest", "/victim"),
        ("latest_universal", "../victim"),
        ("pytorch_model_fsdp_0/.metadata", OUTSIDE),
        ("optimizer_0/.metadata", "/etc/passwd"),
    ],
)
def test_names_in_files_of_a_checkpoint_stay_inside(name, write, theirs, tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "__0_0.distcp").write_bytes(b"secret")
    path = theirs / name
    if name.endswith(".metadata"):
        _metadata(path, write)
    else:
        path.write_text(write if isinstance(write, str) else json.dumps(write))
    vouch(theirs, step=6)
    with pytest.raises(ConfigurationError, match=rf"{name} names .*nothing was read or written"):
        refuse_code(theirs)
