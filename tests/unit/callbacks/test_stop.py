"""StopWatch on several ranks with a simulated clock, without processes."""

import logging
import os
import time
from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainerState
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from utils.callbacks.progress import Progress
from utils.callbacks.stop import JOB_BEGAN, Deadline, StopWatch, remove_stale_requests
from utils.checkpoints.store import Save
from utils.config.errors import StorageError


def agreement_of(ranks: int) -> type:
    """Return an `AsyncMax` without a network, for ranks that run one after another."""
    rounds: list[list[int]] = []

    class Agreement:
        def __init__(self, _timeout_s):
            self.group, self.turn = object() if ranks > 1 else None, 0

        def begin_turn(self, number):
            if len(rounds) == self.turn:
                rounds.append([])
            rounds[self.turn].append(number)
            self.turn += 1

        def result(self):
            assert len(rounds[self.turn - 1]) == ranks, "a rank missed its turn"
            return max(rounds[self.turn - 1])

        def close(self):
            """Do nothing; called by on_train_end."""

    return Agreement


class Saves:
    """A stand-in for a run's Checkpoints."""

    def __init__(self, output_dir, estimated_bytes=0):
        self.output_dir, self.estimated_bytes = output_dir, estimated_bytes
        self.writing = self.failed = False
        self.saves, self.finished = [], 0

    def finish(self):
        self.finished += 1
        raise StorageError("the disk is full")

    def saved(self, stall_s, write_s=0.0):
        self.saves.append(Save(step=1, size_bytes=1, stall_s=stall_s, write_s=write_s))


class Ranks:
    """Plays Trainer's events on every rank."""

    def __init__(
        self, folder, monkeypatch, ranks=1, *, end_time=None, save_minutes=0, budget_end=None
    ):
        self.now, self.signals = 1000.0, {}
        monkeypatch.setattr("utils.callbacks.stop.AsyncMax", agreement_of(ranks))
        self.states = [TrainerState(max_steps=100) for _ in range(ranks)]
        self.controls = [TrainerControl() for _ in range(ranks)]
        self.args, self.watches = [], []
        for rank in range(ranks):
            rhythm = {"eval_strategy": IntervalStrategy.STEPS, "save_strategy": SaveStrategy.STEPS}
            self.args.append(SimpleNamespace(process_index=rank, ddp_timeout=60, **rhythm))
            watch = StopWatch(
                Saves(folder), Progress(), save_minutes=save_minutes, clock=lambda: self.now,
                end_time=lambda: end_time, signalled=lambda rank=rank: self.signals.get(rank),
                budget_end=lambda: budget_end,
            )  # fmt: skip
            self.watches.append(watch)
            watch.on_train_begin(self.args[rank], self.states[rank], self.controls[rank])

    def event(self, name, seconds=0.0):
        self.now += seconds
        for watch, *event in self.each():
            getattr(watch, name)(*event)

    def each(self):
        return zip(self.watches, self.args, self.states, self.controls, strict=True)

    def step(self, seconds=1.0, evaluate=False):
        for state, control in zip(self.states, self.controls, strict=True):
            state.global_step += 1
            control.should_save = False
            control.should_evaluate = evaluate
        self.event("on_step_begin")
        self.event("on_step_end", seconds)

    @property
    def stopped(self):
        return [control.should_training_stop for control in self.controls]

    @property
    def saves(self):
        return [control.should_save for control in self.controls]


def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path, monkeypatch, caplog):
    ranks = Ranks(tmp_path, monkeypatch, ranks=3)
    ranks.step()
    ranks.signals[2] = "SIGTERM"
    ranks.step()
    assert ranks.stopped == [False] * 3
    with caplog.at_level(logging.INFO):
        ranks.step()
    assert ranks.stopped == ranks.saves == [True] * 3
    (record,) = caplog.records
    assert record.message == "stopping after step 3: a signal to rank 2"
    for control in ranks.controls:
        control.should_log = control.should_evaluate = control.should_save = True
    ranks.event("on_epoch_end")  # Trainer also calls it when its loop is left early
    assert ranks.saves == [False] * 3
    ranks.event("on_train_end")
    ranks.event("on_prediction_step", 5.0)  # a finished run's evaluation is not interrupted


