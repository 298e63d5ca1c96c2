"""The state of runs, from made-up directories in every state: without torch; damage is named."""

import dataclasses
import datetime
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

import status
from utils.checkpoints.files import FileRecord, Manifest, write_manifest
from utils.config.errors import ConfigurationError
from utils.host import run_lock
from utils.host.run_lock import _machine
from utils.launch import verdict
from utils.observe import history, run_state, status_lines
from utils.observe.endings import Job
from utils.observe.page import write_pages
from utils.observe.run_state import queued_jobs, read_status, runs_below

ROOT = Path(__file__).parents[3]
SLURM = {"job_id": "7", "job_name": "train", "nodes": "2", "restart_count": "1"}
ELSEWHERE = {"machine": "another boot", "pid": 4711, "host": "n9", "job": "7"}
ELSEWHERE["since"] = "2026-01-01 00:00:00+00:00"
HERE = ELSEWHERE | {"machine": _machine(), "host": "n1", "job": None}


def make_run(directory, *, slurm=None, starts=1, owner=None, left=False, error=None, age_s=1.0):
    """Make a run as `starts` starts leave it; the owner's last heartbeat is `age_s` old."""
    directory.mkdir(parents=True)
    start = {
        "script": "pretrain.py", "argv": ["pretrain.py", "--config", "my run.yaml"], "slurm": slurm,
        "launch": {"world_size": 16 if slurm else 1}, "time": "2026-01-01T00:00:01+00:00",
    }  # fmt: skip
    (directory / "provenance.json").write_text(
        json.dumps({"run_id": "a", "starts": [start] * starts})
    )
    if owner:
        (directory / run_lock.LOCK_FOLDER).mkdir()
        path = directory / run_lock.LOCK_FOLDER / "owner-1"
        path.write_text(json.dumps({"owner": owner, "beat": 3, "left": left, "error": error}))
        os.utime(path, (time.time() - age_s, time.time() - age_s))
    return directory


def journal(directory, *lines, before_s=0.0):
    """Append lines two seconds apart to the journal; the last line is `before_s` old."""
    now = time.time() - before_s - 2 * len(lines)
    with (directory / "metrics.jsonl").open("a") as file:
        for number, line in enumerate(lines, 1):
            file.write(json.dumps(line | {"time": now + 2 * number}) + "\n")


def started(step=0):
    return {"event": "resumed" if step else "started", "step": step, "max_steps": 100}


def trained(step, rate=1000.0, **more):
    return {
        "event": "train", "step": step, "loss": 5 - step / 100, "tokens_seen": 64 * step,
        "tokens_per_s": rate, "step_time_s": 1.0, "max_steps": 100, **more,
    }  # fmt: skip


def evaluated(step, split="a"):
    return {"event": "eval", "step": step, "split": split, f"eval_{split}_loss": 4 - step / 100}


def saved(directory, step, run_id="a"):
    checkpoint = directory / f"checkpoint-{step}"
    checkpoint.mkdir()
    manifest = Manifest(
        run_id, 1, "single", 4, step=step, files={"model.safetensors": FileRecord(3000, "0")},
        time=time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - 60)),
    )  # fmt: skip
    write_manifest(checkpoint, manifest)


def squeue(**jobs):
    return {id_[1:]: Job(id_[1:], *rest) for id_, rest in jobs.items()}


WAITING = squeue(j7=("PENDING", "Priority", None, "train"))
RUNNING = squeue(j7=("RUNNING", "None", 30.0, "train"))
NEW = squeue(j7=("RUNNING", "None", 30.0, "train", time.time() + 3600))
STEPS = [started(), *map(trained, range(10, 60, 10)), evaluated(50)]


