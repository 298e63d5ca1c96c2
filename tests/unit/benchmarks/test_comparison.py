"""The results of a comparison: ratios of pairs, their intervals, and equal losses."""

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.cells.cpu import CPU_CELLS, EXPERIMENTS
from benchmarks.cells.kinds import OURS, OURS_TUNED, TrainingCell
from benchmarks.comparisons.ratios import paired_ratio
from benchmarks.comparisons.training import costs, parity, pipes_in_a_ring, ratios
from benchmarks.recording.job import STARTED_AT, Job, Outcome
from benchmarks.recording.steps import StepRecorder


def outcome(losses=(4.0, 3.0), *, window_s=2.0, tokens=100) -> Outcome:
    return Outcome(window_s, tokens, [1.0, 1.0], list(losses), 9.0, 2**30)


def test_a_ratio_is_of_pairs_so_that_a_slow_spell_of_the_machine_cancels():
    ratio = paired_ratio([20.0, 10.0, 20.0], [10.0, 5.0, 10.0])
    assert ratio == (2.0, 2.0, 2.0)


def test_steps_in_turn_do_not_overlap_but_for_those_of_the_start(monkeypatch):
    monkeypatch.setenv(STARTED_AT, "0")
    steps, taken = 6, []
    job = Job("", "", "pretrain", "fp32", 8, 1, steps, warmup_steps=2)

    def train(name):
        recorder = StepRecorder(dataclasses.replace(job, turn=pipes[name]))
        for step in range(steps):
            taken.append((step, name, "begins"))
            time.sleep(0.01)
            taken.append((step, name, "ends"))
            recorder.ended_step()
        return recorder.step_s

    with pipes_in_a_ring(["one", "two"]) as pipes, ThreadPoolExecutor(2) as pool:
        begin_s = time.perf_counter()
        seconds = list(pool.map(train, pipes))
    all_s = time.perf_counter() - begin_s
    expected = [
        (step, name, what)
        for step in range(2, steps)
        for name in ("one", "two")
        for what in ("begins", "ends")
    ]
    assert [each for each in taken if each[0] >= 2] == expected
    timed = [one for each in seconds for one in each[1:]]
    assert min(timed) > 0.01
    assert sum(timed) < all_s, "a step is without the other's"


def test_other_losses_break_the_parity():
    cell = next(cell for cell in CPU_CELLS if isinstance(cell, TrainingCell))
    assert cell.workload.kind == "pretrain"
    same = {OURS: [outcome()], "peer": [outcome((4.001, 3.0))]}
    assert parity(cell, same, {})["holds"]
    assert parity(cell, same, {})["differences"]["peer"] == pytest.approx(5e-4)
    other = {OURS: [outcome()], "peer": [outcome((4.0, 3.1))]}
    assert not parity(cell, other, {})["holds"]


def test_another_share_of_loss_tokens_breaks_the_parity():
    """SFTTrainer once trained on prompts too; with random weights its loss was the same."""
    cell = next(cell for cell in CPU_CELLS if cell.name == "sft_bf16")
    ours = dataclasses.replace(outcome(), window_loss_tokens=66)
    same = dataclasses.replace(outcome(), window_loss_tokens=67)
    expected = {OURS: 4.0, "peer": 4.0}
    assert parity(cell, {OURS: [ours], "peer": [same]}, expected)["holds"]
    other = dataclasses.replace(same, window_loss_tokens=99)
    found = parity(cell, {OURS: [ours], "peer": [other]}, expected)
    assert not found["holds"]
    assert found["loss_share_differences"]["peer"] == pytest.approx(0.33)


def test_a_first_loss_is_compared_with_that_of_the_same_documents():
    cell = next(cell for cell in CPU_CELLS if cell.name == "sft_bf16")
    outcomes = {OURS: [outcome((4.0, 3.0))], "peer": [outcome((4.2, 3.0))]}
    held = parity(cell, outcomes, {OURS: 4.001, "peer": 4.199})
    assert held["holds"]
    assert held["differences"] == pytest.approx({OURS: 1e-3, "peer": 1e-3})
    for expected in ({OURS: 4.0, "peer": 4.0}, {OURS: 4.2, "peer": 4.2}):
        assert not parity(cell, outcomes, expected)["holds"]


def test_tuned_is_compared_with_tuned():
    seconds = {OURS: 1.0, OURS_TUNED: 0.5, "peer": 2.0, "tuned peer": 2.0}
    outcomes = {name: [outcome(window_s=window)] for name, window in seconds.items()}
    found = ratios(outcomes, tuned=[OURS_TUNED, "tuned peer"])
    assert {name: ratio["median"] for name, ratio in found.items()} == {
        "peer": 2.0,
        "tuned peer": 4.0,
    }


def test_what_a_part_costs_is_in_percent_of_pairs():
    cell = next(cell for cell in EXPERIMENTS if cell.name == "watching")
    name = cell.baselines[1].name
    ours = [outcome(window_s=2.02), outcome(window_s=4.04)]
    without = [outcome(window_s=2.0), outcome(window_s=4.0)]
    for one in [*ours, *without]:
        one.window_cpu_s = 3.0
    found = costs(cell, {OURS: ours, name: without})[name]
    assert found["clock"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert found["cpu"]["median"] == found["median step"]["median"] == 0
    assert costs(cell, {OURS: ours}) == {}


def test_callbacks_that_only_watch_are_left_out_and_the_journal_is_silent():
    """The benchmark keeps the callbacks that the trainer needs."""
    from unittest import mock

    from benchmarks.baselines.stoker import unwatched
    from utils.callbacks.journal import Journal
    from utils.run import finish
    from utils.training.callbacks import Callbacks

    parts = {name: mock.MagicMock() for name in Callbacks.__dataclass_fields__}
    made = Callbacks(**parts | {"journal": Journal.__new__(Journal)})
    with mock.patch("utils.run.finish.run_callbacks", return_value=made), unwatched():
        kept = finish.run_callbacks()
    assert kept.in_order() == [made.stop, made.guard, made.journal]
    assert kept.metrics() == {}
    assert kept.journal.on_log() is None
