from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl, TrainerState

from utils.callbacks.throughput import Throughput


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Loader:
    """Step k holds 1000 + k tokens."""

    def __init__(self):
        self.wait_s, self.asked = 0.0, []

    def tokens_in_step(self, step):
        self.asked.append(step)
        return 1000 + step


class Run:
    """Plays Trainer's events with a clock of its own."""

    def __init__(self, start_step=0, log_history=(), world_size=1):
        self.clock, self.loader = Clock(), Loader()
        self.callback = Throughput(self.clock)
        self.args = SimpleNamespace(device=torch.device("cpu"), world_size=world_size)
        self.state = TrainerState(global_step=start_step, log_history=list(log_history))
        self.control = TrainerControl()
        self.callback.on_train_begin(
            self.args, self.state, self.control, train_dataloader=self.loader
        )

    def event(self, name, seconds):
        self.clock.now += seconds
        getattr(self.callback, name)(self.args, self.state, self.control)

    def step(self, seconds, wait_s=0.0, evaluate=False):
        self.loader.wait_s += wait_s
        self.state.global_step += 1
        self.control.should_evaluate = evaluate
        self.event("on_step_end", seconds)


def test_rates_are_tokens_of_the_global_batch_over_wall_time():
    run = Run(world_size=4)
    run.step(50.0)
    run.callback.metrics()
    for _ in range(2):
        run.step(0.5, wait_s=0.1)
    figures = run.callback.metrics()
    tokens = 1001 + 1002
    assert figures == pytest.approx(
        {
            "tokens_per_s": tokens / 1.0,
            "tokens_per_s_per_device": tokens / 4.0,
            "step_time_s": 0.5,
            "data_wait_s": 0.1,
            "tokens_seen": 1000 + tokens,
        }
    )


def test_the_first_step_is_told_apart_and_in_no_rate():
    run = Run()
    run.step(50.0, wait_s=7.0)
    for _ in range(4):
        run.step(0.25)
    figures = run.callback.metrics()
    assert figures["first_step_time_s"] == pytest.approx(50.0)
    assert figures["step_time_s"] == pytest.approx(0.25)
    assert figures["data_wait_s"] == 0.0
    assert figures["tokens_per_s"] == pytest.approx((1001 + 1002 + 1003 + 1004) / 1.0)
    run.step(0.25)
    assert "first_step_time_s" not in run.callback.metrics()


def test_a_log_of_the_first_step_alone_has_no_rates():
    run = Run()
    run.step(50.0)
    assert run.callback.metrics() == {"first_step_time_s": pytest.approx(50.0), "tokens_seen": 1000}


def test_evaluation_and_saving_are_left_out():
    run = Run()
    run.event("on_evaluate", 11.0)  # eval_on_start
    run.step(2.0)
    run.step(0.5, evaluate=True)
    run.event("on_evaluate", 30.0)
    run.event("on_evaluate", 20.0)
    run.event("on_save", 10.0)
    run.step(0.5)
    figures = run.callback.metrics()
    assert figures["first_step_time_s"] == pytest.approx(2.0)
    assert figures["step_time_s"] == pytest.approx(0.5)
    # The log comes before the evaluation at the same step, too.
    run.event("on_evaluate", 30.0)
    run.step(0.5)
    assert run.callback.metrics()["step_time_s"] == pytest.approx(0.5)


def test_tokens_seen_go_on_after_a_resume_from_the_last_log():
    uninterrupted = Run()
    for _ in range(8):
        uninterrupted.step(1.0)
    expected = uninterrupted.callback.metrics()["tokens_seen"]

    before = Run()
    for _ in range(4):
        before.step(1.0)
    history = [{"step": 4, **before.callback.metrics()}, {"step": 4, "eval_loss": 1.0}]
    after = Run(start_step=6, log_history=history)  # the checkpoint is two steps past the log
    for _ in range(2):
        after.step(1.0)
    assert after.callback.metrics()["tokens_seen"] == expected
    assert after.loader.asked == [4, 5, 6, 7], "a long run is not counted again from its start"


def test_tokens_seen_are_counted_from_step_0_where_no_log_has_them():
    after = Run(start_step=3)
    after.step(1.0)
    assert after.callback.metrics()["tokens_seen"] == 1000 + 1001 + 1002 + 1003
