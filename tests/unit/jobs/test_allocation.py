import pytest

from utils.config.errors import ConfigurationError, UnfitClusterError
from utils.launch.slurm import Allocation, allocated_gpus, on_cpu, read_allocation

# As Slurm 22.05 sets them for the second node of `srun -N2 --ntasks-per-node=1 --gres=gpu:4`.
STEP = {
    "SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1", "SLURM_JOB_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "4",
}  # fmt: skip


def no_devices() -> int:
    raise AssertionError("Slurm says what the job has")


def test_a_slurm_step_is_read_from_its_variables():
    found = read_allocation(STEP, no_devices)
    assert found == Allocation(("n1", "n2"), 1, 4, 4, "n1", 20310)
    assert (found.host, found.world_size) == ("n2", 8)
    given = {"STOKER_MAIN_ADDRESS": "10.0.0.1", "STOKER_MAIN_PORT": "4242"}
    found = read_allocation(STEP | given, no_devices)
    assert (found.address, found.port) == ("10.0.0.1", 4242)


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0"}, 8),
        ({"SLURM_STEP_GPUS": "0,1", "SLURM_JOB_GPUS": "0,1,2,3"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2,GPU-3"}, 3),
        ({"SLURM_JOB_GPUS": "4,5"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles", "SLURM_GPUS_PER_NODE": "h100:4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "2"}, 2),
        ({"SLURM_GPUS_PER_TASK": "8"}, 8),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({}, 0),
    ],
)
def test_gpus_are_counted_from_what_slurm_sets(variables, count):
    assert allocated_gpus(variables) == count


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("ACCELERATE_USE_CPU", "true", True),
        ("ACCELERATE_USE_CPU", "1", True),
        ("ACCELERATE_USE_CPU", "false", False),
        ("DS_ACCELERATOR", "cpu", True),
        ("DS_ACCELERATOR", "cuda", False),
        ("ACCELERATE_CONFIG", "accelerate_configs/cpu.yaml", True),
        ("ACCELERATE_CONFIG", "accelerate_configs/fsdp2.yaml", False),
    ],
)
def test_the_cpu_is_asked_for_as_accelerate_and_deepspeed_read_it(name, value, expected):
    assert on_cpu({name: value}) is expected


def test_on_a_cpu_the_user_says_how_many_processes():
    step = STEP | {"ACCELERATE_USE_CPU": "true"}
    assert read_allocation(step, no_devices).processes == 1
    found = read_allocation(step | {"STOKER_PROCESSES_PER_NODE": "3"}, no_devices)
    assert (found.processes, found.gpus, found.world_size) == (3, None, 6)


def test_outside_of_slurm_this_machine_is_the_job(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "login1")
    found = read_allocation({}, lambda: 2)
    assert (found.hosts, found.processes, found.gpus) == (("login1",), 2, 2)
    assert found.address == "127.0.0.1"
    found = read_allocation({"STOKER_PROCESSES_PER_NODE": "3"}, lambda: 0)
    assert (found.processes, found.gpus) == (3, None)
    assert read_allocation({}, lambda: 0).processes == 1


def test_a_cluster_that_does_not_count_gpus_is_told_how_many():
    step = {name: value for name, value in STEP.items() if name != "SLURM_GPUS_ON_NODE"}
    with pytest.raises(UnfitClusterError, match=r"n2: Slurm gave this job no GPU.*USE_CPU=true"):
        read_allocation(step, no_devices)
    found = read_allocation(step | {"STOKER_PROCESSES_PER_NODE": "4"}, no_devices)
    assert (found.processes, found.gpus) == (4, 4)


@pytest.mark.parametrize("given", ["0", "-1", "two", "2 ", "1;id", "\u0662", "99999"])
def test_a_number_of_processes_has_to_be_one(given):
    with pytest.raises(ConfigurationError, match="is no number of processes"):
        read_allocation(STEP | {"STOKER_PROCESSES_PER_NODE": given, "DS_ACCELERATOR": "cpu"}, int)


def test_processes_that_are_not_one_a_gpu_are_refused():
    with pytest.raises(ConfigurationError, match=r"=2, but n2 has 4 GPU.*unset"):
        read_allocation(STEP | {"STOKER_PROCESSES_PER_NODE": "2"}, no_devices)


def test_several_tasks_a_node_are_refused():
    step = STEP | {"SLURM_STEP_NUM_TASKS": "8"}
    with pytest.raises(ConfigurationError, match=r"8 tasks on 2 node.*--ntasks-per-node=1"):
        read_allocation(step, no_devices)


def test_a_job_without_a_step_is_refused_where_it_has_other_nodes():
    batch = {"SLURM_JOB_ID": "5", "SLURM_NODEID": "0", "SLURM_GPUS_ON_NODE": "1"}
    assert read_allocation(batch, no_devices).world_size == 1
    with pytest.raises(ConfigurationError, match=r"not by srun.*2 node"):
        read_allocation(batch | {"SLURM_JOB_NUM_NODES": "2"}, no_devices)
    del batch["SLURM_NODEID"]  # the shell that salloc gives, on the login node
    with pytest.raises(ConfigurationError, match="not by srun"):
        read_allocation(batch, no_devices)
