"""What every test runs under: offline, no telemetry, few threads; tiny models and tokenizers."""

import logging
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["WANDB_MODE"] = "disabled"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--exhaustive`: every case of the proofs in tests/exactness, not a sample of them."""
    parser.addoption("--exhaustive", action="store_true", help="every case of tests/exactness")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, and count as deselected, what `--exhaustive` alone asks for."""
    if config.getoption("--exhaustive"):
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _restore_environment():
    """Undo what a test (or the code under test) changed in the environment and of signals."""
    before = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    signal.set_wakeup_fd(-1)  # a run in this process may have set all three
    for number, handler in handlers.items():
        signal.signal(number, handler)
    logging.captureWarnings(False)  # a run in this process turns it on
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 64 KiB and 16 inodes; skips, saying why, where none can be mounted."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=16", "none", str(directory)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)
