from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import TrainerControl, TrainerState

from utils.callbacks.metrics import Throughput
from utils.data.loader import TokenCounts


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Loader:
    """Step k holds 1000 + k tokens."""

    def __init__(self):
        self.wait_s = 0.0
        self.tokens_seen = TokenCounts(lambda step: np.array([1000 + step]), ["all"])


class Run:
    """Plays Trainer's events with a clock of its own."""

    def __init__(self, start_step=0, world_size=1):
        self.clock, self.loader = Clock(), Loader()
        self.callback = Throughput(self.clock)
        self.args = SimpleNamespace(device=torch.device("cpu"), world_size=world_size)
        self.state = TrainerState(global_step=start_step)
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


def test_tokens_are_counted_step_by_step_and_not_while_a_log_waits():
    run = Run()
    for step in range(1, 4):
        run.step(0.25)
        assert run.loader.tokens_seen.steps == step


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


def test_a_resumed_run_measures_its_own_steps_and_sees_the_tokens_of_all():
    run = Run(start_step=3)
    run.loader.tokens_seen.resume(3, {"all": 5000, "a source that went": 7})
    run.step(50.0)
    run.step(0.5)
    figures = run.callback.metrics()
    assert figures["tokens_per_s"] == pytest.approx(1004 / 0.5)
    assert figures["tokens_seen"] == 5007 + 1003 + 1004
