"""`--at-once`, used by `make test-gpu`: failures are printed before a limit ends the session."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from launching import wait_until

STAND_INS = """
import time

def test_fails():
    assert "this" == "that"

def test_hangs():
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_limit_leaves_failures_and_a_report(workers, tmp_path):
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
    (tmp_path / "test_stand_ins.py").write_text(STAND_INS)
    log, command = tmp_path / "log", [sys.executable, "-m", "pytest", "-q", "-n", workers]
    command += ["-p", "no:cacheprovider", "--at-once", "--junitxml=report.xml"]
    with log.open("w") as output:
        session = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=output)
    wait_until(lambda: "assert 'this' == 'that'" in log.read_text(), "no failure", log.read_text)
    session.send_signal(signal.SIGINT)  # as `timeout --foreground` does
    assert session.wait(120) == pytest.ExitCode.INTERRUPTED, log.read_text()
    (suite,) = ElementTree.parse(tmp_path / "report.xml").getroot()
    assert (suite.get("failures"), suite.get("errors")) == ("1", "0")
