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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--exhaustive` (every case of the proofs, not a sample) and `--at-once`."""
    parser.addoption("--exhaustive", action="store_true", help="every case of the proofs")
    parser.addoption("--at-once", action="store_true", help="print each failure when it happens")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Turn `--at-once` on, in the process that prints."""
    if session.config.getoption("--at-once") and not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(AtOnce(session.config))


class AtOnce:
    """Prints the last lines of each failure when it happens: a time limit may end the session."""

    def __init__(self, config: pytest.Config):
        self.terminal = config.pluginmanager.getplugin("terminalreporter")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.terminal.ensure_newline()
            self.terminal.write_line(f"FAILED {report.nodeid} ({report.when})")
            self.terminal.write_line("\n".join(report.longreprtext.splitlines()[-30:]))
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
