"""Storage is looked at before a run, on every host; refusals name host and remedy."""

import contextlib
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from utils.checkpoints import discovery
from utils.checkpoints.files import PROVENANCE, FileRecord, Manifest, write_manifest
from utils.config.errors import ConfigurationError, StorageError
from utils.launch.processes import LaunchFacts
from utils.planning.job import Saves
from utils.runs import preflight
from utils.runs.preflight import check_place, check_storage

MIB = 2**20
RUN = "run-1"


def check(output_dir: Path, checkpoint_bytes: int, rank: int = 0, hosts=("n1",)) -> None:
    plan = SimpleNamespace(checkpoint_bytes=checkpoint_bytes, total_steps=10)
    launch = LaunchFacts(rank, len(hosts), "ddp", hosts, "cpu")
    check_storage(output_dir, plan, Saves(10, 0, False, 3), launch)


@pytest.fixture(autouse=True)
def on_n1(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n1")


class Ranks:
    """Ranks of a launch, one after the other: the later ones while rank 0 looks for its mark.

    `seen` says where a rank finds the output directory.
    """

    def __init__(self, monkeypatch, *hosts: str):
        self.hosts = hosts
        self.seen: dict[int, Path] = {}
        self.problems: list[str] = []
        self.decided = None
        monkeypatch.setattr(preflight, "on_rank_0", self.on_rank_0)
        monkeypatch.setattr(preflight, "on_every_rank", self.on_every_rank)

    def run(self, output_dir: Path) -> None:
        self.rest = [
            (self.seen.get(rank, output_dir), 1000, rank, self.hosts)
            for rank in range(1, len(self.hosts))
        ]
        check(output_dir, 1000, 0, self.hosts)

    def on_rank_0(self, decide):
        self.decided = self.decided or decide()
        return self.decided

    def on_every_rank(self, probe):
        try:
            probe()
        except StorageError as error:
            self.problems += error.problems
        while self.rest:
            check(*self.rest.pop())


def test_hosts_that_agree_are_logged_in_one_line_and_nothing_stays(tmp_path, monkeypatch, caplog):
    """As with NFS one of them sees the directory late."""
    caplog.set_level("INFO")
    run, link = tmp_path / "runs" / "x", tmp_path / "link"
    four = Ranks(monkeypatch, "n1", "n1", "n2", "n2")
    four.seen = {2: link}
    late = threading.Timer(0.2, lambda: link.symlink_to(run))
    late.start()
    four.run(run)
    assert four.problems == []
    (line,) = caplog.messages
    assert line.startswith(f"preflight: 2 host(s), 4 rank(s) can write to {run}, ")
    assert line.endswith("GiB free (1 more checkpoint(s) needed)")
    assert list(run.iterdir()) == []


def test_a_host_that_does_not_see_the_directory_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "SIGHT_LIMIT_S", 0.2)
    monkeypatch.setattr(preflight, "host_name", lambda: "nX")
    three = Ranks(monkeypatch, "n1", "n2", "n3")
    three.seen = {1: tmp_path / "absent", 2: tmp_path}
    three.run(tmp_path / "x")
    for problem, path in zip(three.problems, (tmp_path, tmp_path / "absent"), strict=True):
        assert problem.startswith(f"nX: --output_dir {path} is not the directory that rank 0 made")
    assert list((tmp_path / "x").iterdir()) == []


def test_a_file_system_that_takes_no_file_is_refused_whatever_it_says(small_disk, monkeypatch):
    """A quota shows like this: room is free, but not for this user."""
    monkeypatch.setattr(discovery, "free_bytes", lambda _: 2**40)
    with contextlib.suppress(OSError):
        (small_disk / "full").write_bytes(bytes(2**20))
    with pytest.raises(StorageError, match=r"n1: .*cannot be written to \(No space left"):
        check(small_disk / "x", 2**20)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    (tmp_path / "x").write_text("")
    with pytest.raises(ConfigurationError, match="is a file: name a directory") as caught:
        check(tmp_path / "x", 1)
    assert caught.value.exit_code == 2
    monkeypatch.setattr(preflight.os, "access", lambda *_: False)
    with pytest.raises(StorageError, match=rf"n1: --output_dir {tmp_path}/y cannot be written to"):
        check(tmp_path / "y", 1)


@pytest.fixture
def free(monkeypatch):
    """Sets what is free, in checkpoints."""
    monkeypatch.setattr(discovery, "RESERVE_BYTES", 0)
    return lambda checkpoints: monkeypatch.setattr(
        discovery, "free_bytes", lambda _directory: int(checkpoints * MIB)
    )


def room(run: Path, keep: int | None, saves: int) -> str:
    """Check the room of a run that saves every 10 steps."""
    plan = SimpleNamespace(checkpoint_bytes=MIB, total_steps=10 * saves)
    return check_place(run, plan, Saves(10, 0, False, keep))


def commit(run: Path, *steps: int) -> None:
    for step in steps:
        directory = run / f"checkpoint-{step}"
        directory.mkdir()
        with (directory / "weights").open("wb") as file:
            file.truncate(MIB)  # sparse
        files = {"weights": FileRecord(int(MIB / 1.02), "")}
        write_manifest(directory, Manifest(RUN, 1, "single", 8, step=step, files=files))


def test_a_new_run_needs_as_many_as_will_be_there_at_once(tmp_path, free):
    for keep, saves, most in ((2, 10, 3), (5, 10, 5), (5, 4, 4), (2, 0, 1), (None, 10, 2)):
        free(most)
        room(tmp_path, keep, saves)
        free(most - 0.01)
        with pytest.raises(
            StorageError, match=rf"n1: {most} more .* of about 1.0 MiB.* are missing. Make room"
        ):
            room(tmp_path, keep, saves)


def test_a_run_resumes_if_the_next_checkpoint_fits(tmp_path, free):
    """What rotation frees before the next save counts, see test_discovery.py."""
    (tmp_path / PROVENANCE).write_text(json.dumps({"run_id": RUN, "starts": []}))
    commit(tmp_path, 10, 20)
    free(1.01)
    room(tmp_path, 3, 10)
    commit(tmp_path, 30)
    free(0.01)
    room(tmp_path, 3, 10)
    with pytest.raises(StorageError, match="no checkpoint was touched"):
        room(tmp_path, 4, 10)
    assert room(tmp_path, 4, 3).endswith(" free (all checkpoints are there)")
