"""Ctrl-C during `make demo`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# A command that takes a second to save after Ctrl-C.
SAVES = """
import pathlib, signal, sys, time
def save(*_):
    time.sleep(1)
    pathlib.Path("saved").touch()
    sys.exit(75)
signal.signal(signal.SIGINT, save)
pathlib.Path("ready").touch()
signal.pause()
"""
DEMO = f"""
import sys
from pathlib import Path
from examples import run_demo
run_demo.ROOT = Path.cwd()
run_demo.COMMANDS = {{"pretrain": ["-c", {SAVES!r}], "fine-tune": ["-c", "open('more', 'w')"]}}
sys.exit(run_demo.main())
"""


def test_ctrl_c_lets_the_command_save_and_ends_the_demo(tmp_path):
    demo = subprocess.Popen(
        [sys.executable, "-c", DEMO], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    while not (tmp_path / "ready").exists():
        assert demo.poll() is None
        time.sleep(0.05)
    os.killpg(demo.pid, signal.SIGINT)
    said, _ = demo.communicate()
    assert demo.returncode == 75
    assert (tmp_path / "saved").exists()
    assert "Traceback" not in said
    assert said.endswith("The demo continues from here with the same command\n")
    assert not (tmp_path / "more").exists()
