"""Losses beside losses: what is near enough, and the table of it."""

from benchmarks.cells.cpu import EXPERIMENTS
from benchmarks.cells.kinds import ParityCell
from benchmarks.comparisons import parity
from benchmarks.figures.table import table

CELL = next(cell for cell in EXPERIMENTS if isinstance(cell, ParityCell))


def judged(**changes: float) -> dict:
    losses = {variant.name: [5.0] * 40 for variant in CELL.variants}
    for name, more in changes.items():
        losses[name.replace("_", " ")][-parity.LAST :] = [5.0 + more] * parity.LAST
    return parity.parity(CELL, losses)


def test_a_run_that_learns_less_does_not_hold_and_one_that_learns_more_does():
    assert judged()["holds"]
    assert judged(states_in_int8=-1.0)["holds"]
    assert not judged(states_in_int8=0.03)["holds"]
    (contrast,) = [variant.name for variant in CELL.variants if not variant.held]
    losses = {variant.name: [5.0] * 40 for variant in CELL.variants} | {contrast: [9.0] * 40}
    assert parity.parity(CELL, losses)["holds"]


def test_bytes_are_those_of_weight_gradient_and_states():
    sizes = [round(parity.bytes_a_parameter(variant)) for variant in CELL.variants]
    assert sizes == [16, 16, 12, 10, 8, 6, 8]


def test_the_table_has_a_line_a_variant():
    result = {
        "title": "Losses",
        "variants": {"a": {"bytes_a_parameter": 16.0, "final_loss": 5.0, "mean_difference": 0.0}},
        "parity": {"last_steps": 20, "differences": {"a": 0.0}},
        "not_run": {},
    }
    assert table(result).splitlines()[-1] == "| a | 16 | 5.0000 | +0.0000 | 0.0000 |"
