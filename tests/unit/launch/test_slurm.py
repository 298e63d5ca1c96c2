"""The launch from Slurm's variables, and without Slurm."""

import datetime

import pytest

from utils.config.declarations import is_true
from utils.config.errors import ConfigurationError, UnfitClusterError
from utils.launch.slurm import (
    Allocation,
    expand_hosts,
    job_end_time,
    job_times,
    on_cpu,
    read_allocation,
)

# As Slurm 22.05 sets them for the second node of `srun -N2 --ntasks-per-node=1 --gres=gpu:4`.
STEP = {
    "SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1", "SLURM_JOB_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "4",
}  # fmt: skip


def test_a_slurm_step_is_read_from_its_variables():
    found = read_allocation(STEP, 7)  # torch sees seven GPUs, but Slurm's four count
    assert found == Allocation(("n1", "n2"), 1, 4, 4, "n1", 20310)
    assert (found.host, found.world_size) == ("n2", 8)
    found = read_allocation(STEP | {"STOKER_MAIN_ADDRESS": "10.0.0.1"}, 7)
    assert found.address == "10.0.0.1"


def test_the_cpu_is_asked_for_as_accelerate_and_deepspeed_read_it():
    from accelerate.utils.environment import str_to_bool

    for word in ("1", "True", "yes", "on", "Y", "t", "0", "false", "no", "off"):
        assert is_true("ACCELERATE_USE_CPU", {"ACCELERATE_USE_CPU": word}) == bool(
            str_to_bool(word)
        )
    assert on_cpu({"ACCELERATE_USE_CPU": "true"})
    assert on_cpu({"DS_ACCELERATOR": "cpu"})
    assert on_cpu({"ACCELERATE_CONFIG": "accelerate_configs/cpu.yaml"})
    others = {"DS_ACCELERATOR": "cuda", "ACCELERATE_CONFIG": "accelerate_configs/fsdp2.yaml"}
    assert not on_cpu(others)


def test_processes_follow_from_gpus_or_are_the_users(monkeypatch):
    on_cpu_step = STEP | {"ACCELERATE_USE_CPU": "true"}
    assert read_allocation(on_cpu_step, 7).processes == 1
    found = read_allocation(on_cpu_step | {"STOKER_PROCESSES_PER_NODE": "3"}, 7)
    assert (found.processes, found.gpus, found.world_size) == (3, None, 6)
    # The cluster does not count GPUs.
    step = {name: value for name, value in STEP.items() if name != "SLURM_GPUS_ON_NODE"}
    found = read_allocation(step | {"STOKER_PROCESSES_PER_NODE": "4"}, 7)
    assert (found.processes, found.gpus) == (4, 4)
    # Outside of Slurm.
    monkeypatch.setenv("SLURMD_NODENAME", "login1")
    found = read_allocation({}, 2)
    assert (found.hosts, found.processes, found.gpus) == (("login1",), 2, 2)
    assert (found.address, found.port) == ("127.0.0.1", 0)  # accelerate chooses a free port
    assert read_allocation({}, 0).processes == 1


NO_GPUS = STEP | {"SLURM_GPUS_ON_NODE": "0"}
BATCH = {"SLURM_JOB_ID": "5", "SLURM_NODEID": "0", "SLURM_GPUS_ON_NODE": "1"}


def test_allocations_that_cannot_train_are_refused():
    for environment, error, message in [
        (NO_GPUS, UnfitClusterError, r"asked for no GPUs.* ACCELERATE_USE_CPU=true in front"),
        (NO_GPUS | {"STOKER_PROCESSES_PER_NODE": "2"}, UnfitClusterError, "job asked for no GPUs"),
        (STEP | {"STOKER_PROCESSES_PER_NODE": "2"}, ConfigurationError, r"='2', but .* has 4 GPU"),
        (STEP | {"SLURM_STEP_NUM_TASKS": "8"}, ConfigurationError, r"are 8 tasks on 2 node"),
        (BATCH | {"SLURM_JOB_NUM_NODES": "2"}, ConfigurationError, "started by srun"),
        # A shell from salloc on the login node.
        ({"SLURM_JOB_ID": "5"}, ConfigurationError, "started by srun"),
        (STEP | {"STOKER_PROCESSES_PER_NODE": "0"}, ConfigurationError, "='0', but .* has 4 GPU"),
    ]:
        with pytest.raises(error, match=message):
            read_allocation(environment, 0 if error is UnfitClusterError else 7)
    assert read_allocation(BATCH, 7).world_size == 1


def test_a_node_list_names_its_hosts_in_order():
    for node_list, hosts in [
        ("n1", "n1"),
        ("gpu[008-011,020],x1", "gpu008 gpu009 gpu010 gpu011 gpu020 x1"),
        ("rack[1-2]n[3-4]-ib", "rack1n3-ib rack1n4-ib rack2n3-ib rack2n4-ib"),
    ]:
        assert " ".join(expand_hosts(node_list)) == hosts


def test_ports_differ_between_jobs_and_steps():
    ports = [
        read_allocation(STEP | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}, 0).port
        for job in range(123_000, 123_190)
        for step in range(20)
    ]
    assert len(set(ports)) == len(ports)
    assert 20000 <= min(ports) < max(ports) < 32767
    again = read_allocation(STEP | {"SLURM_JOB_ID": "123000", "SLURM_RESTART_COUNT": "1"}, 0).port
    assert again != ports[0], "a restart has another port"
    assert all(port % 2 == 0 for port in ports)  # the next port belongs to the job too


def test_the_environment_knows_the_end_else_squeue_is_asked(monkeypatch, tmp_path, caplog):
    def squeue(text: str, job: str) -> None:
        path = tmp_path / "squeue"
        asked = f"--noheader --jobs={job} --format=%e"
        path.write_text(f"#!/bin/sh\n[ \"$*\" = '{asked}' ] && echo '{text}'\n")
        path.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("SLURM_JOB_END_TIME", "SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    assert job_end_time() is None  # outside of a job
    end = datetime.datetime(2030, 1, 2, 3, 4, 5)
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    squeue(end.isoformat(), job="123")
    assert job_end_time() == end.timestamp()
    # The last task of an array has the array's own id. For that id squeue would show every task.
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "123")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "4")
    squeue(end.isoformat(), job="123_4")
    assert job_end_time() == end.timestamp()
    assert not caplog.records
    known = f"{end.isoformat()} 2030-01-02T04:04:05"
    (tmp_path / "squeue").write_text(f"#!/bin/sh\n[ \"$4\" != '' ] || echo '{known}'\n")
    times = {"submit_time": end.timestamp(), "start_time": end.timestamp() + 3600}
    assert job_times() == times
    squeue("N/A", job="123_4")
    assert job_end_time() is None
    (tmp_path / "squeue").unlink()  # no squeue at all
    assert job_end_time() is None
    assert caplog.text.count("the end of the time limit is unknown (squeue") == 2
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1893456000")
    assert job_end_time() == 1893456000.0
    assert job_times() == {}
    monkeypatch.setenv("SLURM_JOB_START_TIME", "1893450000")
    assert job_times() == {"start_time": 1893450000.0}