def test_rank_0_gives_its_own_reason_and_a_stop_outweighs_a_save(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    ranks = Ranks(tmp_path, monkeypatch, ranks=2)
    for name in ("STOP", "SAVE"):
        (tmp_path / name).touch()
    ranks.step()
    ranks.signals[1] = "SIGTERM"
    ranks.step()
    assert ranks.stopped == [True, True]
    said = f"stopping after step 2: {tmp_path / 'STOP'}"
    assert [record.message for record in caplog.records] == [said]
    assert not list(tmp_path.iterdir())


def test_the_time_limit_counts_steps_batches_and_saves_but_not_the_first_step(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("utils.callbacks.stop.time.time", lambda: 5000.0)
    ranks = Ranks(tmp_path, monkeypatch, ranks=2, end_time=6000.0)
    deadline = ranks.watches[0].deadline
    assert ranks.watches[1].deadline is None, "it is for rank 0"
    assert deadline.ends_at == 2000.0
    ranks.event("on_prediction_step")  # eval_on_start
    ranks.step(400.0)  # compiles
    ranks.step(2.0)
    for name, seconds in (("on_log", 3.0), ("on_prediction_step", 4.0), ("on_evaluate", 1.0)):
        ranks.event(name, seconds)
    ranks.watches[0].checkpoints.saved(50.0)
    ranks.event("on_save", 50.0)
    ranks.now = ranks.watches[0].last_event = 2000 - 30 - 2 * 4 - 1.5 * 50 - 3
    for seconds, stopped in ((2.5, False), (1.0, False), (1.0, True)):  # they agree a step later
        ranks.step(seconds)
        assert ranks.stopped == [stopped] * 2


def test_one_save_is_one_checkpoint_and_a_failure_to_look_is_logged_once(
    tmp_path, monkeypatch, caplog
):
    folder = tmp_path / "run"
    ranks = Ranks(folder, monkeypatch, ranks=2)
    for _ in range(3):
        ranks.step()
    assert caplog.text.count("cannot look for STOP and SAVE") == 1
    folder.mkdir()
    for _request in range(2):
        (folder / "SAVE").touch()
        seen = []
        for _ in range(6):
            ranks.step()
            assert len(set(ranks.saves)) == 1
            seen.append(ranks.saves[0])
            if ranks.saves[0]:
                ranks.event("on_save", 1.0)
        assert seen.count(True) == 1
        assert not (folder / "SAVE").exists()


def test_a_checkpoint_written_since_it_was_asked_for_is_what_was_asked_for(tmp_path, monkeypatch):
    """Two ranks agree one step late. If a scheduled checkpoint comes in between, it is enough."""
    ranks = Ranks(tmp_path, monkeypatch, ranks=2, save_minutes=1)
    for _ in range(6):
        ranks.step(10.0)
    assert ranks.saves == [False, False], "asked for, not agreed on"
    ranks.event("on_save", 1.0)
    for _ in range(6):
        ranks.step(9.0)
        assert ranks.saves == [False, False]


def test_what_failed_on_one_rank_is_raised_on_all_at_the_same_step_or_batch(tmp_path, monkeypatch):
    ranks = Ranks(tmp_path, monkeypatch, ranks=2)
    ranks.step()
    ranks.watches[1].checkpoints.failed = True
    ranks.step()
    assert [watch.checkpoints.finished for watch in ranks.watches] == [0, 0]
    for watch, *event in ranks.each():
        with pytest.raises(StorageError, match="the disk is full"):
            watch.on_prediction_step(*event)


def test_it_stops_when_two_steps_and_a_save_and_a_half_just_fit(tmp_path):
    deadline = Deadline(3600, 100.0, Saves(tmp_path))
    for step_s in (500.0, *[1.0] * 98, 4.0, 7.0):  # the first step does not count
        deadline.steps_s.append(step_s)
    for stall_s, write_s in ((3.0, 17.0), (12.0, 0.0)):
        deadline.checkpoints.saved(stall_s, write_s)
    needed = 2 * 7.0 + 1.5 * 20.0 + 30.0
    assert deadline.reason(3700 - needed - 0.1) is None
    assert deadline.reason(3700 - needed + 0.1) == (
        "the time limit ends in 74 s: a step takes 7 s, a save 20 s"
    )
    deadline.checkpoints.writing = True  # one more save to wait for
    assert deadline.reason(3700 - needed - 20.1) is None
    assert deadline.reason(3700 - needed - 19.9) is not None
    assert Deadline(-5, 10.0, Saves(tmp_path)).reason(11.0) is not None
    # Before the first save its time is estimated from its size, with a limit for short jobs.
    for total_s, size_bytes, needed in ((36_000, 20 * 10**9, 180), (60, 10**12, 6 + 1.5 * 6)):
        deadline = Deadline(total_s, 0.0, Saves(tmp_path, estimated_bytes=size_bytes))
        assert deadline.reason(total_s - needed - 0.1) is None
        assert deadline.reason(total_s - needed + 0.1) is not None


def test_all_ranks_stop_alike_before_max_gpu_hours_even_beside_a_signal(
    tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("utils.callbacks.stop.time.time", lambda: 5000.0)
    ranks = Ranks(tmp_path, monkeypatch, ranks=3, end_time=5400.0, budget_end=5300.0)
    asked = [watch.budget is not None for watch in ranks.watches]
    assert asked == [True, False, False], "the other ranks follow rank 0"
    ranks.step(100.0)
    for watch in ranks.watches:
        watch.checkpoints.saved(stall_s=20.0)
    while not any(ranks.stopped):
        ranks.step(10.0)
        assert ranks.now < 1300, "it stops too late"
        if ranks.now >= 1210:
            ranks.signals[2] = "SIGTERM"  # Slurm's, at the same time
    # Two steps of 10 s, a save and a half of 20 s and a margin of 30 s have to fit before 1300.
    # The ranks agree one step after rank 0 looked.
    assert ranks.now == 1230
    assert ranks.stopped == ranks.saves == [True] * 3
    assert [watch.spent for watch in ranks.watches] == [True] * 3, "an exit code for all ranks"
    assert ranks.watches[0].reason.startswith(
        "max_gpu_hours ends in 80 s: a step takes 10 s, a save"
    )


def test_a_signal_before_max_gpu_hours_is_an_ordinary_stop(tmp_path, monkeypatch):
    monkeypatch.setattr("utils.callbacks.stop.time.time", lambda: 5000.0)
    ranks = Ranks(tmp_path, monkeypatch, ranks=2, budget_end=9000.0)
    ranks.signals[1] = "SIGTERM"
    while not any(ranks.stopped):
        ranks.step()
    assert [watch.spent for watch in ranks.watches] == [False, False]


def test_a_stop_that_is_newer_than_the_start_of_the_job_is_kept(tmp_path, monkeypatch):
    for name, changed in (("STOP", 1000.5), ("SAVE", 999.0)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (changed, changed))
    monkeypatch.setenv(JOB_BEGAN, "1000")  # as slurm/job_setup.sh sets it
    remove_stale_requests(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["STOP"]
    monkeypatch.delenv(JOB_BEGAN)  # a process without a job script
    remove_stale_requests(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_time_limit_that_is_over_is_not_logged(tmp_path, monkeypatch, caplog):
    """After scancel, Slurm's end of the job is now."""
    caplog.set_level(logging.INFO)
    Ranks(tmp_path, monkeypatch, end_time=time.time() - 5)
    assert "time limit: ends" not in caplog.text
    Ranks(tmp_path, monkeypatch, end_time=time.time() + 3600)
    assert "time limit: ends" in caplog.text
