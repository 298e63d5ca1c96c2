"""The results of a comparison: ratios of pairs, their intervals, and equal losses."""

import dataclasses

import pytest

from benchmarks.cells.cpu import CPU_CELLS
from benchmarks.cells.kinds import OURS, OURS_TUNED, TrainingCell
from benchmarks.comparisons.ratios import paired_ratio
from benchmarks.comparisons.training import parity, ratios
from benchmarks.recording.job import Outcome


def outcome(losses=(4.0, 3.0), *, window_s=2.0, tokens=100) -> Outcome:
    return Outcome(window_s, tokens, [1.0, 1.0], list(losses), 9.0, 2**30)


def test_a_ratio_is_of_pairs_so_that_a_slow_spell_of_the_machine_cancels():
    ratio = paired_ratio([20.0, 10.0, 20.0], [10.0, 5.0, 10.0])
    assert ratio == (2.0, 2.0, 2.0)


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
