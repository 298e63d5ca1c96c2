"""Early stopping: an interrupted run ends at the same step, and is finished."""

import re
import shutil
from pathlib import Path

import pytest
import tiny
from provoked_runs import Provoke, assert_the_same, touch, trainer_state

from utils.config.errors import ExitCode

pytestmark = pytest.mark.slow

# The loss of the first split grows after step 2, so its third evaluation (at step 6) ends the run.
SETTINGS = {"learning_rate": 0.3, "warmup_steps": 6, "early_stopping_patience": 2}
LAST, FOLDERS = 6, ("final", "checkpoint-4", "checkpoint-6")


def assert_ended(run: Path, whole: Path) -> None:
    assert_the_same(run, whole, FOLDERS)
    assert sorted(path.name for path in run.glob("checkpoint-*")) == [
        "checkpoint-4",
        "checkpoint-6",
    ]
    assert max(tiny.evaluations(run, "second")) == LAST


def test_a_run_without_improvement_ends_at_the_same_step_after_any_interruption(
    start, uninterrupted, tmp_path, capsys
):
    whole = uninterrupted(**SETTINGS)
    shown = capsys.readouterr().out
    assert "early stopping after step 6: eval_first_loss was" in shown
    assert "finished at step 6 after " in shown
    assert re.search(
        r"the best evaluation \(.* at step 2\) has no checkpoint, so final/ holds", shown
    )
    assert trainer_state(whole, LAST)["stateful_callbacks"]["stoker"]["unimproved_evaluations"] == 2
    assert_ended(whole, whole)
    # A new start of the run does nothing, unless its patience is larger.
    assert start(whole, **SETTINGS) == ExitCode.DONE
    assert len(tiny.losses(whole)) == 2
    shown = capsys.readouterr().out
    assert "is finished: nothing is left to do" in shown
    for name, event, step, nth in (
        ("in an evaluation", "on_prediction_step", 4, 2),  # after the first split
        ("before an evaluation", "on_step_begin", 5, 1),  # before the last evaluation
        ("died before final", None, 0, 0),
        ("died before the last evaluation", None, 0, 0),
    ):
        run = tmp_path / name
        if event is None:
            shutil.copytree(whole, run, ignore=shutil.ignore_patterns(".lock"))
            tiny.cut(run, step=4 if "evaluation" in name else LAST)
        else:
            provoke = Provoke(event, step, touch("STOP"), nth)
            assert start(run, provoke, **SETTINGS) == ExitCode.STOPPED
        assert start(run, **SETTINGS) == ExitCode.DONE
        shown = capsys.readouterr().out
        assert re.search(r"finished at step 6(, resumed at step \d)? after ", shown), name
        assert_ended(run, whole)
    patient = SETTINGS | {"early_stopping_patience": 3}
    assert start(run, **patient) == ExitCode.DONE
    assert "finished at step 8, resumed at step 6 after " in capsys.readouterr().out