@pytest.mark.parametrize(
    ("name", "owner", "left", "age_s", "last", "jobs", "state", "because"),
    [
        ("beats", ELSEWHERE, False, 3, None, RUNNING, "running", "process 4711 on n9"),
        ("starts again", ELSEWHERE, False, 3, {"event": "stopped"}, RUNNING, "running", "process"),
        ("new start", ELSEWHERE, True, 3, {"event": "stopped"}, NEW, "starting", "job 7 started"),
        ("hangs", ELSEWHERE, False, 300, None, RUNNING, "running",
         "no heartbeat from n9 for 5m"),
        ("waits", ELSEWHERE, True, 9, {"event": "stopped"}, WAITING, "waiting",
         "job 7 is in the queue: Priority"),
        ("waits, killed", ELSEWHERE, False, 900, None, WAITING, "waiting", "job 7 is in the queue"),
        ("stopped", ELSEWHERE, True, 9, {"event": "stopped"}, {}, "stopped",
         "at step 50 before a save"),
        ("killed", ELSEWHERE, False, 300, None, {}, "failed",
         "process 4711 on n9 sent no heartbeat for 5m"),
        ("killed here", HERE | {"pid": 2**22 + 1}, False, 2, None, {}, "failed",
         "process 4194305 on n1 is gone: killed"),
        ("killed here, job runs", HERE | {"pid": 2**22 + 1}, False, 2, None, RUNNING, "failed",
         "its node is down; its job still runs and may start the ranks again"),
        ("alive here", HERE | {"pid": os.getpid()}, False, 2, None, {}, "running", "process"),
        ("left", ELSEWHERE, True, 9, None, {}, "failed", "left no reason"),
        ("finished early", ELSEWHERE, True, 9, {"event": "summary"}, {}, "finished",
         "early stopping at step 50; "),
        ("finished, in a job of more", ELSEWHERE, True, 9, {"event": "summary"}, RUNNING,
         "finished", "final/ holds"),
        ("writes final/", ELSEWHERE, False, 2, {"event": "summary"}, RUNNING, "running", "process"),
        ("died at the end", ELSEWHERE, False, 300, {"event": "summary"}, {}, "failed",
         "no heartbeat"),
    ],
)  # fmt: skip
def test_the_state_is_told_by_the_lock_the_queue_and_the_last_event(
    name, owner, left, age_s, last, jobs, state, because, tmp_path
):
    run = make_run(tmp_path / "run", slurm=SLURM, owner=owner, left=left, age_s=age_s)
    journal(run, *STEPS, *([last | {"step": 50}] if last else []))
    (run / "final").mkdir()
    found = read_status(run, jobs)
    assert (found.state, because in found.because) == (state, True), found.because
    assert (found.step, found.max_steps) == (50, 100)
    assert found.damaged == []


@pytest.mark.parametrize("event", [None, "stopped", "summary"])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("age_s", [3, 300])
@pytest.mark.parametrize("final", [False, True])
def test_status_and_report_tell_the_same_of_a_run(event, left, age_s, final, tmp_path, monkeypatch):
    """status.py reads only the beginning and end of the journal, report.py all of it."""
    monkeypatch.setattr(history, "TAIL_BYTES", 200)
    run = make_run(tmp_path / "run", slurm=SLURM, owner=ELSEWHERE, left=left, age_s=age_s)
    journal(run, *STEPS, *([{"event": event, "step": 50}] if event else []))
    if final:
        (run / "final").mkdir()
    page = write_pages([run], None, None).read_text()
    word = re.search(r'class="badge (\w+)"', page)[1]
    state = read_status(run, {}).state
    finishing = (event, left, age_s, final) == ("summary", False, 3, True)
    assert state == ("running" if finishing else word.replace("interrupted", "failed"))


def refused(run, job=None, *, number=2, since="2026-01-01 09:00:00+00:00", age_s=5.0):
    """Write the lock of a start that was refused before it had an entry in provenance.json."""
    who = ELSEWHERE | {"since": since, "pid": 4712, "job": job}
    content = {"owner": who, "beat": 1, "left": True, "error": "configuration error: its seed is"}
    path = run / ".lock" / f"owner-{number}"
    path.write_text(json.dumps(content | {"phase": "starting"}))
    os.utime(path, (time.time() - age_s, time.time() - age_s))


