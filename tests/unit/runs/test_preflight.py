"""Storage is looked at before a run, on every host; refusals name host and remedy."""

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from utils.checkpoints.files import PROVENANCE, FileRecord, Manifest, write_manifest
from utils.config.errors import ConfigurationError, StorageError
from utils.launch.processes import LaunchFacts
from utils.planning.job import Saves
from utils.runs import preflight
from utils.runs.preflight import StorageNeeds, check_room, check_storage
from utils.support import collectives as decisions


def facts(rank: int = 0, hosts: tuple[str, ...] = ("n1",)) -> LaunchFacts:
    return LaunchFacts(rank, len(hosts), "ddp", hosts, "cpu")


MIB = 2**20
RUN = "run-1"


def needs(checkpoint_bytes: int = MIB, keep: int | None = 3, saves: int = 1) -> StorageNeeds:
    """A run that saves every 10 steps."""
    return StorageNeeds(checkpoint_bytes, Saves(10, 0, False, keep), 10 * saves)


@pytest.fixture(autouse=True)
def on_n1(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n1")


class Ranks:
    """All ranks of a launch as threads of this process, which gather through it.

    `seen` says where a rank finds the output directory.
    """

    def __init__(self, monkeypatch, hosts: tuple[str, ...]):
        self.hosts = hosts
        self.seen: dict[int, Path] = {}
        self.errors: dict[int, BaseException] = {}
        self.rank = threading.local()
        self.values: list[object] = [None] * len(hosts)
        self.barrier = threading.Barrier(len(hosts), timeout=30)
        monkeypatch.setattr(decisions, "gathered", self.gathered)
        monkeypatch.setattr(decisions, "_connected", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: self.rank.number)

    def gathered(self, value: object, group: object = None) -> list[object]:
        assert group is None
        self.values[self.rank.number] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values

    def run(self, output_dir: Path, checkpoint_bytes: int = 1000) -> None:
        def act(rank: int) -> None:
            self.rank.number = rank
            try:
                place = self.seen.get(rank, output_dir)
                check_storage(place, needs(checkpoint_bytes), facts(rank, self.hosts))
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


def test_hosts_that_agree_are_logged_in_one_line_and_nothing_stays(tmp_path, ranks, caplog):
    caplog.set_level(logging.INFO)
    run = tmp_path / "runs" / "x"
    check_storage(run, needs(5 * 2**20), facts())
    four = ranks("n1", "n1", "n2", "n2")
    four.run(run)
    assert four.errors == {}
    one, several = caplog.messages
    assert one.startswith(f"preflight: 1 host(s), 1 rank(s) can write to {run}, ")
    assert one.endswith("GiB free (1 checkpoint(s) of about 5.0 MiB needed)")
    assert f"preflight: 2 host(s), 4 rank(s) can write to {run}, " in several
    assert list(run.iterdir()) == []


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
    assert list((tmp_path / "x").iterdir()) == []


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
    with pytest.raises(StorageError):
        check_storage(tmp_path, needs(2**60), facts())
    assert tmp_path.is_dir(), "what was there stays"
    two = ranks("n1", "n2")
    two.run(tmp_path / "x", checkpoint_bytes=2**60)
    error = two.the_error()
    assert isinstance(error, StorageError)
    with pytest.raises(StorageError, match=r"n1: .*/x has [\d.,]+ GiB free, .* but 1 of "
                       r"about 1,073,741,824.0 GiB .* are missing. Make room"):  # fmt: skip
        raise error
    assert not (tmp_path / "x").exists(), "what was made is gone again"


def test_a_file_system_that_takes_no_file_is_refused_whatever_it_says(small_disk, monkeypatch):
    """A quota shows like this: room is free, but not for this user."""
    plenty = os.statvfs("/")
    monkeypatch.setattr(preflight.os, "statvfs", lambda _: plenty)
    with pytest.raises(StorageError, match=r"n1: .*cannot be written to \(No space left.*quota"):
        check_storage(small_disk / "x", needs(2**20), facts())


def test_a_disk_that_will_have_room_is_tried_with_what_fits_now(small_disk, monkeypatch):
    """The part of a killed save goes when the next one needs its room, not before."""
    monkeypatch.setattr(preflight, "RESERVE_BYTES", 0)
    (small_disk / PROVENANCE).write_text('{"run_id": "x", "starts": []}')
    part = small_disk / "checkpoint-10"
    part.mkdir()
    (part / "weights").write_bytes(bytes(40_000))
    check_storage(small_disk, needs(50_000), facts())
    assert {path.name for path in small_disk.iterdir()} == {PROVENANCE, part.name}


def test_a_directory_that_cannot_be_made_is_refused_on_all_ranks(ranks, tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(ConfigurationError, match="is a file: name a directory") as caught:
        check_storage(tmp_path / "x", needs(1), facts())
    assert caught.value.exit_code == 2
    two = ranks("n1", "n2")
    two.run(Path("/proc/nowhere/x"))
    with pytest.raises(StorageError, match=r"n1: --output_dir /proc/nowhere/x cannot be made \("):
        raise two.the_error()


def test_storage_that_hangs_or_fails_is_refused_on_all_ranks(tmp_path, ranks, monkeypatch):
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

    def fail(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(preflight.os, "statvfs", fail)
    two.errors = {}
    two.run(tmp_path / "x")
    with pytest.raises(StorageError, match=r"n1: the storage failed \(input/output error"):
        raise two.the_error()


@pytest.fixture
def free(monkeypatch):
    """Sets what is free, in checkpoints."""
    monkeypatch.setattr(preflight, "RESERVE_BYTES", 0)
    return lambda checkpoints: monkeypatch.setattr(
        preflight, "free_bytes", lambda _directory: int(checkpoints * MIB)
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run that was started."""
    (tmp_path / PROVENANCE).write_text(json.dumps({"run_id": RUN, "starts": []}))
    return tmp_path


def written(run: Path, name: str, size_bytes: int = MIB) -> Path:
    """A directory of one sparse file."""
    directory = run / name
    directory.mkdir()
    with (directory / "weights").open("wb") as file:
        file.truncate(size_bytes)
    return directory


def commit(run: Path, *steps: int, run_id: str = RUN, best: int | None = None) -> None:
    for step in steps:
        directory = written(run, f"checkpoint-{step}")
        state = {"best_model_checkpoint": best and f"{run}/checkpoint-{best}"}
        (directory / "trainer_state.json").write_text(json.dumps(state))
        files = {"weights": FileRecord(int(MIB / 1.02), "")}
        write_manifest(directory, Manifest(run_id, step, 0, 0, 1, "single", 8, {}, {}, "", files))


@pytest.mark.parametrize(
    ("keep", "saves", "most"),
    [(2, 10, 3), (3, 10, 3), (5, 10, 5), (5, 4, 4), (2, 1, 1), (2, 2, 2), (None, 10, 2)],
)
def test_a_new_run_needs_as_many_as_will_be_there_at_once(
    keep, saves, most, tmp_path, free, caplog, monkeypatch
):
    free(most)
    check_room(tmp_path, needs(MIB, keep, saves))
    warned = "10 of about 1.0 MiB will be there at once (save_total_limit null" in caplog.text
    assert warned == (keep is None), "without a limit the room for all is told, not demanded"
    monkeypatch.setattr(preflight, "RESERVE_BYTES", 1)  # for the notes of a next start
    with pytest.raises(StorageError, match=rf"but {most} of about 1.0 MiB .* are missing. Make"):
        check_room(tmp_path, needs(MIB, keep, saves))


@pytest.mark.parametrize(
    ("keep", "saved", "best", "free_checkpoints"),
    [
        (3, (10, 20), None, 1), (5, (10, 20), None, 1), (None, (10, 20), None, 1),
        # What rotation frees before the next save counts, but the best one and two others stay.
        (3, (10, 20, 30), None, 0), (4, (10, 20, 30), None, 1), (4, (10, 20, 30, 40), None, 0),
        (2, (10, 20), None, 1), (2, (10, 20, 30, 40), None, 0),
        (3, (10, 20, 30), 10, 1), (3, (10, 20, 30, 40), 10, 0),
    ],
)  # fmt: skip
def test_a_run_resumes_if_the_next_checkpoint_fits(keep, saved, best, free_checkpoints, run, free):
    commit(run, *saved, best=best)
    free(free_checkpoints + 0.01)
    check_room(run, needs(MIB, keep, 10))
    if free_checkpoints:
        free(0.99)
        with pytest.raises(StorageError, match="no checkpoint was touched"):
            check_room(run, needs(MIB, keep, 10))


@pytest.mark.parametrize(
    "name",
    ["checkpoint-30", "incomplete.checkpoint-10", "deleting.checkpoint-10",
     "deleting.incomplete.checkpoint-10", "resharded.checkpoint-20"],
)  # fmt: skip
def test_what_a_killed_start_left_counts(name, run, free):
    commit(run, 20)
    free(0.5)
    with pytest.raises(StorageError):
        check_room(run, needs(saves=10))
    written(run, name, MIB // 2)
    check_room(run, needs(saves=10))


def test_what_stays_counts_for_nothing(run, free):
    commit(run, 20)
    written(run, "damaged.checkpoint-10")
    written(run, "checkpoint-5-backup")
    commit(run, 30, run_id="run-2")
    free(0.5)
    with pytest.raises(StorageError):
        check_room(run, needs(saves=10))


def test_a_run_whose_last_checkpoint_is_there_needs_none(run, free):
    commit(run, 20)
    free(0)
    assert check_room(run, needs(saves=2)) == "0.0 KiB free (all checkpoints are there)"
    with pytest.raises(StorageError):
        check_room(run, needs(saves=3))


def test_later_checkpoints_that_will_not_fit_are_told(run, free, caplog):
    commit(run, 20)
    free(1)
    check_room(run, needs(MIB, 2, 10))
    assert "1.0 MiB free, 0.0 KiB more" in caplog.text
    assert "1.0 MiB are missing. The run will end with 74 when they are needed" in caplog.text
    caplog.clear()
    free(2)
    check_room(run, needs(MIB, 2, 10))
    assert not caplog.records
