"""A terminal shows a live view below the log. Log lines and output into a pipe do not change."""

import os
import pty
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import tiny
from launching import ROOT, quiet_environment

from utils.callbacks import live
from utils.callbacks.progress import Progress

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# A checkpoint's size varies with the digits of the times in its files.
TIMES = re.compile(
    r"\d\d:\d\d:\d\d|[\d,.]+ tokens/s.*| after \w+|[\d.]+ GiB free|[\d.]+ s\b|[\d.]+ KiB\b"
)


def on_terminal(argv: list[str], interrupt_at: str = "", **environment: str) -> tuple[int, str]:
    """Run pretrain.py on a new terminal; return its exit code and its output."""
    child, terminal = pty.fork()
    if not child:
        # A shell's background jobs ignore SIGINT, and their children inherit this.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        variables = quiet_environment({"TERM": "xterm", "COLUMNS": "120", **environment})
        os.execve(sys.executable, [sys.executable, str(ROOT / "pretrain.py"), *argv], variables)
    written, give_up_at = b"", time.monotonic() + 300  # enough for a busy machine
    while time.monotonic() < give_up_at:
        try:
            written += os.read(terminal, 65536)
        except OSError:  # the process ended
            break
        if interrupt_at and interrupt_at in written.decode(errors="replace"):
            os.write(terminal, b"\x03")
            interrupt_at, give_up_at = "", time.monotonic() + 60
    assert not interrupt_at, f"{interrupt_at} was never drawn:\n{written.decode()}"
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), written.decode()


def log_lines(shown: str) -> list[str]:
    """Return the log lines of a run, without parts that differ from run to run."""
    text = CONTROL.sub("\n", shown).replace("\r", "\n")
    lines = [line for line in text.split("\n") if re.match(r"\d\d:\d\d:\d\d  ", line)]
    lines = [re.sub(r"\s+", " ", TIMES.sub("", line)) for line in lines]
    return [line for line in lines if "measuring its" not in line]  # measured only once


@pytest.fixture(scope="module")
def command(pretraining, workspace, tmp_path_factory):
    """Return the command line of a run, always with the same directory name."""

    def argv(name, **changes):
        directory = tmp_path_factory.mktemp(name) / "run"
        evaluated = {"eval_data": f"heldout={workspace / 'heldout'}", "eval_steps": 60}
        steps = {"max_steps": 120, "save_steps": 60, "logging_steps": 20}
        return pretraining(directory, **(steps | evaluated | changes)), directory

    return argv


def test_the_live_view_disappears_and_the_log_is_complete(command):
    argv, directory = command("terminal")
    code, shown = on_terminal(argv)
    assert code == 0
    drawn = CONTROL.sub("", shown)
    assert "━" in drawn
    assert "█" in drawn, "losses"
    assert re.search(r"evaluating heldout \d+/\d+| training| saving", drawn)
    assert " finishing" in drawn, "until final/ is written"
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l"), "the cursor is shown"
    last = shown[shown.rindex("report: ") :]
    assert "━" not in last, "the end is the log's"
    argv, again = command("pipe")
    variables = quiet_environment({"TERM": "xterm", "FORCE_COLOR": "1"})
    words = [sys.executable, str(ROOT / "pretrain.py"), *argv]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=True)
    plain = done.stdout
    assert "━" not in plain + done.stderr
    assert "\x1b" not in plain
    same = log_lines(plain.replace(str(again), str(directory)))
    assert log_lines(shown) == same
    assert len(same) > 15
    assert tiny.losses(directory) == tiny.losses(again)


def test_an_interrupted_run_leaves_the_terminal_as_it_was(command):
    argv, _ = command("interrupted", max_steps=100_000, save_steps=100_000, eval_steps=100_000)
    code, shown = on_terminal(argv, interrupt_at="━")
    assert code == -2
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")
    assert "KeyboardInterrupt" in CONTROL.sub("", shown)
    assert "━" not in shown[shown.rindex("KeyboardInterrupt") + 200 :]


def test_a_dumb_terminal_gets_no_view_nor_does_who_turns_it_off(monkeypatch):
    terminal = SimpleNamespace(isatty=lambda: True, encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", terminal)
    for term, fits in {"xterm": True, "dumb": False}.items():
        monkeypatch.setenv("TERM", term)
        assert live.fits_terminal() == fits
    monkeypatch.setenv("TERM", "xterm")
    terminal.encoding = "ascii"
    assert not live.fits_terminal()
    terminal.encoding = "utf-8"
    for args in (
        {"disable_tqdm": True, "process_index": 0},
        {"disable_tqdm": None, "process_index": 1},
    ):
        view = live.LiveView(Progress(), lambda: None)
        view.on_train_begin(SimpleNamespace(**args), None)
        assert not hasattr(view, "state")
