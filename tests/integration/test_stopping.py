"""A run that is stopped anywhere, by anything, resumes to the uninterrupted run, bit for bit."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import tiny
import torch
from accelerate import Accelerator
from launching import CPU_ENVIRONMENT, run_processes, start_processes, wait_until
from provoked_runs import (
    STEPS,
    Provoke,
    assert_the_same,
    assert_the_same_end,
    let_the_time_run_out,
    send,
    touch,
    trainer_state,
)

from utils.config.errors import ConfigurationError, ExitCode, NoProgressError
from utils.host.journal_file import read_journal

pytestmark = pytest.mark.slow

# Event, step, action, the step after which the run stops, and the logged reason.
STOPS = {
    "signals": ("on_step_begin", 4, send(signal.SIGUSR1, signal.SIGTERM), 5, "SIGUSR1"),
    "time limit": ("on_step_begin", 4, let_the_time_run_out, 5, "the time limit ends in "),
    "between micro-batches": ("on_substep_end", 4, touch("STOP"), 5, "{run}/STOP"),
    "an evaluation and a save due": ("on_step_begin", 3, touch("STOP"), 4, "{run}/STOP"),
    "before the first step": ("on_train_begin", 0, touch("STOP"), 1, "{run}/STOP"),
}


@pytest.mark.parametrize("cause", STOPS)
def test_a_stopped_run_resumes_as_if_it_had_not_been(
    cause, start, uninterrupted, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 3600))
    event, step, action, at, reason = STOPS[cause]
    run, whole = tmp_path / "run", uninterrupted()
    capsys.readouterr()
    assert start(run, Provoke(event, step, action)) == ExitCode.STOPPED
    shown = capsys.readouterr().out
    assert shown.count("stopping after") == 1
    assert f"stopping after step {at}: {reason.format(run=run)}" in shown
    assert f"stopped at step {at} of 8 with {run}/checkpoint-{at}\n" in shown
    assert "  next: resume: python " in shown.splitlines()[-1]
    assert "time limit: ends at" in shown
    assert (run / f"checkpoint-{at}").is_dir()
    assert not (run / "STOP").exists()
    assert not (run / "final").exists()
    assert read_journal(run / "metrics.jsonl")[-1]["event"] == "stopped"
    assert start(run) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert f"resuming from {run}/checkpoint-{at}" in shown
    assert ("the stop came before it" in shown) == (at % 2 == 0)
    assert_the_same_end(run, whole)


def test_at_max_gpu_hours_a_run_ends_without_a_model_and_a_larger_value_continues(
    start, uninterrupted, tmp_path, capsys
):
    run, whole = tmp_path / "run", uninterrupted()
    capsys.readouterr()
    assert start(run, max_gpu_hours=1e-6) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert "stopping after step 1: max_gpu_hours ends in 0 s" in shown
    assert f"stopped at step 1 of 8 with {run}/checkpoint-1\n" in shown
    assert "  next: resume with a larger --max_gpu_hours: python " in shown.splitlines()[-1]
    assert not (run / "final").exists()
    for dry_run in ("true", "false"):
        with pytest.raises(ConfigurationError, match=r"process-hours.*give a larger --max_gpu_h"):
            start(run, max_gpu_hours=1e-6, dry_run=dry_run)
    assert start(run, max_gpu_hours=1000) == ExitCode.DONE
    assert "max_gpu_hours: 1e-06 -> 1000" in capsys.readouterr().out
    assert_the_same_end(run, whole)
    assert start(run, max_gpu_hours=1e-6) == ExitCode.DONE, "nothing is left to do"


@pytest.mark.parametrize(("step", "batch"), [(4, 6), (8, 2)])
def test_an_evaluation_broken_off_is_done_first_by_the_resumed_run(
    step, batch, start, uninterrupted, tmp_path, capsys
):
    """The stop comes in the second split at a saved step, or in the first one at the last step."""
    run, whole = tmp_path / "run", uninterrupted()
    provoke = Provoke("on_prediction_step", step, touch("STOP"), nth=batch)
    assert start(run, provoke) == ExitCode.STOPPED
    assert f"stopping after a part of the evaluation at step {step}" in capsys.readouterr().out
    state = trainer_state(run, step)
    assert not [entry for entry in state["log_history"] if "eval_first_loss" in entry][
        step // 2 - 1 :
    ]
    assert start(run) == ExitCode.DONE
    assert_the_same(run, whole)
    if step < STEPS:  # the last checkpoint is written before its evaluation
        assert_the_same_end(run, whole)


def test_a_job_that_comes_to_nothing_three_times_is_not_started_again(
    start, uninterrupted, tmp_path, monkeypatch, capsys
):
    run, settings = tmp_path / "run", {"eval_on_start": "true"}
    whole = uninterrupted(**settings)
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 3600))
    for count in range(3):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(count))
        capsys.readouterr()
        provoke = Provoke("on_prediction_step", 0, touch("STOP"), nth=2)
        assert start(run, provoke, **settings) == ExitCode.STOPPED
        shown = capsys.readouterr().out
        assert "stopped at step 0 of 8 before there was anything to save" in shown
        assert not list(run.glob("checkpoint-*"))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    with pytest.raises(NoProgressError, match="job 42 began 3 times at step 0"):
        start(run, **settings)
    assert len(tiny.starts(run)) == 3
    monkeypatch.setenv("SLURM_JOB_ID", "43")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert start(run, **settings) == ExitCode.DONE
    assert_the_same(run, whole)


def test_a_stop_at_the_last_step_with_nothing_left_is_none(start, tmp_path, capsys):
    run = tmp_path / "run"
    assert start(run, Provoke("on_step_begin", STEPS - 1, touch("STOP")), eval_delay=100) == 0
    assert "finishing, not stopping: step 8 is the last" in capsys.readouterr().out
    assert not (run / "STOP").exists()
    assert (run / "final").is_dir()


@pytest.mark.parametrize(
    ("event", "step", "nth", "saved"), [("on_step_begin", 4, 1, 5), ("on_prediction_step", 6, 2, 6)]
)
def test_save_writes_a_checkpoint_and_the_run_continues(
    event, step, nth, saved, start, uninterrupted, tmp_path, capsys
):
    """The save comes at once, or after a running evaluation."""
    run = tmp_path / "run"
    assert start(run, Provoke(event, step, touch("SAVE"), nth)) == ExitCode.DONE
    assert f"saving at step {saved}, then continuing: {run}/SAVE" in capsys.readouterr().out
    history = trainer_state(run, saved)["log_history"]
    evaluated = {entry["step"] for entry in history if "eval_second_loss" in entry}
    assert (6 in evaluated) == (saved == 6)
    assert not (run / "SAVE").exists()
    assert {path.name for path in run.glob("checkpoint-*")} == {
        f"checkpoint-{at}" for at in (4, saved, STEPS)
    }
    assert_the_same(run, uninterrupted())


def test_the_best_model_is_the_uninterrupted_runs(start, uninterrupted, tmp_path):
    """The model gets worse after step 2. Only the stop saved a checkpoint at that step."""
    settings = {"learning_rate": 0.3, "warmup_steps": 6, "save_total_limit": 2}
    run, whole = tmp_path / "run", uninterrupted(**settings)
    losses = tiny.evaluations(whole, "first")
    assert min(losses, key=losses.__getitem__) == 2
    for step in (1, 6):
        provoke = Provoke("on_step_begin", step, touch("STOP"))
        assert start(run, provoke, **settings) == ExitCode.STOPPED
    assert (run / "checkpoint-7").is_dir(), "the checkpoint to resume from"
    assert start(run, **settings) == ExitCode.DONE
    assert_the_same(run, whole, ["final"])


def test_the_learning_rate_follows_owed_evaluations(start, uninterrupted, tmp_path):
    settings = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": '{"patience": 0, "factor": 0.5}',
        "learning_rate": 2.0,
        "logging_steps": 1,
    }
    run, whole = tmp_path / "run", uninterrupted(**settings)
    rates = tiny.figures(whole, "learning_rate").tolist()
    assert rates[6] < rates[0], "the evaluation at step 6 lowers it"
    for step, nth in ((2, 3), (6, 3), (6, 6)):  # the last stop interrupts the repeated evaluation
        provoke = Provoke("on_prediction_step", step, touch("STOP"), nth)
        assert start(run, provoke, **settings) == ExitCode.STOPPED
    assert start(run, **settings) == ExitCode.DONE
    assert_the_same_end(run, whole)
    assert tiny.figures(run, "learning_rate").tolist() == rates


def test_an_evaluation_due_at_the_last_step_is_owed_too(start, uninterrupted, tmp_path, capsys):
    """The next start does this evaluation. It also removes old STOP and SAVE files."""
    run = tmp_path / "run"
    assert start(run, Provoke("on_step_begin", STEPS - 1, touch("STOP"))) == ExitCode.STOPPED
    shown = capsys.readouterr().out
    assert f"stopped at step 8 of 8 with {run}/checkpoint-8" in shown
    assert "finishing, not stopping" not in shown
    for name in ("STOP", "SAVE"):
        (run / name).touch()
    assert start(run) == ExitCode.DONE
    shown = capsys.readouterr().out
    for name in ("STOP", "SAVE"):
        assert f"WARNING  removed {run}/{name}: it is older than this start" in shown
        assert not (run / name).exists()
    assert_the_same(run, uninterrupted())


def test_a_resumed_run_scales_losses_as_the_uninterrupted_one(start, tmp_path, monkeypatch):
    """accelerate scales losses for float16 on a GPU. This test uses torch's scaler for CPUs."""
    make = Accelerator.__init__

    def with_a_scaler(accelerator, *args, **kwargs):
        make(accelerator, *args, **kwargs)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)

    monkeypatch.setattr(Accelerator, "__init__", with_a_scaler)
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert start(whole) == ExitCode.DONE
    assert start(run, Provoke("on_step_begin", 4, touch("STOP"))) == ExitCode.STOPPED
    assert start(run) == ExitCode.DONE
    assert_the_same(run, whole)
    resumed, expected = (
        torch.load(folder / f"checkpoint-{STEPS}/scaler.pt", weights_only=True)
        for folder in (run, whole)
    )
    assert resumed == expected
    assert (expected["scale"], expected["_growth_tracker"]) == (4.0 * 2**2, STEPS % 3)


