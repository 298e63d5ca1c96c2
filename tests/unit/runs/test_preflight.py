"""Storage and clocks are looked at before a run, on every host; refusals name host and remedy."""

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from utils.checkpoints.manifest import PROVENANCE
from utils.checkpoints.space import Room
from utils.config.errors import ConfigurationError, StorageError, UnfitClusterError
from utils.launch.processes import LaunchFacts
from utils.planning.job import Saves
from utils.runs import preflight
from utils.runs import preflight as storage_room
from utils.runs.preflight import StorageNeeds, check_storage
from utils.support import collectives as decisions


def facts(rank: int = 0, hosts: tuple[str, ...] = ("n1",)) -> LaunchFacts:
    return LaunchFacts(rank, len(hosts), "ddp", hosts, "cpu")


def needs(checkpoint_bytes: int, ranks: int = 1) -> StorageNeeds:
    """Those of a run that saves once: see test_storage_room.py for all others."""
    return StorageNeeds(checkpoint_bytes, ranks, Saves(10, 0, False, False, 3), 10)


@pytest.fixture(autouse=True)
def on_n1(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n1")


class Ranks:
    """All ranks of a launch as threads of this process, which gather through it.

    `seen` says where a rank finds the output directory, `clock` how far its host's is ahead.
    """

    def __init__(self, monkeypatch, hosts: tuple[str, ...]):
        self.hosts = hosts
        self.seen: dict[int, Path] = {}
        self.clock: dict[int, float] = {}
        self.errors: dict[int, BaseException] = {}
        self.rank = threading.local()
        self.values: list[object] = [None] * len(hosts)
        self.barrier = threading.Barrier(len(hosts), timeout=30)
        for module in (decisions, preflight):
            monkeypatch.setattr(module, "gathered", self.gathered)
        monkeypatch.setattr(decisions, "_rank", lambda: self.rank.number)
        monkeypatch.setattr(preflight.time, "time", self.time)

    def gathered(self, value: object, group: object = None) -> list[object]:
        assert group is None
        self.values[self.rank.number] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values

    def time(self) -> float:
        return 1e9 + self.clock.get(getattr(self.rank, "number", 0), 0.0)

    def run(self, output_dir: Path, checkpoint_bytes: int = 1000) -> None:
        def act(rank: int) -> None:
            self.rank.number = rank
            try:
                place = self.seen.get(rank, output_dir)
                check_storage(
                    place, needs(checkpoint_bytes, len(self.hosts)), facts(rank, self.hosts)
                )
            except ConfigurationError as error:
                self.errors[rank] = error

        threads = [threading.Thread(target=act, args=(rank,)) for rank in range(len(self.hosts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads), "a rank hangs"

    def the_error(self) -> BaseException:
        """The one error that all ranks raise."""
        kinds = {(type(error), str(error)) for error in self.errors.values()}
        assert len(self.errors) == len(self.hosts)
        assert len(kinds) == 1, kinds
        return self.errors[0]


@pytest.fixture
def ranks(monkeypatch) -> Callable[..., Ranks]:
    return lambda *hosts: Ranks(monkeypatch, hosts)


def test_one_line_says_what_was_found_and_nothing_stays(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run = tmp_path / "runs" / "x"
    check_storage(run, needs(5 * 2**20), facts())
    [line] = caplog.messages
    assert line.startswith(f"preflight: 1 host, 1 rank, {run} on n1 can be written to, ")
    assert line.endswith("GiB free (the next checkpoint of this run takes about 6.0 MiB)")
    assert list(run.iterdir()) == []


def test_several_hosts_that_agree_are_said(tmp_path, ranks, caplog):
    caplog.set_level(logging.INFO)
    four = ranks("n1", "n1", "n2", "n2")
    four.clock = {2: 0.3, 3: 50.0}  # only the first rank of a host is asked
    four.run(tmp_path / "x")
    assert four.errors == {}
    [line] = caplog.messages
    assert f"preflight: 2 hosts, 4 ranks, {tmp_path / 'x'} is the same everywhere, " in line
    assert line.endswith(", clocks within 0.3 s")
    assert list((tmp_path / "x").iterdir()) == []


def test_a_host_that_does_not_see_the_directory_is_named(tmp_path, ranks, monkeypatch):
    monkeypatch.setattr(preflight, "SIGHT_LIMIT_S", 0.3)
    three = ranks("n1", "n2", "n3")
    monkeypatch.setattr(preflight, "host_name", lambda: "nX")
    three.seen = {1: tmp_path / "absent", 2: tmp_path}
    three.run(tmp_path / "x")
    error = three.the_error()
    assert isinstance(error, StorageError)
    assert error.problems[0].startswith(f"nX: --output_dir {tmp_path / 'absent'} is not there")
    assert error.problems[1].startswith(f"nX: --output_dir {tmp_path} is another directory here")
    assert "on storage that all nodes share" in error.problems[1]
    assert list(tmp_path.iterdir()) == [], "what was made is gone again"


def test_a_directory_that_shows_up_late_is_the_same_all_the_same(tmp_path, ranks):
    """As with NFS, whose clients look again after seconds."""
    link = tmp_path / "link"
    late = threading.Timer(0.5, lambda: link.symlink_to(tmp_path / "x"))
    two = ranks("n1", "n2")
    two.seen = {1: link}
    late.start()
    two.run(tmp_path / "x")
    assert two.errors == {}


def test_too_little_room_is_refused_with_the_figures(tmp_path, ranks):
    two = ranks("n1", "n2")
    two.run(tmp_path / "x", checkpoint_bytes=2**60)
    error = two.the_error()
    assert isinstance(error, StorageError)
    with pytest.raises(StorageError, match=r"n1: .*/x has [\d.,]+ GiB free, but the next .* "
                       r"takes about 1,073,741,824.0 GiB: .* are missing. Make room"):  # fmt: skip
        raise error
    assert not (tmp_path / "x").exists()


def test_a_file_system_that_takes_no_file_is_refused_whatever_it_says(small_disk, monkeypatch):
    """A quota shows like this: room is free, but not for this user."""
    plenty = os.statvfs("/")
    monkeypatch.setattr(preflight.os, "statvfs", lambda _: plenty)
    with pytest.raises(StorageError, match=r"n1: .*cannot be written to \(No space left.*quota"):
        check_storage(small_disk / "x", needs(2**20), facts())
    assert not (small_disk / "x").exists()


def test_a_disk_that_will_have_room_is_tried_with_what_fits_now(small_disk, monkeypatch):
    """The part of a killed save goes when the next one needs its room, not before."""
    monkeypatch.setattr(storage_room, "RESERVE", Room(0, 0))
    monkeypatch.setattr(storage_room, "estimated_room", lambda size_bytes, _: Room(size_bytes, 1))
    (small_disk / PROVENANCE).write_text('{"run_id": "x", "starts": []}')
    part = small_disk / "checkpoint-10"
    part.mkdir()
    (part / "weights").write_bytes(bytes(40_000))
    check_storage(small_disk, needs(50_000), facts())
    assert {path.name for path in small_disk.iterdir()} == {PROVENANCE, part.name}


def test_a_directory_that_cannot_be_made_is_refused_on_all_ranks(ranks):
    two = ranks("n1", "n2")
    two.run(Path("/proc/nowhere/x"))
    with pytest.raises(StorageError, match=r"n1: --output_dir /proc/nowhere/x cannot be made \(/"):
        raise two.the_error()


def test_a_file_of_that_name_is_the_commands_fault(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(ConfigurationError, match="is a file: name a directory") as caught:
        check_storage(tmp_path / "x", needs(1), facts())
    assert caught.value.exit_code == 2


def test_clocks_that_differ_are_said_and_far_apart_refused(tmp_path, ranks, caplog):
    two = ranks("n1", "n2")
    two.clock = {1: -12.0}
    two.run(tmp_path / "x")
    assert two.errors == {}
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage()[:54] for record in warnings] == [
        "the clock of n1 is 12.0 s ahead of that of n2: time li"
    ]
    two.clock = {1: 73.0}
    two.run(tmp_path / "x")
    error = two.the_error()
    assert isinstance(error, UnfitClusterError)
    with pytest.raises(UnfitClusterError, match=r"n2 is 73.0 s ahead of that of n1.*chronyc"):
        raise error


def test_storage_that_hangs_is_said_on_all_ranks(tmp_path, ranks, monkeypatch):
    monkeypatch.setattr(preflight, "STORAGE_LIMIT_S", 0.3)
    wake = threading.Event()
    monkeypatch.setattr(preflight.os, "listdir", lambda _: wake.wait(20))
    two = ranks("n1", "n2")
    begin = time.monotonic()
    two.run(tmp_path / "x")
    wake.set()
    with pytest.raises(StorageError, match=r"did not answer within 0.3 s: see whether `ls`"):
        raise two.the_error()
    assert time.monotonic() - begin < 5


def test_storage_that_fails_in_any_way_is_said_on_all_ranks(tmp_path, ranks, monkeypatch):
    def fail(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(preflight.os, "statvfs", fail)
    two = ranks("n1", "n2")
    two.run(tmp_path / "x")
    with pytest.raises(StorageError, match=r"n1: --output_dir cannot be looked at.*Input/output"):
        raise two.the_error()


def test_traces_of_a_start_that_was_killed_here_go(tmp_path):
    mark = tmp_path / ".stoker-preflight-0123"
    mark.touch()
    check_storage(tmp_path, needs(1), facts())
    assert list(tmp_path.iterdir()) == [mark], "it may be another start's of this very moment"
    os.utime(mark, (0, 0))
    check_storage(tmp_path, needs(1), facts())
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_was_there_stays_after_a_refusal(tmp_path):
    with pytest.raises(StorageError):
        check_storage(tmp_path, needs(2**60), facts())
    assert tmp_path.is_dir()
