"""How a run ended, where its hours went, what stands out, which settings differ."""

import json
import os

import numpy as np
import pytest
from made_up_run import BEGIN, iso, write_run

from utils.host.spikes import spikes_in
from utils.observe import findings
from utils.observe.charts import charts_of, charts_of_several, starts_on_axes
from utils.observe.endings import End, end_of_run, end_of_start, run_in_words, start_in_words
from utils.observe.findings import thinned
from utils.observe.history import read_run


def ends(run):
    """Return the evidence of each start's end, and the words of the report about the run."""
    history = read_run(run)
    return [end_of_start(history, start) for start in history.starts], *run_in_words(history)


def test_the_ends_of_starts_and_of_the_run(made_up_run):
    run = read_run(made_up_run)
    assert ends(made_up_run)[0] == [End.NOT_FINITE, End.STOPPED, End.FINISHED]
    assert start_in_words(run, run.starts[0]) == "step 61 was not finite"
    (made_up_run / "nonfinite-step-61.json").unlink()
    run = read_run(made_up_run)
    assert end_of_start(run, run.starts[0]).word == "interrupted"
    assert "no last word" in start_in_words(run, run.starts[0])
    assert ends(made_up_run)[1].startswith("Finished at step 160 of 160: ")
    (made_up_run / "final").rmdir()
    assert "final/ is not there" in ends(made_up_run)[1]
    journal = made_up_run / "metrics.jsonl"
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:-1]))
    of_starts, _, then = ends(made_up_run)
    assert of_starts[-1] is End.UNEXPLAINED
    assert then == ("Next: start again: slurm/submit.sh slurm/train_job.sh pretrain.py "
                    "--run_name made-up (with your options of sbatch)")  # fmt: skip
    lock = made_up_run / ".lock" / "owner-3"
    lock.write_text(json.dumps({**json.loads(lock.read_text()), "left": False}))
    assert end_of_run(read_run(made_up_run)) is End.ALIVE, "its lock has just been written"
    os.utime(lock, (1, 1))
    assert end_of_run(read_run(made_up_run)) is End.LOST


def test_a_start_that_died_before_its_entry_was_written_is_a_start(made_up_run):
    lock = made_up_run / ".lock" / "owner-4"
    content = json.loads((made_up_run / ".lock" / "owner-3").read_text())
    content["owner"]["since"] = iso(BEGIN + 9000)
    lock.write_text(json.dumps(content | {"left": False}))
    os.utime(lock, (1, 1))
    of_starts, text, _ = ends(made_up_run)
    assert of_starts == [End.NOT_FINITE, End.STOPPED, End.FINISHED, End.LOST]
    assert text.startswith("Interrupted at step 160 of 160: no last word")
    lock.write_text(json.dumps(content | {"left": True, "phase": "starting"}))
    assert ends(made_up_run)[0] == of_starts[:3], "a refused start is none"


def test_the_hours_add_up_and_each_second_has_its_place(made_up_run):
    run = read_run(made_up_run)
    spent = findings.seconds_by_use(run)
    whole = run.starts[-1].ended - run.starts[0].began
    assert sum(spent.values()) == pytest.approx(whole)
    # 160 steps were not rolled back. Three of these were the first of a start. Each other one took
    # 2 s, with 0.5 s of waiting.
    assert spent["compute"] == pytest.approx(157 * 1.5)
    assert spent["wait"] == pytest.approx(157 * 0.5)
    assert spent["first"] == pytest.approx(3 * 5)
    assert spent["eval"] == pytest.approx(8 * 7)
    assert spent["save"] == pytest.approx(8 * 1)
    assert spent["startup"] == pytest.approx(3 * 10)
    # Steps 41 to 60 of the first start, an evaluation, a save, and 4 s until the start died.
    assert spent["lost"] == pytest.approx(20 * 2 + 7 + 1 + 4)


