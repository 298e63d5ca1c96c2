"""On a real Slurm: max_gpu_hours, the hours of a job that lost a rank, and the page of a folder."""

import datetime
import shutil
from pathlib import Path

import pytest
import tiny
from launching import wait_until
from slurm_cluster import Job
from training_jobs import STEPS, JobProcesses, TrainingJobs, raw_journal

import status
from utils.host.run_lock import run_owners
from utils.launch import verdict
from utils.observe.history import read_run
from utils.observe.hours import hours_of
from utils.observe.run_state import queued_jobs, read_status

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("idle")]
TWO_NODES = "--nodes=2", "--gpus-per-node=2"
RANKS = 4
AT = 13  # three steps after a save


@pytest.fixture(autouse=True)
def _queue(jobs: TrainingJobs, tmp_path, monkeypatch):
    """Let status.py ask this Slurm, and let it know only the submitted jobs of this test."""
    monkeypatch.setenv("SLURM_CONF", jobs.slurm.environment({})["SLURM_CONF"])
    monkeypatch.setattr(verdict, "_ROOT", tmp_path)


def test_a_budget_stops_a_job_and_a_larger_one_continues_it_to_the_same_bits(
    jobs: TrainingJobs, tmp_path
):
    run, told, hold, command = (tmp_path / name for name in ("run", "told", "hold", "tell"))
    command.write_text(f'#!/bin/sh\necho "$1: $4" >>{told}\n')
    command.chmod(0o755)
    env = {"STOKER_ON_EVENT": str(command), "STOKER_TEST_HOLD": str(hold)}

    def submit(max_gpu_hours: float) -> Job:
        return jobs.submit(
            run, *TWO_NODES, config="multi_gpu", env=env, max_gpu_hours=max_gpu_hours
        )

    # A budget below the time of a start: one step, a checkpoint, exit code 0, no requeue.
    job = submit(1e-4)
    assert jobs.slurm.wait(job) == "COMPLETED", job.output()
    assert jobs.slurm.fields(job)["Restarts"] == "0"
    check_stop(run, job, told)

    # The same budget again starts nothing.
    job = submit(1e-4)
    assert jobs.slurm.wait(job) == "FAILED", job.output()
    assert jobs.slurm.fields(job)["ExitCode"] == "2:0"
    assert "Nothing was started: give a larger --max_gpu_hours" in " ".join(job.output().split())
    assert read_status(run, queued_jobs()).state == "stopped"
    assert len(tiny.starts(run)) == 1

    # A larger one continues. A rank is lost at step 13, and the ranks start again in the job.
    hold.mkdir()
    (hold / str(AT)).touch()
    job = submit(1000)
    jobs.wait_for_step(run, AT, job)

    def trained_s() -> float:
        return next(run_owners(run)).spent.get("training", 0.0)

    old = trained_s()  # perhaps of a heartbeat before the last save
    wait_until(lambda: trained_s() > old, "no heartbeat after the step", job.output)
    before = trained_s()
    wait_until(lambda: trained_s() > before + 4, "no heartbeat with four more seconds", job.output)
    JobProcesses(job).ranks()[1].kill()
    wait_until(lambda: len(tiny.starts(run)) == 3, "no restart", job.output)
    (hold / str(AT)).unlink()
    assert jobs.slurm.wait(job) == "COMPLETED", job.output()
    assert "restart 1 of at most 3 inside the job" in job.output()
    tiny.assert_same_run(run, jobs.finished())
    assert tiny.starts(run)[1]["changed"] == {"max_gpu_hours": 1000.0}
    check_hours(run, jobs.slurm.fields(job))
    print(read_status(run, {}).hours)


def check_stop(run: Path, job: Job, told: Path) -> None:
    """Check what a stop at 0.0001 hours leaves: a checkpoint, no model, its reason everywhere."""
    assert not (run / "final").exists()
    stopped = raw_journal(run)[-1]
    assert stopped["event"] == "stopped"
    step = stopped["step"]
    assert step < AT
    assert (run / f"checkpoint-{step}" / "manifest.json").is_file()
    said = f"stopped at step {step} with {run}/checkpoint-{step}: max_gpu_hours 0.0001"
    assert f"{said}; a larger value continues" in job.output()
    assert told.read_text() == f"stopped: {said}; a larger value continues\n"
    found = read_status(run, queued_jobs())
    assert (found.state, found.step) == ("stopped", step)
    assert "with a checkpoint: max_gpu_hours ends in" in found.because
    assert found.advice.startswith("resume with a larger --max_gpu_hours: ")


def check_hours(run: Path, fields: dict[str, str]) -> None:
    """Check all parts, and their sum: the time that Slurm gave the ranks their nodes."""
    history = read_run(run)
    hours = hours_of(history)
    first, lost, last = history.starts
    seconds = {name: 3600 * each / RANKS for name, each in hours.parts.items()}
    for part in ("training", "evaluation", "saves", "starts", "between restarts", "lost"):
        assert seconds[part] > 0, part
    assert seconds["hangs"] == 0
    assert lost.lost_steps == AT - 10
    assert seconds["lost"] >= 3, "the ranks waited so long after the save"
    assert seconds["between restarts"] == pytest.approx(last.owner.since - lost.ended)
    began = [start.job["start_time"] for start in history.starts]
    in_jobs = (first.ended - began[0]) + (last.ended - began[2])
    assert hours.total == pytest.approx(RANKS * in_jobs / 3600)
    times = [datetime.datetime.fromisoformat(fields[name]) for name in ("StartTime", "EndTime")]
    assert last.ended - began[2] <= (times[1] - times[0]).total_seconds() + 2
    assert "process-hours: training" in str(hours)


def test_the_page_of_a_folder_with_a_waiting_a_failed_and_a_finished_run(
    jobs: TrainingJobs, tmp_path, capsys
):
    runs = tmp_path / "runs"
    shutil.copytree(jobs.finished(), runs / "finished")
    job = jobs.submit(
        runs / "failed", script="slurm/train_job.sh", config="multi_gpu", learning_rate=1e30,
        max_grad_norm=1e30, env={"STOKER_PROCESSES_PER_NODE": "1"},
    )  # fmt: skip
    assert jobs.slurm.wait(job) == "FAILED", job.output()
    job = jobs.submit(runs / "new", "--hold", script="slurm/train_job.sh")
    verdict.note_submitted(job.id, runs / "new", str(job.log))
    assert status.main(["--all", str(runs), "--html"]) == 0
    assert capsys.readouterr().out.startswith(f"{runs}/runs.html: 2 runs")
    page = (runs / "runs.html").read_text()
    for state in ("finished", "failed", "waiting"):
        assert f'<span class="badge {state}">' in page, state
    assert f'<b>new</b><br><span class="soft">job {job.id}</span>' in page
    assert page.count("<polyline") >= 1
    assert f"{STEPS} <span" in page
    jobs.slurm.cancel_all()
