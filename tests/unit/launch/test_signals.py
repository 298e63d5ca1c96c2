"""Effects of SIGTERM, SIGUSR1 and Ctrl-C on real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import ROOT

from utils.launch import signals

START = """
import ctypes, os, signal, sys, time
from utils.launch import signals
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
signals.FILE_WITHIN_S = float(os.environ.get("WITHIN_S", "1"))
signals.SAME_PRESS_S = 0
signals.install_stop_signals()
print("ready", flush=True)
"""
WAIT = """
while not signals.stop_request():
    time.sleep(0.05)
print(f"asked: {signals.stop_request()}", flush=True)
"""
# The main thread is blocked outside of the interpreter, as in a collective: no Python handler runs.
STUCK_IN_C = """
ends = os.pipe()
ctypes.CDLL(None).read(ends[0], ctypes.create_string_buffer(1), 1)
print("came back", flush=True)
"""


@pytest.fixture
def start():
    """Return a function that starts a process with its handlers installed; kill it at the end."""
    children = []

    def ready(program: str, node_dir: Path | None = None, within_s: float = 1.0):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "WITHIN_S": str(within_s)}
        environment[signals.NODE_DIR] = str(node_dir or "")
        child = subprocess.Popen(
            [sys.executable, "-c", START + program],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        children.append(child)
        assert child.stdout.readline() == "ready\n"
        return child

    yield ready
    for child in children:
        child.kill()
        child.wait()


def end(child: subprocess.Popen, timeout_s: float | None = None) -> tuple[int, str]:
    output, _ = child.communicate(timeout=timeout_s)
    return child.returncode, output


@pytest.mark.slow
def test_under_the_launcher_its_file_says_whether_a_sigterm_is_a_request(tmp_path, start):
    """Without the file, SIGTERM means that another rank failed: the process has to end."""
    children = [start(program, tmp_path) for program in (WAIT, STUCK_IN_C)]
    begin = time.monotonic()
    for child in children:
        child.send_signal(signal.SIGTERM)
    assert [end(child) for child in children] == [(143, ""), (143, "")]
    assert time.monotonic() - begin > 0.9
    child = start(WAIT, tmp_path, within_s=600)
    child.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    (tmp_path / "STOP").write_text("SIGTERM, 300 s before the time limit\n")
    assert end(child) == (0, "asked: SIGTERM, 300 s before the time limit\n")


@pytest.mark.slow
def test_a_process_stuck_in_c_stays_where_the_job_is_to_stop(tmp_path, start):
    (tmp_path / "STOP").touch()
    child = start(STUCK_IN_C, tmp_path, within_s=0.3)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        child.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        end(child, timeout_s=1)


TRAINING = "signals.enter_stage(signals.Stage.TRAINING)\nprint('trains', flush=True)\n"


@pytest.mark.slow
def test_ctrl_c_ends_a_process_at_once_if_there_is_nothing_to_save(start):
    """The thread ends the process also while the main thread is in a collective."""
    for program in (WAIT, STUCK_IN_C):
        child = start(program)
        child.send_signal(signal.SIGINT)
        starting = signals.Stage.STARTING.value
        assert end(child) == (130, f"\n{signals.BY_USER}, {starting}\n")


@pytest.mark.slow
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_first_ctrl_c_is_a_request_and_the_second_ends_at_once(start, second):
    """For the second one torchrun sends SIGTERM."""
    child = start(TRAINING + WAIT)
    assert child.stdout.readline() == "trains\n"
    child.send_signal(signal.SIGINT)
    assert end(child) == (0, f"\n{signals.SAVING}\nasked: Ctrl-C\n")
    child = start(TRAINING + STUCK_IN_C)
    assert child.stdout.readline() == "trains\n"
    child.send_signal(signal.SIGINT)
    assert [child.stdout.readline() for _ in range(2)] == ["\n", f"{signals.SAVING}\n"]
    child.send_signal(second)
    training = signals.Stage.TRAINING.value
    assert end(child) == (130, f"\n{signals.BY_USER}, {training}\n")


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_signals_of_one_press_count_once(monkeypatch, second):
    """`timeout` sends SIGINT to the process and to its group; torchrun answers by SIGTERM."""
    state, ended = signals.SignalState(signals.Stage.TRAINING), []
    monkeypatch.setattr(signals, "signal_state", state)
    monkeypatch.setattr(signals, "_end_interrupted", lambda: ended.append(True))
    monkeypatch.setattr(signals, "_announce_save", lambda: None)
    signals._handle_signals({signal.SIGINT}, 100.0)
    for now in (100.0, 100.1, 100.35):  # the gaps count, so a key that is held down is one press
        signals._handle_signals({second}, now)
    assert (state.requested, ended) == ("Ctrl-C", [])
    signals._handle_signals({second}, 101.0)
    assert ended == [True]


def test_a_child_that_ends_is_no_request(monkeypatch):
    """A loader with workers has a handler for SIGCHLD, so the pipe gets this signal."""
    monkeypatch.setattr(signals, "signal_state", signals.SignalState(signals.Stage.TRAINING))
    signals._handle_signals({signal.SIGCHLD}, 100.0)
    assert signals.stop_request() is None
    signals._handle_signals({signal.SIGCHLD, signal.SIGUSR1}, 100.0)
    assert signals.stop_request() == "SIGUSR1"


AT_THE_START = """
import os, runpy, signal, sys, time
from utils.launch.entry import start

