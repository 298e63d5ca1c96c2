"""Jobs share compiled code, although each has a private directory."""

import os
import stat
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from launching import ROOT, quiet_environment

from utils.config.errors import StorageError
from utils.launch import caches
from utils.launch.caches import archive_path, enter_node_directory, pack_compiled, unpack_compiled


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):  # a library may have set them
        monkeypatch.delenv(name, raising=False)


def job(directory: Path, **files: str) -> dict[str, str]:
    """Start a job that compiles these files; return the files that earlier jobs left it."""
    directory.mkdir()
    known = unpack_compiled(directory)
    found = {path.name: path.read_text() for path in directory.rglob("*") if path.is_file()}
    for name, text in files.items():
        (directory / "a/b").mkdir(parents=True, exist_ok=True)
        (directory / "a/b" / name).write_text(text)
    pack_compiled(directory, known)
    return found


def test_jobs_find_and_add_what_is_compiled_until_it_is_too_large(tmp_path, monkeypatch):
    job(tmp_path / "1", kernel="code")
    before = archive_path().stat()
    assert job(tmp_path / "2") == {"kernel": "code"}
    assert archive_path().stat() == before, "nothing is new: nothing is written"
    job(tmp_path / "3", more="3" * 4000)
    assert job(tmp_path / "4").keys() == {"kernel", "more"}
    assert [path.name for path in archive_path().parent.iterdir()] == [archive_path().name]
    with monkeypatch.context() as limit:
        limit.setattr(caches, "LARGEST_ARCHIVE_BYTES", 4000)
        job(tmp_path / "5", new="4")
    assert job(tmp_path / "6") == {"new": "4"}


def test_a_bad_archive_is_replaced_and_no_room_is_a_line(tmp_path, caplog, small_disk, monkeypatch):
    archive_path().parent.mkdir(parents=True)
    (tmp_path / "evil").write_text("x")
    with tarfile.open(archive_path(), "w") as tar:
        tar.add(tmp_path / "evil", "../outside")
    job(tmp_path / "1")
    assert "cannot be read" in caplog.text
    assert not list(tmp_path.rglob("outside"))
    with tarfile.open(archive_path(), "w") as tar:
        member = tarfile.TarInfo("device")
        member.type = tarfile.CHRTYPE
        tar.addfile(member)
    assert job(tmp_path / "device") == {}
    assert caplog.text.count("cannot be read") == 2
    archive_path().write_bytes(b"no archive" * 200)
    job(tmp_path / "2", a="1")
    assert job(tmp_path / "3") == {"a": "1"}
    monkeypatch.setenv("XDG_CACHE_HOME", str(small_disk))
    job(tmp_path / "4", a="1" * 2**17)
    assert "compiled code cannot be saved" in caplog.text
    assert not list(small_disk.rglob("*.tar*"))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, None])
def test_nothing_of_an_archive_with_a_link_or_a_name_outside_is_extracted(tmp_path, caplog, kind):
    archive_path().parent.mkdir(parents=True)
    with tarfile.open(archive_path(), "w") as tar:
        tar.addfile(tarfile.TarInfo("file"))
        member = tarfile.TarInfo("link" if kind else "folder/../file")
        member.type, member.linkname = kind or tarfile.REGTYPE, "file"
        tar.addfile(member)
    assert job(tmp_path / "1") == {}
    assert "cannot be read" in caplog.text


@mock.patch.dict(os.environ)
def test_caches_are_private_to_the_job_unless_the_user_placed_them(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    for name in ("TORCHINDUCTOR_CACHE_DIR", "STOKER_NOTES_DIR", "SLURM_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    with pytest.raises(StorageError, match=r"n2: .*/none \(No such file.*set TMPDIR"):
        enter_node_directory()
    given = {"SLURM_TMPDIR": str(tmp_path), "TRITON_CACHE_DIR": "/scratch", "SLURM_JOB_ID": "5"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    directory = enter_node_directory()
    assert str(directory).startswith(f"{tmp_path}/stoker-n2+5-")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    inductor = str(directory / "compiled/torchinductor_cache_dir")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == inductor
    assert Path(os.environ["STOKER_NOTES_DIR"]).is_dir()
    assert (directory / "tmp").is_dir()
    assert os.environ["TRITON_CACHE_DIR"] == "/scratch"
    assert os.environ["TMPDIR"] == str(tmp_path / "none"), "names of sockets have no room there"
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setenv("SLURM_TMPDIR", short)
        directory = enter_node_directory()
        assert os.environ["TMPDIR"] == f"{directory}/tmp"


@mock.patch.dict(os.environ)
def test_the_directory_of_a_killed_launcher_is_removed_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path))
    living = enter_node_directory()
    others = {tmp_path / "stoker-prepare-1", tmp_path / "stoker-elsewhere+5-x"}
    for other in others:
        other.mkdir()
    code = "import os; from utils.launch import caches; caches.enter_node_directory(); "
    code += "os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == -9
    assert len(list(tmp_path.iterdir())) == 4
    newer = enter_node_directory()
    assert set(tmp_path.iterdir()) == {living, newer} | others


COMPILES = """
import torch, torch._inductor.config
torch._inductor.config.cpp_cache_precompile_headers = False  # longer than one function
def scaled(x):
    return (x * 3 + 1).relu().sum(-1)
torch.compile(scaled)(torch.ones(8, 16))
from torch._dynamo.utils import counters
found = counters["inductor"]
print("hits", found["fxgraph_cache_hit"], "misses", found["fxgraph_cache_miss"])
"""


@pytest.mark.slow
def test_a_second_job_on_another_node_compiles_nothing(tmp_path):
    """Both jobs use the launcher. Each has a private directory, which is deleted at its end."""
    script = tmp_path / "worker.py"
    script.write_text(COMPILES)
    said = []
    for node in ("n1", "n2"):
        (tmp_path / node).mkdir()
        done = subprocess.run(
            [sys.executable, "-m", "utils.launch.node", str(script)],
            cwd=ROOT, capture_output=True, text=True, check=False,
            env=quiet_environment({
                "TMPDIR": str(tmp_path / node), "XDG_CACHE_HOME": str(tmp_path / "home"),
                "ACCELERATE_USE_CPU": "true", "STOKER_PROCESSES_PER_NODE": "1",
            }),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said.append(next(line for line in done.stdout.splitlines() if line.startswith("hits")))
        assert not list((tmp_path / node).glob("stoker-*"))
    assert said == ["hits 0 misses 1", "hits 1 misses 0"]
