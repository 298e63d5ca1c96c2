"""status.py on a real run: training, killed, refused, stopped, finished."""

import itertools
import re
import subprocess
import sys
import threading

import pytest
from launching import ROOT, quiet_environment, wait_until

import pretrain
from utils.host.run_lock import leave_run_lock
from utils.launch.script import run_script
from utils.observe.run_state import read_status

pytestmark = pytest.mark.slow


def stop_when_training(run):
    lines = run / "metrics.jsonl"
    wait_until(lambda: '"resumed"' in lines.read_text(), "did not resume")
    (run / "STOP").touch()


def test_a_run_is_shown_in_each_of_its_states(pretraining, workspace, tmp_path, monkeypatch):
    monkeypatch.setattr("utils.callbacks.stop.LOOK_INTERVAL_S", 0.0)
    run = tmp_path / "run"
    heldout = f"heldout={workspace / 'heldout'}"
    argv = pretraining(run, max_steps=200, save_steps=20, eval_data=heldout, eval_steps=20)
    process = subprocess.Popen(
        [sys.executable, "pretrain.py", *argv], cwd=ROOT, env=quiet_environment()
    )
    try:
        wait_until((run / "checkpoint-20" / "manifest.json").exists, "no checkpoint")
        status = read_status(run, {})
        assert (status.state, status.max_steps, status.starts) == ("running", 200, 1)
        phases = "starting|in its first step|training|saving|evaluating"
        assert re.fullmatch(rf"process {process.pid} on \S+, ({phases})", status.because)
        assert status.step >= 20
        assert status.tokens_per_s > 0
        assert 0 < status.left_s < 3600
    finally:
        process.kill()
        process.wait()
    status = read_status(run, {})
    assert (status.state, "is gone: killed" in status.error) == ("failed", True)
    assert status.saved_step >= 20
    assert status.saved_ago_s < 60
    assert status.advice.startswith("resume: python pretrain.py --sequence_length 64")

    # A process writes the cause of its end into its lock when it exits.
    assert run_script(lambda: pretrain.main([*argv, "--seed", "7"])) == 2
    leave_run_lock(run)
    status = read_status(run, {})
    assert (status.state, "is gone: killed" in status.error) == ("failed", True)
    assert status.refused.startswith("configuration error: ")
    assert "seed" in status.refused
    assert status.advice.startswith("resume: python pretrain.py --sequence_length 64")

    ask = threading.Timer(0.1, stop_when_training, [run])
    ask.start()
    assert pretrain.main(argv) == 75
    ask.join()
    status = read_status(run, {})
    assert (status.state, status.saved_step) == ("stopped", status.step)
    assert status.because == f"at step {status.step} with a checkpoint: {run}/STOP"

    phases = []
    monkeypatch.setattr("utils.callbacks.progress.note_phase", phases.append)
    assert pretrain.main(argv) == 0
    shown = [phase for phase, _ in itertools.groupby(phases)]
    assert shown[:3] == ["loading a checkpoint", "in its first step", "training"]
    assert {(one, next_one) for one, next_one in itertools.pairwise(shown[2:])} == {
        ("training", "evaluating"), ("evaluating", "saving"), ("saving", "training"),
        ("saving", "finishing"),
    }  # fmt: skip
    status = read_status(run, {})
    assert (status.state, status.step, status.saved_step) == ("finished", 200, 200)
    assert status.error is None
    upload = f"python -m utils.publish.hub {run} OWNER/NAME"
    assert status.advice == f"python chat.py {run}; upload: {upload}"
