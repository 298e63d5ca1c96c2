"""The table of a sweep says what became of every point, from what lies in its directory."""

import csv
import json
import os
from pathlib import Path

import pytest

from utils.jobs import sweep as command
from utils.jobs.sweep_file import read_sweep
from utils.jobs.sweep_results import results_of

ROOT = Path(__file__).parents[3]


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Five points: finished, finished and better, stopped, refused, not started."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    file = tmp_path / "sweep.yaml"
    file.write_text(
        f"script: pretrain.py\noutput_dir: {tmp_path}/runs\ngrid: {{seed: [1, 2, 3, 4, 5]}}\n"
    )
    for seed, losses in ((1, [3.0, 2.5]), (2, [2.0, 2.25]), (3, [2.75])):
        directory = tmp_path / "runs" / f"seed={seed}"
        directory.mkdir(parents=True)
        lines = [{"event": "started", "step": 0}]
        for number, loss in enumerate(losses, start=1):
            step = 10 * number
            lines.append({"event": "train", "step": step, "loss": loss + 1})
            lines.append(
                {"event": "eval", "step": step, "split": "held", "eval_held_loss": loss,
                 "eval_held_perplexity": 10 * loss, "eval_held_tokens": 99}
            )  # fmt: skip
        lines.append({"event": "summary", "step": 10 * len(losses), "train_loss": 9.0})
        (directory / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        (directory / "config.yaml").write_text("")
        (directory / "provenance.json").write_text("")
        if seed < 3:
            (directory / "final").mkdir()
    command.main(["ended", str(file), "2", "75"])
    command.main(["ended", str(file), "3", "2"])
    return read_sweep(str(file))


def states(sweep):
    found = sorted(results_of(sweep), key=lambda result: result.point.index)
    return [result.state for result in found]


def test_states(sweep):
    assert states(sweep) == [
        "finished",
        "finished",
        "stopped at step 10",
        "failed (exit 2, job 7)",
        "not started",
    ]
    assert command.unfinished(sweep) == [2, 3, 4]


def test_a_start_after_the_noted_ending_is_running(sweep):
    started = sweep.output_dir / "seed=3" / "provenance.json"
    record = sweep.output_dir / ".points" / "seed=3.json"
    os.utime(started, (record.stat().st_mtime + 5,) * 2)
    assert states(sweep)[2] == "running or stopped at step 10"


def test_a_hang_or_a_kill_is_no_failure(sweep):
    command.main(["ended", sweep.file, "2", "76"])
    assert states(sweep)[2] == "stopped at step 10"
    command.main(["ended", sweep.file, "2", "1"])
    assert states(sweep)[2] == "failed at step 10 (exit 1, job 7)"


def test_the_best_comes_first_and_points_without_figures_last(sweep):
    assert [result.point.index for result in results_of(sweep)] == [1, 0, 2, 3, 4]
    best = results_of(sweep)[0]
    assert (best.best, best.best_step) == (2.0, 10)
    assert best.figures == {"loss": 3.25, "eval_held_loss": 2.25, "eval_held_perplexity": 22.5}


def test_the_table_is_aligned_and_written_in_both_forms(sweep, capsys):
    command.main(["table", sweep.file])
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[0].endswith("2 of 5 points finished, sorted by the best eval_held_loss")
    rows = lines[2:]
    assert len({len(row) for row in rows}) == 1, "columns do not line up"
    heads = [cell.strip() for cell in rows[0].split("|")[1:-1]]
    assert heads == [
        "point", "name", "state", "step", "train loss", "held loss", "held perplexity",
        "best held loss",
    ]  # fmt: skip
    first = [cell.strip() for cell in rows[2].split("|")[1:-1]]
    assert first == [
        "1",
        "seed=2",
        "finished",
        "20",
        "3.2500",
        "2.2500",
        "22.5",
        "2.0000 (step 10)",
    ]
    assert (sweep.output_dir / "results.md").read_text() == shown
    written = list(csv.DictReader((sweep.output_dir / "results.csv").open()))
    assert written[0]["seed"] == "2"
    assert float(written[0]["best_eval_held_loss"]) == 2.0
    assert written[4]["state"] == "not started"
    assert not list(sweep.output_dir.glob(".results*")), "a draft was left"


def test_another_metric_sorts_by_it(sweep, tmp_path):
    text = Path(sweep.file).read_text()
    Path(sweep.file).write_text(text + "metric: loss\n")
    results = results_of(read_sweep(sweep.file))
    assert [result.point.index for result in results][:3] == [1, 0, 2]
    assert results[0].best == 3.0
    Path(sweep.file).write_text(text + "metric: eval_held_accuracy\n")  # nobody logged it
    assert [r.point.index for r in results_of(read_sweep(sweep.file))] == [0, 1, 2, 3, 4]


def test_a_loss_that_is_not_a_number_is_shown_and_never_the_best(sweep):
    journal = sweep.output_dir / "seed=3" / "metrics.jsonl"
    broken = '{"event": "eval", "step": %d, "split": "held", "eval_held_loss": "NaN"}\n'
    journal.write_text(broken % 5 + journal.read_text().partition("\n")[2] + broken % 20)
    result = next(r for r in results_of(sweep) if r.point.index == 2)
    assert result.figures["eval_held_loss"] != result.figures["eval_held_loss"]
    assert result.best == 2.75


def test_a_sweep_that_nothing_ran_of(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    file = tmp_path / "sweep.yaml"
    file.write_text(f"script: pretrain.py\noutput_dir: {tmp_path}/runs\ngrid: {{seed: [1]}}\n")
    command.main(["table", str(file)])
    assert "0 of 1 points finished, in the order of the points" in capsys.readouterr().out
