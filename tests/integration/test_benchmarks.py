"""A comparison of two, in real processes: the same losses, everything measured."""

import pytest

from benchmarks.cells.kinds import OURS, STOKER, Baseline, TrainingCell
from benchmarks.comparisons import training
from benchmarks.workloads.workload import LLAMA_11M, Workload

pytestmark = pytest.mark.slow

SMALL = LLAMA_11M | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 200,
}
PLAIN = Baseline("plain loop", "plain_loop", tuned=False)
ABSENT = Baseline("absent", "absent", needs="no_such_package")


def test_a_comparison_of_toolkits(capsys):
    cell = TrainingCell(
        "small",
        "Small",
        Workload(SMALL, sequence_length=64, documents=16),
        "fp32",
        2,
        (STOKER, PLAIN, ABSENT),
        steps=4,
        warmup_steps=2,
    )
    result = training.hold(cell, repeats=1)
    assert result["not_run"] == {"absent": "no_such_package is not installed"}
    assert set(result["contestants"]) == {OURS, "plain loop"}
    for measured in result["contestants"].values():
        assert measured["tokens_per_second"] > 0
        assert measured["first_step_s"] > 0
        assert measured["peak_memory_bytes"] > 2**26
        assert len(measured["losses"]) == 4
        assert len(measured["step_s"]) == 3
    assert result["contestants"][OURS]["notes"]["loss_head"]["name"] == "fused"
    assert result["parity"]["compared_steps"] == 4
    assert result["parity"]["differences"]["plain loop"] < 1e-5
    assert result["ratios"]["plain loop"]["median"] > 0
