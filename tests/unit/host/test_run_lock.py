"""One job per run directory, with real processes that race, end, die and are suspended."""

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from launching import ROOT

from utils.config.errors import ConfigurationError
from utils.host import run_lock
from utils.host.run_lock import (
    last_lost_lock_message,
    leave_run_lock,
    lost_lock_message,
    refuse_if_in_use,
    take_run_lock,
)

BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
HERE = {
    "token": "n", "host": "n1", "machine": f"{BOOT} {Path('/proc/self/ns/pid').readlink()}",
    "pid": os.getpid(),
    "job": None, "restart_count": 0, "since": "2026-01-01 00:00:00+00:00",
}  # fmt: skip
ELSEWHERE = HERE | {"host": "n9", "machine": "another boot", "pid": 4711}

# Takes the lock, then runs the lines that it reads; argv may name another machine.
HOLD = """
import os, pathlib, sys, time
from utils.host import run_lock
run_lock.BEAT_S = 0.05
output_dir, machine, end = pathlib.Path(sys.argv[1]), *sys.argv[2:]
if machine:
    pathlib.Path.readlink = lambda _: machine
run_lock.take_run_lock(output_dir)
print("taken", flush=True)
exec(end)
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(run_lock, "BEAT_S", 0.05)
    monkeypatch.setattr(run_lock, "WATCH_S", 60)  # long enough for a heartbeat on a slow machine
    monkeypatch.setattr(run_lock, "LOOK_S", 0.02)
    monkeypatch.setattr(run_lock, "_silent_owners", [])
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    yield
    for output_dir in list(run_lock._locks):
        leave_run_lock(output_dir)


@pytest.fixture
def _impatient(monkeypatch):
    """Shorten the watch, for tests without a living owner."""
    monkeypatch.setattr(run_lock, "WATCH_S", 0.1)


@pytest.fixture
def holder(tmp_path):
    """Return a function that starts a process with the lock of tmp_path; kill all at the end."""
    started = []

    def start(end: str = "time.sleep(60)", machine: str = "") -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path), machine, end],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout.readline() == "taken\n", process.stderr.read()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def owned_by(output_dir: Path, owner: dict, number: int = 1, beat: int = 0) -> Path:
    """Write the lock file that this owner would write."""
    folder = output_dir / run_lock.LOCK_FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"owner-{number}"
    draft = output_dir / f"draft-{number}"  # appears complete, like an owner's single write
    draft.write_text(json.dumps({"owner": owner, "beat": beat, "left": False}))
    return draft.rename(path)


def waits_to_take(output_dir: Path, caplog) -> bool:
    """Take the lock; return whether that waited for a heartbeat of the last owner."""
    caplog.clear()
    take_run_lock(output_dir)
    return "for its heartbeat" in caplog.text


def test_a_second_job_is_refused_and_told_whose_it_is(holder, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    process = holder()
    named = rf"{tmp_path} is in use by process {process.pid} on \S+ \(Slurm job 42\), since 20"
    for _ in range(2):  # a refusal changes nothing
        for take in (refuse_if_in_use, take_run_lock):
            with pytest.raises(ConfigurationError, match=rf"{named}.*touch \S+/STOP"):
                take(tmp_path)
    assert process.poll() is None
    assert lost_lock_message(tmp_path) is None, "what was never held cannot be lost"


def test_a_process_that_ends_leaves_the_lock(holder, tmp_path, caplog):
    """This also holds for a process on another machine. There its end could not be seen."""
    holder("sys.exit(3)", machine="another").wait()
    for _ in range(3):  # the same process may start again
        assert not waits_to_take(tmp_path, caplog)
        assert not caplog.records, "nothing to warn of"
    assert sum(thread.name == "run-lock" for thread in threading.enumerate()) == 1


def test_a_killed_process_is_known_to_be_gone_at_once(holder, tmp_path, caplog):
    process = holder()
    process.kill()
    process.wait()
    assert not waits_to_take(tmp_path, caplog)


@pytest.mark.usefixtures("_impatient")
def test_another_users_living_process_is_not_taken_for_gone(tmp_path, monkeypatch, caplog):
    owned_by(tmp_path, HERE)
    monkeypatch.setattr(os, "kill", mock.Mock(side_effect=PermissionError))
    assert waits_to_take(tmp_path, caplog)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("written", [True, False])
def test_an_owner_without_a_heartbeat_is_taken_over(written, tmp_path, caplog):
    """The owner's pid may belong to another process now, or the lock has no owner's name yet."""
    path = owned_by(tmp_path, HERE)
    named = f"process {os.getpid()} on n1, since 2026-01-01 00:00:00+00:00"
    if not written:
        path.write_bytes(b"")
        named = "a process that left no name"
    assert waits_to_take(tmp_path, caplog)
    assert f"belongs to {named}: waiting up to 0 s for its heartbeat" in caplog.text
    assert f"its last owner is gone ({named}" in caplog.text
    assert lost_lock_message(tmp_path) is None


def test_after_the_early_wait_for_a_killed_owner_elsewhere_the_lock_is_taken_at_once(
    tmp_path, monkeypatch, caplog
):
    path = owned_by(tmp_path, ELSEWHERE)
    os.utime(path, (time.time() + 60, time.time() + 60))  # its last heartbeat is new
    monkeypatch.setattr(run_lock, "WATCH_S", 0.1)
    refuse_if_in_use(tmp_path)
    assert "for its heartbeat, the last came" in caplog.text
    assert not waits_to_take(tmp_path, caplog)
    leave_run_lock(tmp_path)
    owned_by(tmp_path, ELSEWHERE | {"token": "other"}, number=3)
    assert waits_to_take(tmp_path, caplog), "another owner"


@pytest.mark.usefixtures("_impatient")
def test_a_requeued_job_takes_its_own_lock_at_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    for number, count in enumerate("12", 1):  # the start that left the lock, and the next one
        owned_by(tmp_path, ELSEWHERE | {"job": "42", "restart_count": 1}, number=2 * number)
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
        assert waits_to_take(tmp_path, caplog) == (count == "1")
    owned_by(tmp_path, ELSEWHERE | {"job": "42", "restart_count": 2, "token": "x"}, number=6)
    monkeypatch.setenv("STOKER_RESTART_IN_JOB", "1")
    assert not waits_to_take(tmp_path, caplog), "restarted inside the job"


def wait_for(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.01)


def test_the_heartbeat_logs_once_that_it_cannot_write_and_learns_of_a_loss(
    tmp_path, caplog, monkeypatch
):
    failures = []

    def full(*_args, **_options):
        failures.append(1)
        raise OSError(28, "No space left on device")

    take_run_lock(tmp_path)
    with monkeypatch.context() as disk:
        disk.setattr(run_lock.RunLock, "write", full)
        wait_for(lambda: len(failures) > 3)
    assert caplog.text.count(f"the lock of {tmp_path} cannot be renewed") == 1
    assert last_lost_lock_message(tmp_path) is None
    owned_by(tmp_path, ELSEWHERE, number=2)
    wait_for(lambda: last_lost_lock_message(tmp_path))
    assert "was taken over by process 4711 on n9" in last_lost_lock_message(tmp_path)
    leave_run_lock(tmp_path)
    assert last_lost_lock_message(tmp_path) is None


def test_others_wait_while_the_owner_lives(tmp_path):
    take_run_lock(tmp_path)
    waiting = threading.Thread(target=run_lock.wait_until_left, args=[tmp_path], daemon=True)
    waiting.start()
    lock = run_lock._locks[tmp_path]
    wait_for(lambda: lock.beats > 5)
    assert waiting.is_alive()
    leave_run_lock(tmp_path)
    waiting.join()


@pytest.mark.usefixtures("_impatient")
def test_others_do_not_wait_for_a_silent_owner(tmp_path):
    owned_by(tmp_path, ELSEWHERE)  # its heartbeat never changes
    run_lock.wait_until_left(tmp_path)


def test_a_removed_lock_is_lost(tmp_path):
    take_run_lock(tmp_path)
    (tmp_path / ".lock" / "owner-1").unlink()
    assert "was taken over" in lost_lock_message(tmp_path)
    owned_by(tmp_path, ELSEWHERE)  # another owner with the same number
    leave_run_lock(tmp_path)
    assert not json.loads((tmp_path / ".lock" / "owner-1").read_text())["left"], "it is not ours"


# Takes and releases the lock again and again. Each owner makes a link. The link must not exist
# before, unless the previous owner was killed. Sometimes the process waits long between looking at
# the lock and taking it.
RACER = """
import os, pathlib, random, sys, time
from utils.host import run_lock
from utils.config.errors import ConfigurationError
run_lock.BEAT_S, run_lock.WATCH_S, run_lock.LOOK_S = 0.05, 20.0, 0.001
output_dir, log = pathlib.Path(sys.argv[1]), open(sys.argv[2], "a", buffering=1)
inside, pid = output_dir / "inside", str(os.getpid())
wait = run_lock._wait_for_last_owner
def act_late(output_dir):
    number = wait(output_dir)
    time.sleep(random.choice([0, 0, 0.01, 0.1]) * random.random())
    return number
