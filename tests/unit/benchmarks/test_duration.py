"""What a comparison of waits comes to."""

import sys
import types
from pathlib import Path

import pytest

from benchmarks.cells.kinds import DurationCell
from benchmarks.comparisons import duration
from benchmarks.figures import speed as speed_figures
from benchmarks.figures.table import table


@pytest.fixture
def result(monkeypatch, capsys):
    """Three baselines; one waits at the largest size alone, one twice as long as Stoker."""
    module = types.ModuleType("benchmarks.durations.waiting")
    module.TITLE, module.SIZES = "Waiting", (10, 2000)
    module.prepare = lambda directory, sizes: (directory / "prepared").write_text(str(sizes))

    def waits(seconds):
        def wait(sizes, prepared: Path, scratch: Path):
            assert (prepared / "prepared").read_text() == str(sizes)
            assert scratch.is_dir()
            return seconds

        return wait

    module.BASELINES = {
        "Stoker": waits({10: 1.0, 2000: 2.0}),
        "Stoker, again": waits({2000: 0.5}),
        "peer": waits({10: 2.0, 2000: 4.0}),
    }
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return duration.hold(DurationCell("waiting", most_repeats=2), repeats=5)


def test_seconds_and_who_waits_longer(result):
    lines = table(result).splitlines()
    assert "| seconds at size | 10 | 2,000 |" in lines
    assert "| Stoker, again |  | 0.50 |" in lines
    assert "| peer / Stoker | 2.00 | 2.00 |" in lines


def test_the_summary_has_seconds(result):
    assert speed_figures.summary([result]).splitlines()[2:] == [
        "| Waiting; size 2,000 | 2.00 s | peer: 4.00 | 2.00 |"
    ]
