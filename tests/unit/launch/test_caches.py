"""What one job compiled the next one finds, wherever its node's disk is."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from launching import ROOT, quiet_environment

from utils.launch import caches
from utils.launch.caches import CompileCache, archive_path, node_environment

DIRECTORY = Path("/tmp/stoker-5-x")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def job(directory: Path, **files: str) -> CompileCache:
    """A job that has compiled these; names with `_` for `/` of the path."""
    cache = CompileCache(directory)
    for name, text in files.items():
        path = cache.folder / name.replace("_", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return cache


def found(cache: CompileCache) -> dict[str, str]:
    paths = [path for path in cache.folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(cache.folder)): path.read_text() for path in paths}


def test_jobs_find_and_add_what_is_compiled_until_it_is_too_large(tmp_path, monkeypatch):
    first = job(tmp_path / "a", ab_kernel="code", locks_x="1")
    (first.folder / "x.lock").write_text("")
    (first.folder / "x.tmp.12").write_text("")
    first.keep()
    again = job(tmp_path / "b")
    assert found(again) == {"ab/kernel": "code", "locks/x": "1"}
    before = archive_path().stat()
    again.keep()  # nothing is new: nothing is written
    assert archive_path().stat() == before
    job(tmp_path / "c", more="3" * 4000).keep()
    assert found(job(tmp_path / "d")).keys() == {"ab/kernel", "locks/x", "more"}
    assert [path.name for path in archive_path().parent.iterdir()] == [archive_path().name]
    monkeypatch.setattr(caches, "LARGEST_BYTES", 4000)
    job(tmp_path / "e", new="4").keep()
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert found(job(tmp_path / "f")) == {"new": "4"}


def test_a_broken_archive_is_replaced_and_none_leaves_its_directory(tmp_path, caplog):
    archive_path().parent.mkdir(parents=True)
    (tmp_path / "evil").write_text("x")
    with tarfile.open(archive_path(), "w") as tar:
        tar.add(tmp_path / "evil", "../outside")
    job(tmp_path / "a")
    assert "cannot be read" in caplog.text
    assert not list(tmp_path.rglob("outside"))
    archive_path().write_bytes(b"no archive" * 200)
    job(tmp_path / "b", a="1").keep()
    assert found(job(tmp_path / "c")) == {"a": "1"}


def test_no_room_is_a_line_and_no_error(tmp_path, caplog, small_disk, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(small_disk))
    job(tmp_path / "a", a="1" * 2**17).keep()
    assert "compiled code cannot be saved" in caplog.text
    assert not list(small_disk.rglob("*.tar*"))


def test_what_is_added_for_the_processes_of_a_node():
    assert node_environment({}, DIRECTORY)["TMPDIR"] == f"{DIRECTORY}/tmp"
    # Room for the names of sockets.
    assert "TMPDIR" not in node_environment({}, Path(f"/tmp/{'a' * 80}"))
    added = node_environment({"STOKER_DEBUG": "1", "NCCL_DEBUG": "TRACE"}, DIRECTORY)
    assert added["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert "NCCL_DEBUG" not in added
    for environment in ({}, {"STOKER_DEBUG": "0"}):
        assert "NCCL_DEBUG" not in node_environment(environment, DIRECTORY)


COMPILES = """
import torch, torch._inductor.config
def scaled(x):
    return (x * 3 + 1).relu().sum(-1)
torch.compile(scaled)(torch.ones(8, 16))
from torch._dynamo.utils import counters
found = counters["inductor"]
print("hits", found["fxgraph_cache_hit"], "misses", found["fxgraph_cache_miss"])
"""


@pytest.mark.slow
def test_a_second_job_on_another_node_compiles_nothing(tmp_path):
    """Through the launcher, as jobs do: each has a directory of its own, gone at its end."""
    script = tmp_path / "worker.py"
    script.write_text(COMPILES)
    inherited = {
        name: value
        for name, value in quiet_environment().items()
        if not name.startswith(("STOKER_", "TORCHINDUCTOR_", "TRITON_"))
    }
    said = []
    for node in ("n1", "n2"):
        (tmp_path / node).mkdir()
        done = subprocess.run(
            [sys.executable, "-m", "utils.launch.node", str(script)],
            cwd=ROOT, capture_output=True, text=True, check=False,
            env=inherited | {
                "TMPDIR": str(tmp_path / node), "XDG_CACHE_HOME": str(tmp_path / "home"),
                "ACCELERATE_USE_CPU": "true", "STOKER_PROCESSES_PER_NODE": "1",
                "PATH": os.environ["PATH"], "ACCELERATE_CONFIG": "accelerate_configs/cpu.yaml",
            },
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said.append(next(line for line in done.stdout.splitlines() if line.startswith("hits")))
        assert not list((tmp_path / node).glob("stoker-*"))
    assert said == ["hits 0 misses 1", "hits 1 misses 0"]
