"""status.py on a real run: training, killed, refused, stopped, finished."""

import itertools
import os
import re
import signal
import time

import pytest
from launching import wait_until
from provoked_runs import Provoke, touch

from utils.host import run_lock
from utils.launch.script import run_script
from utils.observe.run_state import read_status

pytestmark = pytest.mark.slow

STEPS = {
    "max_steps": 40, "save_steps": 10, "eval_steps": 10, "load_best_model_at_end": "false",
}  # fmt: skip


def test_a_run_is_shown_in_each_of_its_states(start, tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT_S", 0.1)  # the phase is in each heartbeat
    run = tmp_path / "run"
    child = os.fork()
    if child == 0:
        try:
            start(run, Provoke("on_step_begin", 15, lambda _: time.sleep(3600)), **STEPS)
        finally:
            os._exit(99)
    try:
        wait_until((run / "checkpoint-10" / "manifest.json").exists, "no checkpoint")
        wait_until(lambda: read_status(run, {}).because.endswith("training"), "no phase")
        status = read_status(run, {})
        assert (status.state, status.max_steps, status.starts) == ("running", 40, 1)
        assert re.fullmatch(rf"process {child} on \S+, training", status.because)
        assert 10 <= status.step <= 15
        assert status.tokens_per_s > 0
        assert status.left_s > 0
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    status = read_status(run, {})
    assert (status.state, "is gone: killed" in status.error) == ("failed", True)
    assert status.saved_step == 10
    assert status.saved_ago_s >= 0
    assert status.advice.startswith("resume: python ")

    # A process writes the cause of its end into its lock when it exits.
    assert run_script(lambda: start(run, seed=7, **STEPS)) == 2
    run_lock.leave_run_lock(run)
    status = read_status(run, {})
    assert (status.state, "is gone: killed" in status.error) == ("failed", True)
    assert status.refused.startswith("configuration error: ")
    assert "seed" in status.refused

    assert start(run, Provoke("on_step_begin", 24, touch("STOP")), **STEPS) == 75
    status = read_status(run, {})
    assert (status.state, status.step, status.saved_step) == ("stopped", 25, 25)
    assert status.because == "at step 25 with a checkpoint"

    phases = []
    monkeypatch.setattr("utils.callbacks.progress.note_phase", phases.append)
    assert start(run, **STEPS) == 0
    shown = [phase for phase, _ in itertools.groupby(phases)]
    assert shown[:3] == ["loading a checkpoint", "in its first step", "training"]
    assert {(one, next_one) for one, next_one in itertools.pairwise(shown[2:])} == {
        ("training", "evaluating"), ("evaluating", "saving"), ("saving", "training"),
        ("saving", "finishing"),
    }  # fmt: skip
    status = read_status(run, {})
    assert (status.state, status.step, status.saved_step) == ("finished", 40, 40)
    assert (status.advice, status.error) == (f"python chat.py {run}", None)