@pytest.mark.parametrize(
    ("name", "left", "last", "jobs", "state", "because"),
    [
        ("killed", False, None, {}, "failed", "process 4711 on n9 is gone: killed"),
        ("failed", True, None, {}, "failed", "its last start ended early"),
        ("stopped", True, {"event": "stopped"}, {}, "stopped", "at step 50 with a checkpoint"),
        ("finished", True, {"event": "summary"}, {}, "finished", "final/ holds the model"),
        ("waits", False, None, WAITING, "waiting", "job 7 is in the queue: Priority"),
        ("died at the end", False, {"event": "summary"}, {}, "failed", "is gone: killed"),
    ],
)
def test_a_refused_start_is_a_remark_and_not_the_state(
    name, left, last, jobs, state, because, tmp_path
):
    run = make_run(tmp_path / "run", slurm=SLURM, owner=ELSEWHERE, left=left, age_s=9)
    journal(run, *STEPS, *([last | {"step": 50}] if last else []))
    saved(run, 50)
    (run / "final").mkdir()
    before = read_status(run, jobs)
    refused(run, age_s=7205)
    refused(run, number=3)
    found = read_status(run, jobs)
    assert (found.state, because in found.because) == (state, True), found.because
    assert found.refused == "configuration error: its seed is (5s ago)"
    assert "refused   configuration error: its seed is (5s ago)" in shown(found)
    assert (before.refused, found.step, found.saved_step) == (None, 50, 50)
    assert "configuration error" not in f"{found.error} {found.because} {found.advice}"
    if state in ("failed", "stopped"):
        assert found.advice.startswith("resume: ")


def test_a_start_that_claimed_the_run_or_is_the_only_one_tells_the_state(tmp_path):
    run = make_run(tmp_path / "run", owner=ELSEWHERE)
    record = json.loads((run / "provenance.json").read_text())
    record["starts"].append(record["starts"][0] | {"time": "2026-01-01T09:00:02+00:00"})
    (run / "provenance.json").write_text(json.dumps(record))
    journal(run, *STEPS)
    refused(run)
    found = read_status(run, {})
    assert (found.state, found.refused) == ("failed", None)
    assert found.error == "configuration error: its seed is"
    (run / "provenance.json").unlink()
    (run / ".lock" / "owner-1").unlink()
    found = read_status(run, {})
    assert (found.state, found.error) == ("failed", "configuration error: its seed is")
    refused(run, number=9, age_s=1)  # a newer owner, made alive below
    newest = json.loads((run / ".lock" / "owner-9").read_text()) | {"left": False, "error": None}
    (run / ".lock" / "owner-9").write_text(json.dumps(newest))
    found = read_status(run, {})
    assert (found.state, found.refused) == ("running", None)


def test_progress_pace_and_losses_are_those_of_what_was_not_undone(tmp_path):
    run = make_run(tmp_path / "run", starts=2, owner=HERE | {"pid": os.getpid()})
    record = json.loads((run / "provenance.json").read_text())
    resumed_at = datetime.datetime.fromtimestamp(time.time() - 20, datetime.UTC)
    record["starts"][1]["time"] = resumed_at.isoformat(timespec="seconds")
    (run / "provenance.json").write_text(json.dumps(record))
    journal(run, *STEPS, trained(60), evaluated(60), before_s=100)
    saved(run, 40)
    saved(run, 55, run_id="a")
    (run / "checkpoint-60").mkdir()  # being written
    resumed = [trained(step, 500.0, mfu=0.4) for step in range(56, 61)]
    journal(run, started(55), *resumed, before_s=3)
    found = read_status(run, {})
    assert (found.step, found.loss, found.tokens) == (60, pytest.approx(4.4), 64 * 60)
    assert found.evaluations == {"a": (3.5, 50)}, "that of step 60 was undone"
    assert (found.tokens_per_s, found.tokens_per_s_at_start, found.mfu) == (500, 1000, 0.4)
    assert found.left_s == pytest.approx(2.0 * 40), "by the clock, not by step_time_s"
    assert found.logged_ago_s == pytest.approx(3, abs=1)
    assert (found.saved_step, found.saved_bytes, found.starts) == (55, 3000, 2)
    assert found.saved_ago_s == pytest.approx(60, abs=3)