def test_two_ranks_of_which_one_is_signalled_stop_at_one_step(pretraining, workspace, tmp_path):
    settings = {"eval_data": f"first={workspace / 'heldout'}", "eval_strategy": "steps"}
    settings |= {"eval_steps": 2, "max_steps": STEPS}
    whole, run = tmp_path / "whole", tmp_path / "run"
    done = run_processes("multi_gpu", "pretrain.py", pretraining(whole, **settings))
    assert done.returncode == 0, done.stdout
    slow = {**CPU_ENVIRONMENT["multi_gpu"], "STOKER_TEST_STEP_DELAY_S": "0.5"}
    argv = pretraining(run, **settings)
    ranks = start_processes("multi_gpu", "pretrain.py", argv, env=slow)
    wait_until((run / "metrics.jsonl").exists, "the run does not start")
    os.kill(ranks.processes[1].pid, signal.SIGTERM)
    done = ranks.wait(timeout_s=120)
    assert ": a signal to rank" in done.stdout, done.stdout
    at = int(done.stdout.split("stopped at step ")[-1].split(" ")[0])
    assert done.codes == (75, 75), "both leave with it, neither was killed"
    done = run_processes("multi_gpu", "pretrain.py", argv)
    assert done.returncode == 0, done.stdout
    assert f"resuming from {run}/checkpoint-{at}" in done.stdout
    tiny.assert_same_run(run, whole)
    assert tiny.evaluations(run, "first") == tiny.evaluations(whole, "first")


