"""A terminal shows a live view below the log. Log lines and output into a pipe do not change."""

import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import tiny
from launching import ROOT, on_terminal, press_ctrl_c, quiet_environment

from utils.callbacks import journal
from utils.callbacks.progress import Progress
from utils.host.run_lock import BY_USER

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# A checkpoint's size varies with the digits of the times in its files.
TIMES = re.compile(
    r"\d\d:\d\d:\d\d|[\d,.]+ tokens/s.*| after \w+|[\d.]+ GiB free|[\d.]+ s\b|[\d.]+ KiB\b"
)


def pretrain(argv: list[str], *events: tuple[str, Callable[[int], None]]) -> tuple[int, str]:
    """Run pretrain.py on a new terminal; return its exit code and its output."""
    variables = quiet_environment({"TERM": "xterm", "COLUMNS": "120"})
    return on_terminal([sys.executable, ROOT / "pretrain.py", *argv], variables, *events)


def log_lines(shown: str) -> list[str]:
    """Return the log lines of a run, without parts that differ from run to run."""
    text = CONTROL.sub("\n", shown).replace("\r", "\n")
    lines = [line for line in text.split("\n") if re.match(r"\d\d:\d\d:\d\d  (?!pretrain)", line)]
    lines = [re.sub(r"\s+", " ", TIMES.sub("", line)) for line in lines]
    return [line for line in lines if "measuring its" not in line]  # measured only once


@pytest.mark.slow
def test_the_live_view_disappears_and_the_log_is_complete(pretraining, heldout, tmp_path):
    terminal, pipe = tmp_path / "terminal/run", tmp_path / "pipe/run"
    settings = heldout | {"max_steps": 120, "save_steps": 60, "eval_steps": 60, "logging_steps": 20}
    code, shown = pretrain(pretraining(terminal, **settings))
    assert code == 0
    drawn = CONTROL.sub("", shown)
    assert "━" in drawn
    assert "█" in drawn, "losses"
    assert re.search(r"evaluating heldout \d+/\d+| training| saving", drawn)
    assert " finishing" in drawn, "until final/ is written"
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l"), "the cursor is shown"
    last = shown[shown.rindex("report: ") :]
    assert "━" not in last, "the end is the log's"
    words = [sys.executable, str(ROOT / "pretrain.py"), *pretraining(pipe, **settings)]
    variables = quiet_environment({"TERM": "xterm", "FORCE_COLOR": "1"})
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=True)
    assert not {"━", "\x1b"} & {*done.stdout}
    assert "━" not in done.stderr
    same = log_lines(done.stdout.replace(str(pipe), str(terminal)))
    assert log_lines(shown) == same
    assert len(same) > 15
    assert tiny.losses(terminal) == tiny.losses(pipe)


@pytest.mark.slow
def test_an_interrupted_run_leaves_the_terminal_as_it_was(pretraining, tmp_path):
    argv = pretraining(tmp_path / "run", max_steps=20_000, save_steps=20_000)
    code, shown = pretrain(argv, ("━", press_ctrl_c))
    assert code in (75, 130), "the view may be drawn before the first step has ended"
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")
    assert "Traceback" not in shown
    last = BY_USER if code == 130 else "stopped at step"
    assert "━" not in shown[shown.rindex(last) :]


def test_a_dumb_terminal_gets_no_view_nor_does_who_turns_it_off(monkeypatch):
    terminal = SimpleNamespace(isatty=lambda: True, encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", terminal)
    for term, encoding, fits in (
        ("xterm", "utf-8", True), ("dumb", "utf-8", False), ("xterm", "ascii", False),
    ):  # fmt: skip
        monkeypatch.setenv("TERM", term)
        terminal.encoding = encoding
        assert journal.fits_terminal() == fits
    terminal.encoding = "utf-8"
    for disabled, rank in ((True, 0), (None, 1)):
        view = journal.LiveView(Progress(), None)
        view.on_train_begin(SimpleNamespace(disable_tqdm=disabled, process_index=rank), None)
        assert not hasattr(view, "state")