def test_a_long_journal_is_read_at_its_ends_alone(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    journal(run, started(), *(trained(step, 900.0) for step in range(1, 10)))
    journal(
        run, *(trained(step, 500.0, memory_by_rank=[{"x": "x" * 500}]) for step in range(10, 90))
    )
    monkeypatch.setattr(history, "TAIL_BYTES", 5000)
    monkeypatch.setattr(history, "HEAD_BYTES", 1500)
    found = read_status(run, {})
    assert (found.step, found.max_steps, found.tokens_per_s_at_start) == (89, 100, 900)
    assert found.left_s == pytest.approx(11 * 2)


def test_the_last_error_is_the_verdict_of_all_ranks_or_the_last_words_of_the_first(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(verdict, "_ROOT", tmp_path)
    error = "storage error: no space"
    for job, folder in ((SLURM, "job-7.1"), (SLURM | {"array_job_id": "6", "array_task_id": "2"},
                                             "job-6_2.1")):  # fmt: skip
        run = make_run(tmp_path / folder, slurm=job, owner=ELSEWHERE, left=True, error=error)
        found = read_status(run, {})
        assert (found.error, found.because) == (error, "its last start ended early")
        left = tmp_path / ".stoker" / folder
        left.mkdir(parents=True)
        (left / "verdict.txt").write_text("rank 3 on n2 was killed by SIGKILL\n")
        found = read_status(run, {})
        assert (found.state, found.error) == ("failed", "rank 3 on n2 was killed by SIGKILL")
    again = "slurm/submit.sh slurm/multinode_job.sh pretrain.py --config 'my run.yaml'"
    again += " (with your options of sbatch)"
    assert found.advice == f"start again: {again}"
    saved(run, 5)
    assert read_status(run, {}).advice == f"resume: {again}"


@pytest.mark.parametrize(
    ("slurm", "launch", "command"),
    [
        (None, {"world_size": 1}, "python"),
        (
            None, {"world_size": 2, "strategy": "ddp", "devices": ["cpu"]},
            "accelerate launch --config_file accelerate_configs/cpu.yaml --num_processes 2",
        ),
        (
            None, {"world_size": 4, "strategy": "ddp", "devices": ["L4"]},
            "accelerate launch --config_file accelerate_configs/multi_gpu.yaml --num_processes 4",
        ),
        (None, {"world_size": 2, "launcher": "slurm/launch_node.sh"}, "slurm/launch_node.sh"),
        ({"job_id": "7", "nodes": "1"}, {"world_size": 1}, "slurm/submit.sh slurm/train_job.sh"),
        ({"job_id": "7", "nodes": 2}, {}, "slurm/submit.sh slurm/multinode_job.sh"),
        ({"job_id": "7", "command": "slurm/submit.sh -t 9 slurm/my.sh "}, {"world_size": 1}, None),
        (
            {"job_id": "7", "nodes": 2},
            {"world_size": 4, "hosts": ["n1", "n2"], "devices": ["cpu"]},
            "ACCELERATE_USE_CPU=true STOKER_PROCESSES_PER_NODE=2 slurm/submit.sh "
            "slurm/multinode_job.sh",
        ),
        (
            None, {"world_size": 2, "devices": ["cpu"], "launcher": "slurm/launch_node.sh"},
            "ACCELERATE_USE_CPU=true STOKER_PROCESSES_PER_NODE=2 slurm/launch_node.sh",
        ),
    ],
)  # fmt: skip
def test_the_command_that_resumes_is_that_of_the_last_start(tmp_path, slurm, launch, command):
    run = make_run(tmp_path / "run", owner=ELSEWHERE, left=True)
    start = {"argv": ["pretrain.py", "--seed", "1"], "slurm": slurm, "launch": launch}
    start["time"] = "2026-01-01T00:00:01+00:00"
    (run / "provenance.json").write_text(json.dumps({"run_id": "a", "starts": [start]}))
    expected = f"{command} pretrain.py --seed 1"
    if slurm:
        expected += " (with your options of sbatch)"
    if command is None:
        expected = "slurm/submit.sh -t 9 slurm/my.sh"
    assert read_status(run, {}).advice == f"start again: {expected}"


def test_a_pasted_line_has_no_limit_that_has_been_reached(tmp_path):
    run = make_run(tmp_path / "run", owner=ELSEWHERE, left=True)
    saved(run, 5)
    journal(run, {"step": 5, "event": "stopped", "reason": "max_gpu_hours ends in 3 s"})
    sweep = "slurm/submit.sh slurm/sweep_job.sh recipes/sweep/demo_cpu.yaml"
    for slurm, argv, command in [
        (None, ["a.py", "--max_gpu_hours", "0.02", "--seed", "1"], "python a.py --seed 1 {}"),
        (
            {"command": "slurm/submit.sh -t 9 train_job.sh a.py --max_gpu_hours=0.02 --seed 1 "},
            [], "slurm/submit.sh -t 9 train_job.sh a.py --seed 1 {}",
        ),
        ({}, ["a.py"], "python a.py {}"),
        (
            {"job_id": "7"}, ["a.py"],
            "slurm/submit.sh slurm/train_job.sh a.py {} (with your options of sbatch)",
        ),
        ({"command": sweep}, [], sweep),
    ]:  # fmt: skip
        start = {"argv": argv, "slurm": slurm, "time": "2026-01-01T00:00:01+00:00"}
        (run / "provenance.json").write_text(json.dumps({"run_id": "a", "starts": [start]}))
        expected = command.format("--max_gpu_hours HOURS")
        assert read_status(run, {}).advice == f"resume with a larger --max_gpu_hours: {expected}"


def test_after_a_wrong_sum_the_next_start_leaves_both_nodes_out(tmp_path):
    error = (
        "UnfitClusterError: step 12: loss 3 and 4, first on n1, then on n2. One of these nodes "
        "computes wrong. Submit the same command again with --exclude=n1,n2. If a third node agrees"
    )
    run = make_run(tmp_path / "run", owner=ELSEWHERE, left=True, error=error)
    advice = read_status(run, {}).advice
    assert advice.startswith("with --exclude=n1,n2, and no --nodelist, start again: ")


def test_memory_the_slowest_rank_and_the_pages_of_a_failure_are_shown(tmp_path):
    run = make_run(tmp_path / "run", owner=ELSEWHERE, left=True, error="out of memory")
    figures = {
        "memory_peak_gib": 61.24, "memory_free_gib": 9.0, "slowest_rank": 3, "slowest_host": "n2",
    }  # fmt: skip
    old = run / "out-of-memory-rank1.txt"
    old.write_text("of an earlier start")
    os.utime(old, (1, 1))
    journal(run, started(), *(trained(s, slowest_cost=s / 500, **figures) for s in (10, 20, 30)))
    text = shown(read_status(run, {}))
    assert "memory    61.2 GiB at its peak, 9.0 left\n" in text
    assert "slowest   rank 3 on n2: the other ranks wait for it 4.0% of each step\n" in text
    assert "page" not in text
    (run / "out-of-memory-rank0.txt").write_text("n2: out of memory")
    (run / "hang.txt").write_text("rank 1 hangs")
    journal(run, trained(40, memory_headroom_gib=5.5, **figures))
    text = shown(read_status(run, {}))
    assert "9.0 left" not in text
    assert "5.5 left" in text
    assert f"page      {run}/out-of-memory-rank0.txt, {run}/hang.txt\n" in text
    assert "next      change what the page says helps most, then start again: python" in text


def test_of_a_run_that_records_just_now_the_starts_before_are_uploaded(
    tmp_path, monkeypatch, capsys
):
    records = {}
    for name, owner in {"ended": None, "going": HERE | {"pid": os.getpid()}}.items():
        run = make_run(tmp_path / name, owner=owner)
        for start in ("1", "2"):
            folder = run / "wandb" / f"offline-run-{start}-a"
            folder.mkdir(parents=True)
            (folder / "run-a.wandb").touch()
        records[name] = sorted(run.rglob("*.wandb"))
    done = []
    monkeypatch.setattr(status_lines, "_upload", lambda file: not done.append(file))
    with pytest.raises(SystemExit):
        status.main(["--sync", "--watch"])
    assert status.main(["--all", str(tmp_path), "--sync"]) == 0
    assert done == [*records["ended"], records["going"][0]]
    assert f"wandb beta sync --live {records['going'][1]}\n" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["cut", "binary", "provenance", "manifest", "lock", "empty"])
def test_a_damaged_run_is_shown_and_the_damage_named(damage, tmp_path):
    run = make_run(tmp_path / "run", owner=ELSEWHERE, left=True)
    journal(run, *STEPS)
    saved(run, 40)
    saved(run, 50)
    files = {
        "provenance": run / "provenance.json", "lock": run / ".lock" / "owner-1",
        "manifest": run / "checkpoint-50" / "manifest.json",
    }  # fmt: skip
    if damage in files:
        files[damage].write_text('{"format": 1')
    elif damage == "empty":
        (run / "metrics.jsonl").write_text("")
    else:
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(b'{"event": "train", "st' if damage == "cut" else b"\xff\x00\n[1]\n7\n{}\n")
    found = read_status(run, {})
    assert found.state == "failed"
    assert found.step == (None if damage == "empty" else 50)
    assert found.saved_step == (40 if damage == "manifest" else 50)
    assert [Path(text.split()[0].rstrip(":")).name for text in found.damaged] == {
        "provenance": ["provenance.json"], "manifest": ["checkpoint-50"],
        "cut": ["metrics.jsonl"], "binary": ["metrics.jsonl"],
    }.get(damage, [])  # fmt: skip
    lines = {"cut": "1 damaged line skipped", "binary": "4 damaged lines skipped"}.get(damage, "")
    assert lines in shown(found)


def shown(*runs):
    console = Console(file=io.StringIO(), width=200)
    for run in runs:
        console.print(status_lines._status_lines(run), soft_wrap=True)
    return console.file.getvalue()


def test_the_time_left_is_compared_with_the_jobs_limit(tmp_path):
    run = make_run(tmp_path / "run", slurm=SLURM, owner=ELSEWHERE)
    journal(run, *STEPS)
    left = [read_status(run, squeue(j7=("RUNNING", "None", limit, "t"))) for limit in (5.0, 999.0)]
    assert left[0].left_s == pytest.approx(10)
    assert "10s at the pace so far; the job's time limit ends in 5s: it stops with" in shown(
        left[0]
    )
    assert "the job's time limit ends in 16m39s: enough" in shown(left[1])


def test_a_held_job_is_released_with_scontrol(tmp_path):
    run = make_run(tmp_path / "run", slurm=SLURM, owner=ELSEWHERE, left=True)
    journal(run, *STEPS, {"event": "stopped", "step": 50})
    held = squeue(j7=("PENDING", "JobHeldUser", None, "train"))
    assert read_status(run, held).advice.startswith("scontrol release 7 lets it start")


def fake_squeue(folder, text, code=0):
    folder.mkdir()
    (folder / "squeue").write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {code}\n")
    (folder / "squeue").chmod(0o755)
    return str(folder)


def test_jobs_are_read_from_squeue_which_may_be_absent_or_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(verdict, "_ROOT", tmp_path)
    verdict.note_submitted("8", tmp_path / "run", "log")
    rows = ["7|7|RUNNING|None|1-02:03:04|2026-11-27T06:00:00|train"]
    rows += ["8|6_[2-5%2]|PENDING|Resources|NOT_SET|N/A|a|b c", "slurm: noise"]
    monkeypatch.setenv("PATH", fake_squeue(tmp_path / "bin", "\n".join(rows)), prepend=":")
    assert queued_jobs() == squeue(
        j7=("RUNNING", "None", 93784.0, "train", datetime.datetime(2026, 11, 27, 6).timestamp())
    ) | {"8": Job("6", "PENDING", "Resources", None, "a|b c", None, str(tmp_path / "run"))}
    monkeypatch.setenv("PATH", fake_squeue(tmp_path / "down", "no controller", 1), prepend=":")
    assert queued_jobs() == {}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert queued_jobs() == {}


def test_a_page_of_other_users_asks_also_for_the_own_jobs(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", fake_squeue(tmp_path / "bin", ""), prepend=":")
    (tmp_path / "bin" / "squeue").write_text(f'#!/bin/sh\necho "$1" >{tmp_path}/asked\n')
    queued_jobs(["ann", "bob"])
    assert (tmp_path / "asked").read_text() == f"--user=ann,bob,{os.getuid()}\n"


def read_status_error(run):
    with pytest.raises(ConfigurationError) as refused:
        read_status(run, queued_jobs())
    return refused.value.problems[0]


def test_a_job_that_failed_before_its_run_began_is_shown_with_its_last_line(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(verdict, "_ROOT", tmp_path)
    queue = fake_squeue(tmp_path / "bin", "8|8|RUNNING|None|9:00|N/A|t")
    monkeypatch.setenv("PATH", queue, prepend=":")
    log, old, run = tmp_path / "train-7.log", time.time() - 60, tmp_path / "runs" / "a"
    log.write_text("job 7, start 1\nn1: there is no python on PATH\n\n")
    os.utime(log, (old, old))
    verdict.note_submitted("7", run, str(log))
    verdict.note_submitted("8", tmp_path / "runs" / "b", str(log))
    verdict.note_submitted("9", tmp_path / "runs" / "c", "cancelled before it had a log")
    said = f"job 7 ended before its run began: n1: there is no python on PATH; log: {log}"
    with pytest.raises(ConfigurationError, match=re.escape(f"is no run directory: {said}")):
        status.main([str(run)])
    assert "b: job 8 (t, RUNNING) has not begun this run yet" in read_status_error(
        tmp_path / "runs" / "b"
    )
    (tmp_path / "runs").mkdir(exist_ok=True)
    assert status.main(["--all", str(tmp_path / "runs")]) == 0
    shown_lines = " ".join(capsys.readouterr().out.split())
    assert "failed 7" in shown_lines
    assert "no python on PATH" in shown_lines
    assert "cancelled before" not in shown_lines
    assert status.main(["--all", str(tmp_path / "bin")]) == 0
    assert "python" not in capsys.readouterr().out, "of another folder"
    log.write_text(
        "x" * 10**6 + f"\n{'y' * 10**6}\n 99%\rno space left; HF_TOKEN hf_{'a' * 30}\r\n"
    )
    assert queued_jobs()["7"].reason == "no space left; HF_TOKEN ***"
    os.utime(log, (0, 0))
    assert "7" not in queued_jobs(), "long ago"
    log.write_text("job 7, start 1\nn1: there is no python on PATH\n\n")
    os.utime(log, (old, old))
    verdict.note_submitted("10", run, str(log))
    assert read_status_error(run).startswith(f"{run} is no run directory: job 10 "), "the newest"
    (tmp_path / ".stoker/submitted-10").unlink()
    make_run(run)  # its start is older than the log of job 7
    os.utime(log)
    assert read_status(run, queued_jobs()).refused == said
    make_run(tmp_path / "runs" / "b", slurm=SLURM)
    (run / "provenance.json").write_bytes((run.parent / "b" / "provenance.json").read_bytes())
    assert "7" not in queued_jobs(), "it has started the run"
    array = {**SLURM, "job_id": "11", "array_job_id": "7"}
    make_run(tmp_path / "runs" / "c", slurm=array)
    (run / "provenance.json").write_bytes((run.parent / "c" / "provenance.json").read_bytes())
    assert "7" not in queued_jobs(), "its array has started the run"


def test_the_command_shows_a_table_one_run_or_json(tmp_path, monkeypatch, capsys):
    row = "9|9|PENDING|Priority|NOT_SET|N/A|new"
    monkeypatch.setenv("PATH", fake_squeue(tmp_path / "bin", row), prepend=":")
    runs = tmp_path / "runs"
    running = make_run(runs / "one", owner=HERE | {"pid": os.getpid()})
    journal(running, *STEPS, trained(60) | {"loss": "NaN"})
    spoilt = runs / "sweep" / "lr-1"
    make_run(spoilt, owner=ELSEWHERE, left=True, error="not finite: step 3")
    facts = {"step": 3, "losses": [], "weights": [], "gradient_norm": "NaN", "documents": []}
    facts["documents_of"] = "the global batch"
    (spoilt / "nonfinite-step-3.json").write_text(json.dumps(facts))
    (runs / "sweep" / "log.txt").touch()
    assert runs_below(runs) == [running, runs / "sweep" / "lr-1"]
    assert "change what the log says, then start" in read_status(runs / "sweep" / "lr-1", {}).advice
    assert read_status(running, {}).tokens_per_s_at_start is None, "nothing to compare with yet"
    assert status.main(["--all", str(runs)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:5] == ["run", "state", "step", "%", "loss"]
    assert lines[1][:6] == ["one", "running", "60", "60", "nan", "3.5000"]
    assert lines[2] == ["sweep/lr-1", "failed", "not", "finite:", "step", "3"]
    assert lines[3][:4] == ["waiting", "9", "job", "new:"]
    assert status.main([str(running), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["state"], found["loss"], found["step"]) == ("running", "NaN", 60)
    assert set(found) == {field.name for field in dataclasses.fields(run_state.RunStatus)}
    assert status.main([str(running)]) == 0
    assert "next      touch" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match=r"is no run directory.*9 \(new, PENDING\)"):
        status.main([str(runs)])
    with pytest.raises(ConfigurationError, match="no such folder"):
        status.main(["--all", str(tmp_path / "none")])
    naps = iter([None, KeyboardInterrupt])

    def sleep(seconds):
        assert seconds == 7
        if (end := next(naps)) is not None:
            raise end

    monkeypatch.setattr(status_lines, "time", SimpleNamespace(sleep=sleep))
    assert status.main([str(running), "--watch", "7"]) == 0
    assert capsys.readouterr().out.count("tokens/s") >= 1


def test_it_starts_without_torch(tmp_path):
    make_run(tmp_path / "run")
    program = (
        "import sys, status; status.main(sys.argv[1:]);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run")], cwd=ROOT, check=False
    )
    assert done.returncode == 0


def test_a_run_without_wandb_records_names_the_setting_that_makes_them(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)  # no .env
    run = make_run(tmp_path / "run")
    assert status.main([str(run), "--sync"]) == 0
    assert (
        "no offline records in RUN/wandb; the setting report_to: wandb" in capsys.readouterr().out
    )


def test_the_reason_of_a_job_that_failed_is_one_sentence():
    job = Job("7", "FAILED", "- n1: no GPU: sbatch --exclude.", None, "train", log="x.log")
    assert (
        job.failure == "job 7 ended before its run began: n1: no GPU: sbatch --exclude; log: x.log"
    )
