"""Copies of data and environment on the nodes' own disks: jobs on Slurm, damage, small disks."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import tiny
from launching import ROOT
from training_jobs import TrainingJobs

PYTHON = """
set -euo pipefail
source slurm/environment.sh
find_python
source slurm/stage_env.sh
exec python -c 'import os, sys; print(sys.prefix, os.environ.get("PYTHONPATH", ""))'
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """Make an environment like that of this process, whose packages stay where they are."""
    folder = tmp_path_factory.mktemp("environment")
    packages = folder / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    packages.mkdir(parents=True)
    (packages / "elsewhere.pth").write_text(sysconfig.get_path("purelib"))
    home = Path(sys.executable).resolve().parent
    (folder / "pyvenv.cfg").write_text(f"home = {home}\n")
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    return folder


def packed(environment: Path, archive: Path) -> Path:
    with tarfile.open(archive, f"w:{'gz' if archive.suffix == '.gz' else ''}") as tar:
        tar.add(environment, ".")
    return archive


def spoil(file: Path) -> bytes:
    """Change a token of a file without its size and time; return the bytes of before."""
    before, state = file.read_bytes(), file.stat()
    changed = bytearray(before)
    changed[len(changed) // 2] ^= 1
    file.write_bytes(changed)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    return before


def restore(file: Path, content: bytes) -> None:
    state = file.stat()
    file.write_bytes(content)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))


@pytest.mark.slow
@pytest.mark.usefixtures("idle")
def test_jobs_share_copies_and_train_with_the_bits_of_the_originals(
    jobs: TrainingJobs, environment, tmp_path
):
    disk = tmp_path / "disk"
    disk.mkdir()
    archive = packed(environment, tmp_path / "env.tar")
    originals = [*(jobs.files / "documents").glob("*.arrow")]
    originals += (jobs.files / "heldout").glob("*.arrow")

    def train(name: str, archive: Path, where: Path, *options: str, **settings: object) -> str:
        env = {"STOKER_STAGE_DIR": str(where), "STOKER_STAGE_ENV": str(archive)}
        env |= {"STOKER_PROCESSES_PER_NODE": "1"}
        job = jobs.submit(tmp_path / name, *options, env=env, stage_data="true", **settings)
        assert jobs.slurm.wait(job) == "COMPLETED", job.output()
        return job.output()

    def check_bits(run: Path, plain: Path) -> None:
        tiny.assert_same_run(run, plain)
        assert tiny.evaluations(run, "heldout") == tiny.evaluations(plain, "heldout")
        assert tiny.starts(run)[0]["data"] == tiny.starts(plain)[0]["data"]

    first = train("first", archive, disk, "--nodes=2", "--gpus-per-node=2")
    check_bits(tmp_path / "first", jobs.finished(per_node=1))
    copies = {path.parent: path.read_bytes() for path in disk.glob("stoker-data-*/*/*.arrow")}
    assert len(copies) == 2
    for copy in copies:
        assert f" is read from {copy}" in first
    (staged,) = disk.glob("stoker-env-*/env-*/bin")
    assert f"n1: python of {staged.parent}" in first

    # The other jobs have one rank: the copies are those of the node. One reads the originals.
    def one_rank(name: str, archive: Path, where: Path) -> str:
        return train(name, archive, where, "--nodes=1", "--gpus-per-node=1", max_steps=10)

    with mounted(tmp_path / "small", "size=64k") as small:
        alone = one_rank("alone", archive, small)
    assert alone.count(f"stage_data: {jobs.files / 'documents'} is read where it is: ") == 1
    assert f"KiB do not fit, {small}/stoker-data-{os.getuid()} has " in alone

    # The second job does not read the original files, which hold other tokens now.
    before = {file: spoil(file) for file in originals}
    second = one_rank("second", archive, disk)
    for file, content in before.items():
        restore(file, content)
    check_bits(tmp_path / "second", tmp_path / "alone")
    assert "copying" not in second
    for copy, content in copies.items():
        assert f" is read from {copy}" in second
        (file,) = copy.glob("*.arrow")
        assert file.read_bytes() == content
        spoil(file)

    cut = tmp_path / "cut.tar"
    cut.write_bytes(archive.read_bytes().rstrip(b"\0"))
    third = one_rank("third", cut, disk)
    check_bits(tmp_path / "third", tmp_path / "alone")
    assert "is damaged or cut short: it is made again" in third
    assert f"STOKER_STAGE_ENV {cut}: the environment of slurm/cluster.env is used" in third
    for copy, content in copies.items():
        (file,) = copy.glob("*.arrow")
        assert file.read_bytes() == content


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """Mount a small file system in memory."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def python_of(archive: Path, disk: Path) -> tuple[str, str]:
    """Return what the Python of a node says of itself, and the line about STOKER_STAGE_ENV."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    given = {"STOKER_STAGE_ENV": str(archive), "STOKER_STAGE_DIR": str(disk), "PATH": path}
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        ["bash", "-c", PYTHON], cwd=ROOT, env=inherited | given, text=True, check=False,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr.splitlines()[-1]


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_an_environment_is_unpacked_once_and_others_are_removed(environment, tmp_path, suffix):
    archive = packed(environment, tmp_path / f"my env{suffix}")
    folder = tmp_path / f"stoker-env-{os.getuid()}"
    prefix, line = python_of(archive, tmp_path)
    assert Path(prefix).parent == folder
    assert Path(prefix).name.startswith("my env-")
    assert line.endswith(f"python of {prefix}")
    mark = Path(prefix) / ".whole"
    made = mark.stat().st_ino
    assert python_of(archive, tmp_path)[0] == prefix
    assert mark.stat().st_ino == made
    mark.unlink()  # a job was killed while it unpacked
    (Path(prefix) / "bin" / "python").unlink()
    assert python_of(archive, tmp_path)[0] == prefix
    os.utime(archive, (1, 1))
    assert python_of(archive, tmp_path)[0] != prefix
    assert not Path(prefix).exists()