# The loss of the first split grows after step 2, so its third evaluation (at step 6) ends the run.
OVERFITTING = {"learning_rate": 0.3, "warmup_steps": 6, "early_stopping_patience": 2}
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
    whole = uninterrupted(**OVERFITTING)
    shown = capsys.readouterr().out
    assert "early stopping after step 6: eval_first_loss was" in shown
    assert "finished at step 6 after " in shown
    assert re.search(
        r"the best evaluation \(.* at step 2\) has no checkpoint, so final/ holds", shown
    )
    assert trainer_state(whole, LAST)["stateful_callbacks"]["stoker"]["unimproved_evaluations"] == 2
    assert_ended(whole, whole)
    # A new start of the run does nothing, unless its patience is larger.
    assert start(whole, **OVERFITTING) == ExitCode.DONE
    assert len(tiny.losses(whole)) == 2
    shown = capsys.readouterr().out
    assert "is finished: nothing is left to do" in shown
    for name, event, step, nth in (
        ("in an evaluation", "on_prediction_step", 4, 2),  # after the first split
        ("before an evaluation", "on_step_begin", 5, 1),  # before the last evaluation
        ("died before final", None, LAST, 0),
        ("died before the last evaluation", None, 4, 0),
    ):
        run = tmp_path / name
        if event is None:
            tiny.copied(whole, run, step)
        else:
            provoke = Provoke(event, step, touch("STOP"), nth)
            assert start(run, provoke, **OVERFITTING) == ExitCode.STOPPED
        assert start(run, **OVERFITTING) == ExitCode.DONE
        shown = capsys.readouterr().out
        assert re.search(r"finished at step 6(, resumed at step \d)? after ", shown), name
        assert_ended(run, whole)
    patient = OVERFITTING | {"early_stopping_patience": 3}
    assert start(run, **patient) == ExitCode.DONE
    assert "finished at step 8, resumed at step 6 after " in capsys.readouterr().out