def main():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        os.kill(os.getpid(), signal.SIGINT)  # of the same press
        print("cleans up", flush=True)
        time.sleep(0.4)
        os.kill(os.getpid(), signal.SIGINT)
        print("came here", flush=True)

class Press:
    def find_spec(name, *_):
        if name in ("utils.launch.script", "utils.launch.caches"):
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
if sys.argv[1] != "main":
    sys.meta_path.insert(0, Press)
if sys.argv[1] == "import of the launcher":
    runpy.run_module("utils.launch.node", run_name="__main__")
sys.exit(start(main))
"""


@pytest.mark.slow
def test_ctrl_c_at_the_start_of_a_script_shows_no_traceback():
    """While the script imports nothing is shown. The second press does not wait for the end."""
    silent = (-signal.SIGINT, "")
    for moment, ending in (
        ("import of a script", silent),
        ("import of the launcher", silent),
        ("main", (130, "cleans up\n")),
    ):
        done = subprocess.run(
            [sys.executable, "-c", AT_THE_START, moment],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == ending, moment


@pytest.mark.slow
def test_ctrl_c_after_another_request_ends_at_once(start):
    child = start(TRAINING + STUCK_IN_C)
    assert child.stdout.readline() == "trains\n"
    child.send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    child.send_signal(signal.SIGINT)
    assert end(child)[0] == 130


@pytest.mark.slow
def test_under_the_launcher_its_files_carry_both(tmp_path, start):
    child = start(TRAINING + STUCK_IN_C, tmp_path)
    assert child.stdout.readline() == "trains\n"
    assert signals.stage_of_node(tmp_path) is signals.Stage.TRAINING
    child.send_signal(signal.SIGINT)  # the terminal sends it to all processes
    (tmp_path / "STOP").touch()
    (tmp_path / "INTERRUPTED").touch()
    child.send_signal(signal.SIGTERM)
    assert end(child) == (130, ""), "the launcher says it"
    assert signals.stage_of_node(tmp_path / "none") is signals.Stage.STARTING


LOADER = """
import numpy as np, torch
from utils.data.loader import packed_loader

class Rows:
    def __getitems__(self, rows):
        time.sleep(0.2)
        return {"rows": list(rows)}

loader = iter(packed_loader(Rows(), [[row] for row in range(9)], num_workers=1))
print(next(loader)["rows"], loader._workers[0].pid, flush=True)
sys.stdin.readline()
print([batch["rows"] for batch in loader], flush=True)
loader = iter(packed_loader(Rows(), [[row] for row in range(99)], num_workers=1))
next(loader)
loader._workers[0].terminate()
loader._workers[0].join()
print(loader._workers[0].exitcode, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_loader_process_outlives_a_signal_to_the_job_but_obeys_its_owner():
    process = subprocess.Popen(
        [sys.executable, "-c", "import os, sys, time\n" + LOADER],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        first, worker = process.stdout.readline().rsplit(" ", 1)
        assert first == "[0]"
        time.sleep(0.5)
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            os.kill(int(worker), number)
        time.sleep(0.2)
        output, _ = process.communicate("\n")
    finally:
        process.kill()
        process.wait()
    assert output == f"{[[row] for row in range(1, 9)]}\n0\n"


@pytest.mark.parametrize("then", [1, 2**22 + 1], ids=["dead", "dying"])
def test_a_rank_ends_if_its_launcher_dies_while_the_rank_looks_for_it(monkeypatch, then):
    """A dying launcher is still the parent, but has no command line. Neither has a dead one."""
    parents = iter([2**22 + 1, then])
    killed = []
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(os, "kill", lambda *sent: killed.append(sent))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run of torchrun")
    monkeypatch.delenv(signals.LAUNCHER_PID, raising=False)
    signals.end_with_launcher()
    assert killed == [(os.getpid(), signal.SIGKILL)]
