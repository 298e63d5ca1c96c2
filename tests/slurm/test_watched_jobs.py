"""On a real Slurm status.py shows queue and run, and the user's command gets the events."""

import pytest
from launching import wait_until
from training_jobs import TrainingJobs

from utils.observe.run_state import queued_jobs, read_status

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("idle")
def test_a_job_is_watched_and_tells_what_becomes_of_it(jobs: TrainingJobs, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", jobs.slurm.environment({})["SLURM_CONF"])
    run, told, command = tmp_path / "run", tmp_path / "told", tmp_path / "tell"
    command.write_text(f'#!/bin/sh\nprintf "%s|" "$@" >>{told}\necho >>{told}\n')
    command.chmod(0o755)
    env = {"STOKER_ON_EVENT": str(command), "STOKER_PROCESSES_PER_NODE": "1"}
    job = jobs.submit(run, script="slurm/train_job.sh", max_steps=60, env=env)
    jobs.wait_for_step(run, 3, job)
    status = read_status(run, queued_jobs())
    assert (status.state, status.job.id, status.job.state) == ("running", job.id, "RUNNING")
    assert 0 < status.job.left_s < 3600  # of --time=60
    (run / "STOP").touch()
    seen = [status]

    def waits() -> bool:  # for five seconds, until it starts again
        seen.append(read_status(run, queued_jobs()))
        return seen[-1].state == "waiting"

    wait_until(waits, "does not wait", job.output)
    assert f"job {job.id} is in the queue" in seen[-1].because
    assert f"scancel {job.id}" in seen[-1].advice
    assert {status.state for status in seen} <= {"running", "stopped", "waiting"}
    assert jobs.slurm.wait(job) == "COMPLETED", job.output()
    status = read_status(run, queued_jobs())
    assert (status.state, status.step, status.starts) == ("finished", 60, 2)
    first, last = told.read_text().splitlines()
    stopped = f"requeued|{run}|{job.id}|stopped with a checkpoint; start 2 will resume|"
    assert (first, last) == (stopped, f"finished|{run}|{job.id}|pretrain.py|")