def test_the_time_in_the_queue_is_told_apart_where_slurm_tells(made_up_run):
    path = made_up_run / "provenance.json"
    content = json.loads(path.read_text())
    for entry, submit, begin in zip(
        content["starts"], (-70, 300, 0), (-10, 990, 1950), strict=True
    ):
        entry["slurm"] |= {"submit_time": BEGIN + submit, "start_time": BEGIN + begin}
    path.write_text(json.dumps(content))
    run = read_run(made_up_run)
    spent = findings.seconds_by_use(run)
    first, second, third = run.starts
    # The third start belongs to a requeued job, which was submitted long before.
    queue = 60 + (990 - 300) + (BEGIN + 1950 - second.ended)
    assert spent["queue"] == pytest.approx(queue)
    assert spent["between"] == pytest.approx(BEGIN + 300 - first.ended)
    assert spent["startup"] == pytest.approx(3 * 10 + 10 + 10 + 50)
    assert sum(spent.values()) == pytest.approx(third.ended - first.began + 70)


def test_spikes_are_found_and_noise_is_not():
    noise = np.random.default_rng(0)
    losses = 2 + 3 * np.exp(-np.arange(3000) / 300) + 0.05 * noise.standard_normal(3000)
    lines = [{"step": 10 * place, "loss": float(loss)} for place, loss in enumerate(losses)]
    assert spikes_in(lines) == []
    for place in (700, 701, 702, 1500):
        lines[place] = {"step": 10 * place, "loss": 4.0 + (place == 701), "grad_norm": 7.0}
    lines[1999] = {"step": 19990, "loss": 9.0}
    lines[2000] = {"step": 20000, "loss": np.nan}
    found = spikes_in(lines)
    assert [(one.step, one.last_step) for one in found] == [
        (7000, 7020), (15000, 15000), (19990, 20000),
    ]  # fmt: skip
    assert found[0].value == 5.0
    assert np.isnan(found[2].value)
    assert found[0].grad_norm == 7.0
    assert found[0].before == pytest.approx(2.3, abs=0.1)
    assert spikes_in(lines[:10]) == []


def test_the_figures_settings_and_what_differs(made_up_run, tmp_path):
    run = read_run(made_up_run)
    figures = findings.figures(run)
    assert figures["tokens"] == 160 * 4096
    assert min(figures["evaluations"]["web"], key=lambda at: at.loss).step == 160
    path = write_run(tmp_path / "other")
    settings = path / "config.yaml"
    settings.write_text(settings.read_text().replace("0.001", "0.002"))
    other = read_run(path)
    assert findings.settings_that_differ([run, other]) == [("learning_rate", [0.001, 0.002])]
    assert findings.settings_that_differ([run, run]) == []


def test_thinning_keeps_every_extreme_and_gaps():
    values = np.random.default_rng(0).standard_normal(100_000)
    values[[12_345, 70_000]] = 50, -50
    values[500:20_000:7] = np.nan
    kept = thinned(values, 1000)
    assert len(kept) <= 1002
    assert list(kept) == sorted(set(kept))
    assert {0, 12_345, 70_000, 99_999} <= set(kept.tolist())
    assert list(thinned(values[:9], 1000)) == list(range(9))


def test_each_chart_has_its_series_on_three_axes(made_up_run):
    run = read_run(made_up_run)
    charts = {chart["title"]: chart for chart in charts_of(run, spikes_in(run.trained))}
    loss = {line["label"]: line for line in charts["Loss"]["lines"] if line["style"] != "lost"}
    assert loss["train"]["step"] == list(range(1, 161))
    assert loss["train"]["tokens"][-1] == 160 * 4096
    assert loss["train"]["hours"] == sorted(loss["train"]["hours"])
    assert loss["eval web"]["tokens"] == [4096.0 * step for step in range(20, 161, 20)]
    assert loss["spike"]["step"] == [130]
    (lost,) = (line for line in charts["Loss"]["lines"] if line["style"] == "lost")
    assert lost["step"] == [*range(41, 61), 60]
    assert lost["y"][-1] is None, "a gap before what another start did again"
    assert {line["label"] for line in charts["Mixture"]["lines"]} == {"web", "code"}
    assert "Host memory" not in charts, "nothing was logged of it"
    assert [mark["step"] for mark in starts_on_axes(run)] == [40, 100]
    several = {chart["title"]: chart for chart in charts_of_several([run, run])}
    assert [line["colour"] for line in several["Loss"]["lines"]] == [0, 1]
    assert "Evaluation web" in several
