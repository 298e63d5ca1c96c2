"""The page of a folder: every run, escaped, outside of all runs; the small curves."""

import itertools
import json
import os
import re
import shutil
from types import SimpleNamespace

import pytest
from made_up_run import BEGIN, write_run, write_run_of_ranks

import status
from utils.config.errors import ConfigurationError
from utils.host.journal_file import sampled_losses
from utils.launch import verdict
from utils.observe import run_state, status_lines

HOSTILE = "<script>alert(1)</script> & \"'"


@pytest.fixture(autouse=True)
def _no_slurm(tmp_path, monkeypatch):
    monkeypatch.setattr(verdict, "_ROOT", tmp_path)
    monkeypatch.setattr(run_state.shutil, "which", lambda _name: None)


def test_a_folder_has_one_page_with_all_its_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SOME_API_KEY", "secret-in-a-value")
    runs = tmp_path / "runs"
    finished = write_run(runs / "finished")
    (finished / "report.html").touch()
    failed = write_run(runs / "sweep" / HOSTILE.replace("/", "|"))
    (failed / "final").rmdir()
    lock = failed / ".lock" / "owner-3"
    error = f"rank 1 of secret-in-a-value {HOSTILE}"
    spent = {"starting": 360, "training": 1440}
    lock.write_text(json.dumps({**json.loads(lock.read_text()), "error": error, "spent": spent}))
    os.utime(lock, (BEGIN + 3800,) * 2)
    log, job = tmp_path / "train-7.log", runs / "new"
    log.write_text(f"job 7, start 1\nn1: no python {HOSTILE}\n")
    verdict.note_submitted("7", job, str(log))
    jobs = {"8": run_state.Job("8", "PENDING", "Priority", None, HOSTILE, None, str(job.resolve()))}
    jobs["9"] = run_state.Job("9", "RUNNING", "None", None, "of another folder")
    soon = str(runs.resolve() / "soon")
    jobs["10"] = run_state.Job("10", "CONFIGURING", "None", None, "soon", None, soon)
    monkeypatch.setattr("utils.observe.page.queued_jobs", lambda _users: jobs)
    ledger = tmp_path / "nodes.jsonl"
    monkeypatch.setenv("STOKER_LEDGER", str(ledger))
    fault = {"node": "n7", "kind": "hang", "cause": f"rank 1 {HOSTILE}", "time": BEGIN, "job": "5"}
    ledger.write_text(json.dumps(fault) + "\n")
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    assert status.main(["--all", str(runs), "--html"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{runs}/runs.html: 2 runs, ")
    page = (runs / "runs.html").read_text()
    after = {path: path.stat().st_mtime_ns for path in runs.rglob("*") if path.name != "runs.html"}
    changed = {path for path in after if after[path] != before[path] and path != runs}
    assert not changed, "nothing else is written"
    assert "secret-in-a-value" not in page
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "of another folder" not in page
    assert not re.search(r"(?:src|href|url)\s*[=(]\s*[\"']?https?:", page), "nothing is fetched"
    assert 'http-equiv="refresh"' not in page
    assert '<a href="finished/report.html">finished</a>' in page
    for words in ('<span class="badge finished">finished', '<span class="badge failed">failed',
                  '<span class="badge waiting">waiting', "160 <span", "of 160", "width:100",
                  "<td>folder sweep</td>", "GPU-hours"):  # fmt: skip
        assert words in page, words
    for state in ("finished", "failed", "waiting", "starting"):
        assert f'<div class="tile {state}"><span>{state}</span><b>1</b>' in page
    assert '<td class="t">n7</td><td class="t">hang</td>' in page
    (points,) = set(re.findall(r'points="([^"]+)"', page))
    places = [tuple(map(float, point.split(","))) for point in points.split()]
    assert places[0][0] == 0
    assert places[-1][0] == 100
    assert min(y for _, y in places) == 2, "the highest loss is at the top"
    assert max(y for _, y in places) == 26


def test_the_page_is_never_in_a_run_and_a_refusal_names_the_way_out(tmp_path, capsys):
    run = write_run(tmp_path / "runs" / "one")
    for file in (run / "page.html", run / "checkpoint-1" / "page.html"):
        with pytest.raises(ConfigurationError, match=r"inside the run .*: name another FILE"):
            status.main(["--all", str(run.parent), "--html", str(file)])
    with pytest.raises(ConfigurationError, match="cannot be written"):
        status.main(["--all", str(run.parent), "--html", str(tmp_path / "none" / "page.html")])
    for words in (["--json"], ["--sync"], [str(run)]):
        with pytest.raises(SystemExit):
            status.main([*words, "--html"])
        assert "--html writes a page of a folder" in capsys.readouterr().err
    for words in ([str(run)], ["--all"], ["--html"], ["--space"]):
        with pytest.raises(SystemExit):
            status.main([*words, "--nodes"])
        assert "it takes only --json and --watch" in capsys.readouterr().err


def test_a_run_that_is_deleted_meanwhile_is_left_out(tmp_path, monkeypatch, capsys):
    runs = [write_run(tmp_path / "runs" / name) for name in ("one", "two")]
    read = run_state.read_status

    def late(path, jobs):
        shutil.rmtree(runs[1], ignore_errors=True)
        return read(path, jobs)

    monkeypatch.setattr(run_state, "read_status", late)
    assert status.main(["--all", str(runs[0].parent), "--html"]) == 0
    assert "runs.html: 1 runs" in capsys.readouterr().out


def test_watch_writes_the_page_again_and_lets_browsers_reload_it(tmp_path, monkeypatch, capsys):
    runs = write_run(tmp_path / "runs" / "one").parent
    seen = []

    def sleep(seconds):
        seen.append((runs / "page.html").read_text())
        (runs / "page.html").unlink()
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(status_lines, "time", SimpleNamespace(sleep=sleep))
    words = ["--all", str(runs), "--html", str(runs / "page.html"), "--watch", "60"]
    assert status.main(words) == 0
    assert len(seen) == 2
    assert '<meta http-equiv="refresh" content="60">' in seen[0]
    assert "page.html: 1 runs" in capsys.readouterr().out


def test_a_small_curve_samples_the_whole_journal_and_leaves_out_repeated_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert sampled_losses(path, 10) == []
    path.touch()
    assert sampled_losses(path, 10) == []
    write_run(tmp_path / "run")  # steps 41 to 60 were done again
    points = sampled_losses(tmp_path / "run" / "metrics.jsonl", 1000)
    assert [step for step, _ in points] == list(range(1, 161))
    write_run_of_ranks(tmp_path / "large", logs=400)
    points = sampled_losses(tmp_path / "large" / "metrics.jsonl", 50)
    steps = [step for step, _ in points]
    assert steps == sorted(set(steps))
    assert len(steps) >= 45
    assert steps[0] < 100
    assert steps[-1] > 3900
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    assert max(gaps) < 200
