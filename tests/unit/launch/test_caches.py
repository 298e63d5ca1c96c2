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

INDUCTOR, TRITON = caches.COMPILED
DIRECTORY = Path("/tmp/stoker-5-x")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def job(directory: Path, **files: str) -> CompileCache:
    """A job that has compiled these; names with `_` for `/` of the path."""
    environment = {name: str(directory / name.lower()) for name in (INDUCTOR, TRITON)}
    for path in environment.values():
        Path(path).mkdir(parents=True)
    cache = CompileCache(directory, environment)
    compile_more(cache, **files)
    return cache


def compile_more(cache: CompileCache, **files: str) -> None:
    for name, text in files.items():
        path = cache.directories[INDUCTOR] / name.replace("_", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def found(cache: CompileCache) -> dict[str, str]:
    root = cache.directories[INDUCTOR]
    return {
        str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()
    }


def test_a_requeued_job_finds_what_the_first_compiled(tmp_path):
    first = job(tmp_path / "a", ab_kernel="code", locks_x="1")
    (first.directories[INDUCTOR] / "x.lock").write_text("")
    (first.directories[TRITON] / "k.cubin").write_bytes(b"\0")
    first.keep()
    again = job(tmp_path / "b")
    assert found(again) == {"ab/kernel": "code", "locks/x": "1"}
    assert (again.directories[TRITON] / "k.cubin").read_bytes() == b"\0"
    before = archive_path().stat()
    again.keep()  # nothing is new: nothing is written
    assert archive_path().stat() == before


def test_later_jobs_add_to_the_archive_until_it_is_too_large(tmp_path, monkeypatch):
    job(tmp_path / "a", a="1" * 3000).keep()
    later = job(tmp_path / "b")
    compile_more(later, b="2")
    later.keep()
    assert found(job(tmp_path / "c")) == {"a": "1" * 3000, "b": "2"}
    assert [path.name for path in archive_path().parent.iterdir()] == [archive_path().name]
    monkeypatch.setattr(caches, "LARGEST_BYTES", 4000)
    last = job(tmp_path / "d")
    compile_more(last, c="3" * 3000)
    last.keep()
    assert found(job(tmp_path / "e")) == {"c": "3" * 3000}


def test_a_broken_archive_is_replaced(tmp_path, caplog):
    archive_path().parent.mkdir(parents=True)
    archive_path().write_bytes(b"no archive" * 200)
    cache = job(tmp_path / "a", a="1")
    assert "cannot be read" in caplog.text
    cache.keep()
    assert found(job(tmp_path / "b")) == {"a": "1"}


def test_no_room_is_a_line_and_no_error(tmp_path, caplog, small_disk, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(small_disk))
    cache = job(tmp_path / "a", a="1" * 2**17)
    cache.keep()
    assert "compiled code cannot be saved" in caplog.text
    assert not list(small_disk.rglob("*.tar*"))


def test_a_directory_of_the_users_is_left_alone(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "kernel").write_text("code")
    cache = CompileCache(tmp_path / "node", {INDUCTOR: str(own)})
    assert cache.directories == {}
    cache.keep()
    assert not archive_path().exists()


def test_an_archive_cannot_leave_its_directory(tmp_path, caplog):
    archive_path().parent.mkdir(parents=True)
    (tmp_path / "evil").write_text("x")
    with tarfile.open(archive_path(), "w") as tar:
        tar.add(tmp_path / "evil", f"{INDUCTOR}/../../outside")
    cache = job(tmp_path / "a")
    assert "cannot be read" in caplog.text
    assert not (tmp_path / "outside").exists()
    assert found(cache) == {}


def test_what_is_added_for_the_processes_of_a_node():
    assert node_environment({}, DIRECTORY)["TMPDIR"] == f"{DIRECTORY}/tmp"
    # Room for the names of sockets.
    assert "TMPDIR" not in node_environment({}, Path(f"/tmp/{'a' * 80}"))

    offline = {"HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"}
    job = {"SLURM_JOB_ID": "5"}
    assert offline <= node_environment(job, DIRECTORY).keys()
    for environment in ({}, job | {"HF_HUB_OFFLINE": "0"}):
        assert not offline & node_environment(environment, DIRECTORY).keys()

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
