"""What SIGTERM and SIGUSR1 do, in processes of their own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from utils.launch import signals

ROOT = Path(__file__).parents[3]
START = """
import ctypes, os, signal, sys, time
from utils.launch import signals
signals.FILE_WITHIN_S = float(os.environ.get("WITHIN_S", "1"))
signals.install_stop_signals()
print("ready", flush=True)
"""
WAIT = """
for _ in range(100):
    if signals.stop_request():
        break
    time.sleep(0.05)
print(f"asked: {signals.stop_request()}", flush=True)
"""
# Blocked outside of the interpreter, as in a collective: no Python handler would ever run.
STUCK_IN_C = """
ends = os.pipe()
ctypes.CDLL(None).read(ends[0], ctypes.create_string_buffer(1), 1)
print("came back", flush=True)
"""


class Child:
    def __init__(self, program: str, node_dir: Path | None = None, within_s: float = 1.0):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "WITHIN_S": str(within_s)}
        environment.pop(signals.NODE_DIR, None)
        if node_dir is not None:
            environment[signals.NODE_DIR] = str(node_dir)
        self.process = subprocess.Popen(
            [sys.executable, "-c", START + program],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert self.process.stdout.readline() == "ready\n"

    def send(self, *numbers: int) -> None:
        for number in numbers:
            self.process.send_signal(number)

    def end(self, timeout_s: float = 15) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output


@pytest.fixture(autouse=True)
def _leave_no_process(monkeypatch):
    children = []
    start = Child.__init__

    def remembered(self, *args, **kwargs):
        children.append(self)
        start(self, *args, **kwargs)

    monkeypatch.setattr(Child, "__init__", remembered)
    yield
    for child in children:
        child.process.kill()
        child.process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_without_our_launcher_a_signal_asks_for_a_stop(number):
    child = Child(WAIT)
    child.send(number, number)
    assert child.end() == (0, f"asked: {number.name}\n")


@pytest.mark.slow
@pytest.mark.parametrize("program", [WAIT, STUCK_IN_C], ids=["waiting", "stuck in C"])
def test_a_sigterm_without_the_launchers_file_ends_the_process(program, tmp_path):
    """Its launcher is ending it because another rank failed."""
    child = Child(program, tmp_path)
    begin = time.monotonic()
    child.send(signal.SIGTERM)
    code, output = child.end()
    assert (code, output) == (143, "")
    assert 0.9 < time.monotonic() - begin < 4


@pytest.mark.slow
def test_a_sigterm_to_the_whole_job_is_a_request(tmp_path):
    """The launcher got it too and leaves its file a moment later."""
    child = Child(WAIT, tmp_path, within_s=3)
    child.send(signal.SIGTERM)
    time.sleep(0.5)
    (tmp_path / "STOP").write_text("SIGTERM, 300 s before the time limit\n")
    assert child.end() == (0, "asked: SIGTERM, 300 s before the time limit\n")


@pytest.mark.slow
def test_a_process_stuck_in_c_stays_where_the_job_is_to_stop(tmp_path):
    (tmp_path / "STOP").touch()
    child = Child(STUCK_IN_C, tmp_path, within_s=0.3)
    child.send(signal.SIGTERM, signal.SIGUSR1)
    with pytest.raises(subprocess.TimeoutExpired):
        child.end(timeout_s=1.5)


def test_the_launchers_file_is_a_request(tmp_path, monkeypatch):
    monkeypatch.setenv(signals.NODE_DIR, str(tmp_path))
    assert signals.stop_request() is None
    (tmp_path / "STOP").touch()
    assert signals.stop_request() == "a signal to the job"


LOADER = """
import numpy as np, torch
from utils.data.loader import eval_loader

class Rows:
    def __getitems__(self, rows):
        time.sleep(0.2)
        return list(rows)

loader = iter(eval_loader(Rows(), [[row] for row in range(9)], num_workers=1))
print(next(loader), loader._workers[0].pid, flush=True)
sys.stdin.readline()
print(list(loader), flush=True)
loader = iter(eval_loader(Rows(), [[row] for row in range(99)], num_workers=1))
next(loader)
loader._workers[0].terminate()
loader._workers[0].join(5)
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
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(int(worker), number)
        time.sleep(0.2)
        output, _ = process.communicate("\n", timeout=30)
    finally:
        process.kill()
        process.wait()
    assert output == f"{[[row] for row in range(1, 9)]}\n0\n"
