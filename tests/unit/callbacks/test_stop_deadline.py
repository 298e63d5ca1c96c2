import pytest

from utils.callbacks.stop_requests import Deadline


def test_it_stops_when_two_steps_and_a_save_and_a_half_just_fit():
    deadline = Deadline(3600, now=100.0)
    deadline.took_step(4.0)
    deadline.took_step(7.0)
    deadline.took_save(20.0)
    deadline.took_save(12.0)
    needed = 2 * 7.0 + 1.5 * 20.0 + 30.0
    assert deadline.reason(3700 - needed - 0.1) is None
    assert deadline.reason(3700 - needed + 0.1) == (
        "the time limit ends in 74 s: a step takes 7 s, a save took 20 s"
    )


def test_before_any_save_its_time_is_guessed_from_its_size_and_said():
    deadline = Deadline(36_000, now=0.0, checkpoint_bytes=20 * 10**9)
    assert deadline.needed_s == pytest.approx(1.5 * 100 + 30)
    assert "a save is guessed to take 1e+02 s" in deadline.reason(35_900)
    deadline.took_save(3.0)
    assert deadline.needed_s == pytest.approx(1.5 * 3 + 30)


def test_neither_margin_nor_guess_eat_a_short_job_up():
    deadline = Deadline(60, now=0.0, checkpoint_bytes=10**12)
    deadline.took_step(1.0)
    assert deadline.needed_s == pytest.approx(6 + 1.5 * 6 + 2)
    assert deadline.reason(40.0) is None


def test_a_slow_step_long_ago_is_forgotten():
    deadline = Deadline(3600, now=0.0)
    deadline.took_step(500.0)
    for _ in range(100):
        deadline.took_step(1.0)
    assert deadline.needed_s < 100


def test_a_limit_that_is_past_stops_at_once():
    assert Deadline(-5, now=10.0).reason(11.0) is not None


def test_the_plan_says_when_and_how_long():
    import datetime

    end = datetime.datetime(2026, 11, 20, 14, 5).timestamp()
    plan = Deadline(10_920, now=0.0).plan(end)
    assert plan.startswith("time limit: ends at 14:05, in 3h02m; the run stops by itself")
    assert "guessed to take 5 s" in plan
