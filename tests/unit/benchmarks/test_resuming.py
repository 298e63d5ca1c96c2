"""The next command resumes after the rounds that one has finished."""

import time

import pytest

from benchmarks.__main__ import main
from benchmarks.__main__ import measure as measure_cells
from benchmarks.cells.kinds import OURS, ComponentCell
from benchmarks.comparisons.turns import BaselineFailedError, CannotRunHereError, Turns
from benchmarks.measure import Session
from benchmarks.progress import OutOfTimeError, Progress

KEY = {"cell": (1, 2)}


def take(kept: Progress, repeats: int, failing: str = "") -> Turns:
    def run(name, directory):
        if name == failing:
            raise CannotRunHereError("no such package")
        return {"name": name}

    turns: Turns = Turns({}, kept)
    turns.take([OURS, "peer"], repeats, run, str)
    return turns


def test_rounds_resume(tmp_path, capsys):
    path = tmp_path / "unfinished" / "cell.json"
    take(Progress(path, KEY), 2, failing="peer")
    turns = take(Progress(path, KEY), 5)
    assert turns.outcomes == {OURS: [{"name": OURS}] * 5}
    assert turns.not_run == {"peer": "no such package"}  # out once, out for good
    assert "3/5" in capsys.readouterr().out


def test_rounds_of_another_commit_do_not_count_and_none_begins_too_late(tmp_path, capsys):
    path = tmp_path / "cell.json"
    take(Progress(path, KEY), 1)
    with pytest.raises(OutOfTimeError):
        take(Progress(path, KEY, deadline=time.monotonic()), 2)
    assert Progress(path, KEY).load()["rounds"] == 1
    capsys.readouterr()
    take(Progress(path, {"cell": "another"}), 3)
    assert capsys.readouterr().out.startswith("1/3")


def session(tmp_path, **settings) -> Session:
    return Session(group="gpu", results=tmp_path, repeats=1, **settings)


def test_a_cell_that_fails_does_not_keep_the_others_from_their_turn(tmp_path, capsys, monkeypatch):
    def hold(self, cell, kept):
        if cell.name == "broken":
            raise BaselineFailedError("exit code 1: no")
        parity = {"holds": cell.name != "another training"}
        return {"title": cell.name, "probes": PROBES, "not_run": {}, "parity": parity}

    monkeypatch.setattr(Session, "_hold", hold)
    cells = [ComponentCell("broken"), ComponentCell("sound")]
    assert measure_cells(session(tmp_path), cells) == 1
    assert "broken: Stoker failed: exit code 1: no" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "gpu").iterdir()] == ["sound.json"]
    assert measure_cells(session(tmp_path), [ComponentCell("another training")]) == 1
    # What is done is not measured again, and no better for that.
    monkeypatch.setattr(Session, "_hold", None)
    assert session(tmp_path, resume=True).measure(ComponentCell("sound"))
    assert not session(tmp_path, resume=True).measure(ComponentCell("another training"))


PROBES = {
    "matmul": {"flops_per_second": 7e14, "shape": [1, 2, 3]},
    "bandwidth": {"bytes_per_second": 4e12},
}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["gpu"], "needs an NVIDIA GPU, and nvidia-smi shows none; see --toy"),
        (["gpu", "--toy"], "give --results a directory of its own"),
        (["cpu", "--toy", "--results", "x"], "rehearses the group gpu"),
        (["gpu", "--toy", "--results", "x", "--cells", "none"], "no cell none; there are probes,"),
    ],
)
def test_a_command_that_cannot_be_is_refused(argv, message, capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.__main__.hardware", dict)
    with pytest.raises(SystemExit):
        main(argv)
    assert message in capsys.readouterr().err
