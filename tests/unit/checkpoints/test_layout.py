"""A checkpoint is loaded under the strategy that wrote it, on any number of ranks."""

from pathlib import Path

import pytest

from utils.checkpoints.layout import layout_problem
from utils.checkpoints.manifest import Manifest

STRATEGIES = ["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]


def problem(written: str, now: str) -> str | None:
    manifest = Manifest("run", 3, 24, 9, 2, written, 8, {}, {}, "now", {})
    return layout_problem(Path("runs/a/checkpoint-3"), manifest, now)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_strategy_that_wrote_it_can(strategy):
    assert problem(strategy, strategy) is None


@pytest.mark.parametrize(("written", "now"), [("single", "ddp"), ("ddp", "single")])
def test_whole_weights_are_for_one_process_and_for_ddp(written, now):
    assert problem(written, now) is None


@pytest.mark.parametrize("written", STRATEGIES)
@pytest.mark.parametrize("now", STRATEGIES)
def test_all_others_are_refused_with_the_way(written, now):
    if written == now or {written, now} == {"single", "ddp"}:
        return
    told = problem(written, now)
    assert told is not None
    assert f"checkpoint-3 was written under {written} and cannot be loaded under {now}" in told
    assert "any number of ranks will do" in told
    assert "--init_from" in told