run_lock._wait_for_last_owner = act_late
print("ready", flush=True)
while True:
    try:
        run_lock.take_run_lock(output_dir)
    except ConfigurationError:
        time.sleep(random.random() * 0.01)
        continue
    try:
        os.symlink(pid, inside)
    except FileExistsError:
        other = os.readlink(inside)
        if pathlib.Path("/proc", other).exists():
            print("TWO INSIDE:", pid, other, sorted(os.listdir(output_dir / ".lock")), file=log)
            time.sleep(60)
        inside.unlink()
        os.symlink(pid, inside)
    time.sleep(random.random() * 0.01)
    lost = run_lock.lost_lock_message(output_dir)
    inside.unlink()
    print("LOST: " + lost if lost else "won", file=log)
    run_lock.leave_run_lock(output_dir)
"""


@pytest.mark.slow
def test_of_many_racing_processes_one_alone_gets_the_lock(tmp_path):
    """24 processes race for the lock; they are killed, some while they hold it, and replaced."""
    log = tmp_path / "log"
    log.touch()

    def start() -> subprocess.Popen:
        command = [sys.executable, "-c", RACER, str(tmp_path), str(log)]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def end(process: subprocess.Popen) -> None:
        process.kill()
        process.communicate()

    random = np.random.default_rng(0)
    racers = [start() for _ in range(24)]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for killed in range(24):
        wait_for(lambda: len(log.read_text().splitlines()) > killed)  # noqa: B023 - called at once
        time.sleep(random.random() * 0.2)
        # Half of the kills hit the owner, so all others find its lock dead at the same time.
        victim = None
        if random.random() < 0.5:
            with contextlib.suppress(OSError):
                inside = int((tmp_path / "inside").readlink().name)
                victim = next((racer for racer in racers if racer.pid == inside), None)
        victim = victim or racers[random.integers(len(racers))]
        racers.remove(victim)
        end(victim)
        racers.append(start())
    for racer in racers:
        end(racer)
    lines = log.read_text().splitlines()
    assert set(lines) == {"won"}
    taken = max(int(path.name.removeprefix("owner-")) for path in (tmp_path / ".lock").iterdir())
    assert len(lines) <= taken
