"""Whatever ends a job early, it comes back by itself and ends with the uninterrupted numbers.

Every test prints its cycles; `make slurm-cycles` keeps them in benchmarks/results/.
"""

import dataclasses
import datetime
import json
import os
import platform
import signal
from pathlib import Path

import pytest
import tiny
from slurm_cluster import wait_until
from training_jobs import TrainingJobs, cycles

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("idle")]

SLOWLY = {"STOKER_TEST_STEP_DELAY_S": "0.4"}
TWO_NODES = ("--nodes=2", "--gpus-per-node=2")


@pytest.fixture(scope="module")
def uninterrupted(jobs: TrainingJobs, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    job = jobs.submit(run, *TWO_NODES)
    assert jobs.slurm.wait(job, 180) == "COMPLETED", job.output()
    return run


def assert_the_same(run: Path, uninterrupted: Path) -> None:
    """Not close: the same."""
    assert tiny.losses(run) == tiny.losses(uninterrupted)
    assert tiny.evaluations(run, "heldout") == tiny.evaluations(uninterrupted, "heldout")
    weights = "final/model.safetensors"
    assert (run / weights).read_bytes() == (uninterrupted / weights).read_bytes()


def came_back(jobs: TrainingJobs, job, run: Path, cause: str, timeout_s: float = 180) -> str:
    """Wait for the end, note what the interruptions cost, and return the log."""
    assert jobs.slurm.wait(job, timeout_s) == "COMPLETED", job.output()
    found = cycles(run)
    assert found, "the run was not interrupted"
    record(cause, [dataclasses.asdict(cycle) for cycle in found])
    return job.output()


def record(cause: str, found: list[dict]) -> None:
    print(f"{cause}: {found}")
    target = os.environ.get("STOKER_CYCLES_FILE")
    if not target:
        return
    path = Path(target)
    facts = {
        "command": "make slurm-cycles",
        "date": datetime.date.today().isoformat(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "cycles": {},
    }
    known = json.loads(path.read_text()) if path.exists() else facts
    known["cycles"][cause] = found
    path.write_text(json.dumps(known, indent=2) + "\n")


def test_the_time_limit(jobs, uninterrupted, tmp_path):
    run = tmp_path / "run"
    job = jobs.submit(
        run, *TWO_NODES, "--time=1", "--signal=B:USR1@5", env={"STOKER_TEST_STEP_DELAY_S": "1"}
    )
    log = came_back(jobs, job, run, "one-minute time limit", 300)
    assert_the_same(run, uninterrupted)
    assert "time limit" in log
    assert all(cycle.lost_steps == 0 for cycle in cycles(run))


def test_scancel_with_sigterm(jobs, uninterrupted, tmp_path):
    run = tmp_path / "run"
    job = jobs.submit(run, *TWO_NODES, env=SLOWLY)
    jobs.wait_for_step(run, 5, job)
    jobs.slurm.run("scancel", "--signal=TERM", job.id)
    came_back(jobs, job, run, "scancel --signal=TERM")
    assert_the_same(run, uninterrupted)
    assert [cycle.lost_steps for cycle in cycles(run)] == [0]


def test_touch_stop(jobs, uninterrupted, tmp_path):
    run = tmp_path / "run"
    job = jobs.submit(run, *TWO_NODES, env=SLOWLY)
    jobs.wait_for_step(run, 5, job)
    (run / "STOP").touch()
    log = came_back(jobs, job, run, "touch STOP")
    assert_the_same(run, uninterrupted)
    assert [cycle.lost_steps for cycle in cycles(run)] == [0]
    assert not (run / "STOP").exists()
    assert f"{run}/STOP" in log


def test_a_worker_killed(jobs, uninterrupted, tmp_path):
    run = tmp_path / "run"
    job = jobs.submit(run, *TWO_NODES, env=SLOWLY)
    jobs.wait_for_step(run, 13, job)
    os.kill(worker(run, rank=3), signal.SIGKILL)
    log = came_back(jobs, job, run, "SIGKILL to a worker")
    assert_the_same(run, uninterrupted)
    assert [tiny.starts(run)[1]["resumed_from"].rsplit("-", 1)[1]] == ["10"]
    assert "rank 3" in log
    assert "SIGKILL" in log


def test_a_node_lost(jobs, uninterrupted, tmp_path):
    run = tmp_path / "run"
    job = jobs.submit(run, *TWO_NODES, env=SLOWLY)
    jobs.wait_for_step(run, 13, job)
    jobs.slurm.kill_node("n2")
    # slurmctld notices, requeues the job, and waits for a second node.
    wait_until(lambda: jobs.slurm.state(job) == "PENDING", 90, "not requeued", job.output)
    jobs.slurm.start_node("n2")
    came_back(jobs, job, run, "node lost (slurmd and its steps killed)", 240)
    assert_the_same(run, uninterrupted)


def worker(run: Path, rank: int) -> int:
    """The process id of one rank of the run."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # ended meanwhile
        of_the_run = str(run) in command and f"RANK={rank}".encode() in environment
        if of_the_run and "python" in command[0]:
            return int(process.name)
    raise AssertionError(f"no process of rank {rank}")
