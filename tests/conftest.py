"""The setting of all tests: offline, no telemetry, few threads; options and fixtures."""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["WANDB_MODE"] = "disabled"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"  # several tests run at once

import pytest

LAST_LINES = 30  # lines of a failure that `--at-once` prints


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--exhaustive` (every case of the proofs, not a sample) and `--at-once` (see AtOnce)."""
    parser.addoption("--exhaustive", action="store_true", help="every case of the proofs")
    parser.addoption("--at-once", action="store_true", help="print each failure when it happens")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Turn `--at-once` on, in the process that prints."""
    config = session.config
    if config.getoption("--at-once") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(AtOnce(config))
        signal.signal(signal.SIGINT, interrupt_once)


def interrupt_once(*_: object) -> None:
    """End the session; a second INT, which timeout(1) sends, would cut its summary off."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


class AtOnce:
    """Prints each failure when it happens, and names the tests that an interruption cuts off."""

    def __init__(self, config: pytest.Config):
        self.terminal = config.pluginmanager.getplugin("terminalreporter")
        self.left: dict[str, str] = {}  # the phase of each test that has not ended

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.left |= {item.nodeid: "not begun" for item in session.items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.left |= {nodeid: "not begun" for nodeid in ids if nodeid not in self.left}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.left[nodeid] = "running"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.left[nodeid] = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            lines = [f"FAILED {report.nodeid} ({report.when}, {report.duration:.0f} s)"]
            self._print([*lines, *report.longreprtext.splitlines()[-LAST_LINES:]])

    def pytest_terminal_summary(self) -> None:
        self._print([f"UNFINISHED {name} ({how})" for name, how in self.left.items() if how])

    def _print(self, lines: list[str]) -> None:
        self.terminal.ensure_newline()
        for line in lines:
            self.terminal.write_line(line)
        self.terminal.flush()  # otherwise a pipe would buffer them until the end


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that only `--exhaustive` runs."""
    if config.getoption("--exhaustive"):
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _restore_environment():
    """Undo changes of environment and signals by a test or by the code under test."""
    before = dict(os.environ)
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    # run_script's time limit for a failed process would end these tests.
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer) and thread.function.__name__ == "leave_at_once":
            thread.cancel()
    signal.set_wakeup_fd(-1)  # a run in this process may have set all three
    for number, handler in handlers.items():
        signal.signal(number, handler)
    logging.captureWarnings(False)  # a run in this process turns it on
    if torch := sys.modules.get("torch"):
        torch.set_float32_matmul_precision("highest")  # a run on a CPU may have changed it
    os.environ.clear()
    os.environ.update(before)


class Disk:
    """A real file system in memory of a given size, mounted at `path`; `umount` ends it."""

    def __init__(self, path: Path, size_kib: int, files: int):
        self.path, self.size_kib, self.files = path, size_kib, files
        path.mkdir(parents=True)
        self._mount("-t", "tmpfs", "-o", self._size(), "none")

    def resize(self, size_kib: int, files: int) -> None:
        """Make the file system larger, or as small as its files allow."""
        self.size_kib, self.files = size_kib, files
        self._mount("-o", f"remount,{self._size()}")

    def umount(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)

    def _size(self) -> str:
        return f"size={self.size_kib}k,nr_inodes={self.files}"

    def _mount(self, *arguments: str) -> None:
        """Skip the test with the reason if no file system can be mounted."""
        command = ["mount", *arguments, str(self.path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    """Return a function that mounts file systems of `size_kib` and `files` for this test."""
    made: list[Disk] = []

    def mount(size_kib: int, files: int) -> Disk:
        made.append(Disk(tmp_path / f"disk-{len(made)}", size_kib, files))
        return made[-1]

    yield mount
    for disk in made:
        disk.umount()


@pytest.fixture
def small_disk(disks: Callable[..., Disk]) -> Path:
    """Mount a file system of 64 KiB and 16 inodes."""
    return disks(size_kib=64, files=16).path
