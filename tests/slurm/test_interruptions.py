"""Whatever ends a job early, it comes back by itself and ends with the uninterrupted numbers.

`make slurm-cycles` keeps what each interruption cost in benchmarks/results/slurm_cycles.json.
"""

import dataclasses
import datetime
import json
import os
import platform
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny
from launching import processes_of, wait_until
from training_jobs import Cycle, cycles

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("idle")]

TWO_NODES = ("--nodes=2", "--gpus-per-node=2")


def assert_the_same(run: Path, uninterrupted: Path) -> None:
    """Not close: the same."""
    assert tiny.losses(run) == tiny.losses(uninterrupted)
    assert tiny.evaluations(run, "heldout") == tiny.evaluations(uninterrupted, "heldout")
    weights = "final/model.safetensors"
    assert (run / weights).read_bytes() == (uninterrupted / weights).read_bytes()


def record(cause: str, found: Sequence[Cycle]) -> None:
    """Print what interruptions cost, and keep it where `make slurm-cycles` wants it."""
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
    known["cycles"][cause] = [dataclasses.asdict(cycle) for cycle in found]
    path.write_text(json.dumps(known, indent=2) + "\n")


def test_whatever_ends_a_job_it_resumes_with_the_same_numbers(jobs, tmp_path):
    """Two jobs side by side: one meets its time limit, the other all further causes in turn."""
    limited_run, run = tmp_path / "limited", tmp_path / "run"
    # Forty steps take longer than the limit, a start-up a fraction of it: Slurm may send its
    # signal a minute early, and one minute once held no step on a busy machine.
    slowly = {"STOKER_TEST_STEP_DELAY_S": "2.8"}
    limit = ("--partition=other", "--time=2", "--signal=B:USR1@5")
    limited = jobs.submit(limited_run, *TWO_NODES, *limit, env=slowly)
    uninterrupted = jobs.finished("multi_gpu")

    survive_a_stop_and_losses(jobs, run)
    assert_the_same(run, uninterrupted)

    assert jobs.slurm.wait(limited, timeout_s=900) == "COMPLETED", limited.output()
    assert_the_same(limited_run, uninterrupted)
    found = cycles(limited_run)
    record("two-minute time limit", found)
    assert found, "the run was not interrupted"
    assert all(cycle.lost_steps == 0 for cycle in found)
    # More than cycles where the limit met a start before its first step or after its last one.
    restarts = int(jobs.slurm.fields(limited)["Restarts"])
    assert restarts == limited.output().count("; requeued, start") >= len(found)


def survive_a_stop_and_losses(jobs, run: Path) -> None:
    """Stop the job by SIGTERM and by the file, then kill a worker, then a whole node."""
    slurm = jobs.slurm
    job = jobs.submit(run, *TWO_NODES, env={"STOKER_TEST_STEP_DELAY_S": "0.4"})

    jobs.wait_for_step(run, 4, job)
    slurm.run("scancel", "--signal=TERM", job.id)

    jobs.wait_for_step(run, 12, job)
    (run / "STOP").touch()

    jobs.wait_for_step(run, 23, job)
    os.kill(worker(run, rank=3), signal.SIGKILL)

    jobs.wait_for_step(run, 33, job)
    slurm.kill_node("n2")
    # slurmctld notices, requeues the job, and waits for a second node.
    wait_until(lambda: slurm.state(job) == "PENDING", "not requeued", job.output)
    slurm.start_node("n2")

    assert slurm.wait(job) == "COMPLETED", job.output()
    found = cycles(run)
    # Slurm may end the job once more: what it meant for the lost node's old start comes late.
    causes = ["scancel --signal=TERM", "touch STOP", "SIGKILL to a worker", "node lost"]
    for cause, cycle in zip(causes, found, strict=False):
        record(cause, [cycle])
    assert [cycle.lost_steps for cycle in found[:2]] == [0, 0]
    starts = tiny.starts(run)[3:5]
    assert [start["resumed_from"].rsplit("-", 1)[1] for start in starts] == ["20", "30"]
    assert all(0 < cycle.lost_steps < 10 for cycle in found[2:4])
    log = job.output()
    assert f"{run}/STOP" in log
    assert not (run / "STOP").exists()
    assert "rank 3 on n" in log
    assert "was killed by SIGKILL" in log


def worker(run: Path, rank: int) -> int:
    """The process id of one rank of the run."""
    mark = f"RANK={rank}".encode()
    (process,) = (
        process
        for process in processes_of(run)
        if mark in (process / "environ").read_bytes().split(b"\0")
    )
    return int(process.name)
