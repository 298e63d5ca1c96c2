"""`--at-once`, used by `make test-gpu`: results so far when a limit ends the session."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from launching import wait_until

pytestmark = pytest.mark.slow

STAND_INS = """
import time
from pathlib import Path
import pytest

def test_passes():
    pass

def test_fails():
    assert "this" == "that"

@pytest.mark.parametrize("number", range(6))
def test_hangs(number):
    Path(f"begun-{number}").touch()
    time.sleep(600)
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_a_limit_leaves_failures_names_and_a_report(workers, tmp_path):
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
    (tmp_path / "test_stand_ins.py").write_text(STAND_INS)
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(workers),
        "--dist", "worksteal", "--at-once", "--junitxml=report.xml",
    ]  # fmt: skip
    log = tmp_path / "log"
    with log.open("w") as output:
        session = subprocess.Popen(
            command, cwd=tmp_path, stdout=output, stderr=output, start_new_session=True
        )
    try:

        def hangs() -> bool:
            begun = len([*tmp_path.glob("begun-*")])
            failed = "FAILED test_stand_ins.py::test_fails (call, " in log.read_text()
            return failed and begun == (workers or 1)

        wait_until(hangs, "the session does not come to its hanging tests", log.read_text)
        assert "assert 'this' == 'that'" in log.read_text(), "printed when it happens"
        # Like timeout(1): send the signal to the process and then to its group.
        session.send_signal(signal.SIGINT)
        os.killpg(session.pid, signal.SIGINT)
        assert session.wait(120) == pytest.ExitCode.INTERRUPTED, log.read_text()
    finally:
        if session.poll() is None:
            os.killpg(session.pid, signal.SIGKILL)
    said = log.read_text()
    running, waiting = said.count("(running)"), said.count("(not begun)")
    assert (running, waiting) == ((workers or 1), 6 - (workers or 1)), said
    assert "UNFINISHED test_stand_ins.py::test_hangs[" in said
    (suite,) = ElementTree.parse(tmp_path / "report.xml").getroot()
    assert (suite.get("failures"), suite.get("errors")) == ("1", "0")
