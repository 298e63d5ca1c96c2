"""How far toolkits get: each goes on until it fails, and a sweep goes on where it ended."""

from dataclasses import asdict

import pytest

from benchmarks.__main__ import sized
from benchmarks.cells.gpu import GPU_CELLS, UNCOMPILED_SFT_TRAINER, UNCOMPILED_TRAINER
from benchmarks.cells.kinds import OURS, SweepCell
from benchmarks.cells.toy import toy
from benchmarks.contests import sweep
from benchmarks.contests.turns import ContestantFailedError
from benchmarks.figures.table import table
from benchmarks.hardware.efficiency import Device
from benchmarks.progress import OutOfTimeError, Progress
from benchmarks.recording.job import Outcome

CELLS = {cell.name: cell for cell in GPU_CELLS if isinstance(cell, SweepCell)}
TRAINER, SFT_TRAINER = UNCOMPILED_TRAINER.name, UNCOMPILED_SFT_TRAINER.name
LARGEST_OF = {OURS: 1000, TRAINER: 64, SFT_TRAINER: 1}


@pytest.fixture
def tried(monkeypatch):
    """Who was let try what; each can up to its own size."""
    tries = []

    def run(cell, contestant, workload, scratch):
        size = cell.workload.sequence_length
        tries.append((size, contestant.name))
        if size > LARGEST_OF[contestant.name]:
            raise ContestantFailedError("out of memory")
        return asdict(Outcome(1.0, 10 * size, [1.0] * 2, [5.0] * 3, 9.0, 2**30))

    monkeypatch.setattr(sweep, "run_contestant_of", run)
    monkeypatch.setattr(sweep, "made_in_process", lambda *_: None)
    return tries


def hold(tmp_path, device=None, left_out=()):
    cell = toy(CELLS["longest_sequence"])
    kept = Progress(tmp_path / "kept.json", {"a": 1})
    return sweep.hold(cell, device or Device(), kept, left_out)


def test_who_failed_is_not_tried_again(tried, tmp_path, capsys):
    result = hold(tmp_path)
    assert tried == [
        (64, OURS), (64, TRAINER), (64, SFT_TRAINER),
        (128, OURS), (128, TRAINER),
    ]  # fmt: skip
    assert {name: one["largest"] for name, one in result["contestants"].items()} == {
        OURS: 128,
        TRAINER: 64,
    }
    assert result["stopped"] == {OURS: "", TRAINER: "at 128: out of memory"}
    assert result["not_run"] == {SFT_TRAINER: "at 64: out of memory"}
    assert table(result).splitlines()[2:] == [
        "| tokens/s at size | 64 | 128 | stopped by |",
        "|---|---|---|---|",
        "| Stoker | 640 | 1,280 |  |",
        f"| {TRAINER} | 640 |  | at 128: out of memory |",
        f"| Stoker / {TRAINER} | 1.00 |  |  |",
        f"| {SFT_TRAINER} | not run: at 64: out of memory |  |  |",
    ]


def test_who_is_left_out_is_not_tried(tried, tmp_path, capsys):
    result = hold(tmp_path, left_out=(TRAINER,))
    assert TRAINER not in [name for _, name in tried]
    assert result["not_run"][TRAINER] == "left out"


def test_a_command_chooses_sizes_of_what_grows():
    sweep_cell = CELLS["longest_sequence"]
    assert sized(sweep_cell, (4,)).sizes == (4,)
    assert sized(sweep_cell, ()) is sweep_cell
    assert sized(sweep_cell.base, (4,)) is sweep_cell.base


def test_a_sweep_goes_on_where_time_was_up(tried, tmp_path, capsys, monkeypatch):
    begun = []

    def begin_round(self):
        begun.append(self)
        if len(begun) == 2:
            raise OutOfTimeError

    with monkeypatch.context() as patched:
        patched.setattr(Progress, "begin_round", begin_round)
        with pytest.raises(OutOfTimeError):
            hold(tmp_path)
    assert [size for size, _ in tried] == [64] * 3
    result = hold(tmp_path)
    assert [size for size, _ in tried] == [64] * 3 + [128] * 2
    assert result["contestants"][OURS]["largest"] == 128


def test_what_cannot_fit_is_not_tried(tried, tmp_path, capsys):
    result = hold(tmp_path, Device("small", memory_bytes=2**20))
    assert tried == []
    assert "weights, gradients and optimizer alone" in result["not_run"][OURS]


def test_models_grow_by_layers():
    cell = CELLS["largest_model"]
    assert sweep.grown(cell, 48).workload.model["num_hidden_layers"] == 48
    assert sweep.grown(cell, 48).workload.sequence_length == 4096