def test_a_file_that_is_no_archive_removes_no_good_copy(environment, tmp_path):
    good = Path(python_of(packed(environment, tmp_path / "env.tar"), tmp_path)[0])
    (tmp_path / "text.tar").write_text("no archive")
    prefix, line = python_of(tmp_path / "text.tar", tmp_path)
    assert prefix == sys.prefix
    assert line.endswith("it is cut short, or no tar archive")
    assert (good / ".whole").exists()


def test_packages_without_a_python_are_found_by_pythonpath(tmp_path):
    packages = tmp_path / "packages"
    (packages / "torch").mkdir(parents=True)
    (packages / "torch" / "__init__.py").touch()
    said, line = python_of(packed(packages, tmp_path / "packages.tar"), tmp_path)
    prefix, path = said.split()
    assert prefix == sys.prefix
    assert line.endswith(f"python of {path}")


@pytest.mark.parametrize(
    "fault", ["cut short", "from member names", "No such file", "python with torch", "psutil",
              "yours", "a link", "too small"],
)  # fmt: skip
def test_a_fault_leaves_the_environment_of_the_cluster(environment, tmp_path, fault):
    archive, disk = packed(environment, tmp_path / "env.tar"), tmp_path / "disk"
    folder = disk / f"stoker-env-{os.getuid()}"
    disk.mkdir()
    outside = tmp_path / "outside"
    if fault == "cut short":
        archive.write_bytes(archive.read_bytes().rstrip(b"\0"))
    elif fault == "from member names":
        with tarfile.open(archive, "w") as tar:
            tar.add(environment / "pyvenv.cfg", "../../../outside")
    elif fault == "No such file":
        archive.unlink()
    elif fault == "python with torch":
        packed(environment / "lib", archive)
    elif fault == "psutil":
        (packages,) = environment.glob("lib/*/site-packages")
        empty = tmp_path / "empty"
        shutil.copytree(environment, empty, symlinks=True)
        (empty / packages.relative_to(environment) / "elsewhere.pth").unlink()
        packed(empty, archive)
    elif fault == "yours":
        folder.mkdir()
        folder.chmod(0o777)
    elif fault == "a link":
        outside.mkdir(mode=0o700)
        folder.symlink_to(outside)
        fault = "yours"
    else:
        archive.open("r+b").truncate(2**43)  # a file with a hole
        fault = "it needs about 8388608 MiB"
    prefix, line = python_of(archive, disk)
    assert prefix == sys.prefix
    assert f"STOKER_STAGE_ENV {archive}: the environment of slurm/cluster.env is used: " in line
    assert fault in line
    assert not outside.exists() or not any(outside.iterdir())


@pytest.mark.parametrize(
    ("options", "said"), [("nr_inodes=2", "no locks in "), ("noexec", "failed to map segment")]
)
def test_a_disk_that_cannot_hold_or_run_the_copy_is_not_used(
    environment, tmp_path, options, said
):  # fmt: skip
    mine = Path(shutil.copytree(environment, tmp_path / "mine", symlinks=True))
    (packages,) = mine.glob("lib/*/site-packages")
    shutil.copytree(Path(psutil.__file__).parent, packages / "psutil")
    with mounted(tmp_path / "disk", f"{options},size=64m") as disk:
        prefix, line = python_of(packed(mine, tmp_path / "env.tar"), disk)
    assert prefix == sys.prefix
    assert said in line


def test_a_conda_environment_without_activate_is_used(environment, tmp_path):
    conda = Path(shutil.copytree(environment, tmp_path / "conda", symlinks=True))
    (conda / "conda-meta").mkdir()
    prefix, _ = python_of(packed(conda, tmp_path / "conda.tar"), tmp_path)
    assert Path(prefix).parent == tmp_path / f"stoker-env-{os.getuid()}"


def test_a_damaged_copy_that_a_job_uses_stays(environment, tmp_path):
    archive = packed(environment, tmp_path / "env.tar")
    copy = Path(python_of(archive, tmp_path)[0])
    (copy / ".whole").unlink()
    with Path(f"{copy}.used").open() as used:
        fcntl.flock(used, fcntl.LOCK_SH)
        prefix, line = python_of(archive, tmp_path)
    assert prefix == sys.prefix
    assert "its copy is damaged, and a job uses it" in line
    assert (copy / "pyvenv.cfg").exists()
    assert python_of(archive, tmp_path)[0] == str(copy)


def test_an_archive_that_changes_while_it_is_unpacked_is_not_used(environment, tmp_path):
    mine = Path(shutil.copytree(environment, tmp_path / "mine", symlinks=True))
    archive = tmp_path / "env.tar"
    (mine / "bin" / "conda-unpack").write_text(f"import os; os.utime({str(archive)!r}, (1, 1))")
    (mine / "bin" / "conda-unpack").chmod(0o755)
    prefix, line = python_of(packed(mine, archive), tmp_path)
    assert prefix == sys.prefix
    assert "it changed while it was unpacked" in line
    assert not [*(tmp_path / f"stoker-env-{os.getuid()}").glob("env-*[0-9]")]
