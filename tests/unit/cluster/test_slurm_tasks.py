import socket

import pytest

from utils.config.errors import ConfigurationError, UnfitClusterError
from utils.launch.slurm import (
    adopt_slurm_tasks,
    can_listen,
    expand_hosts,
    listen,
    main_port,
)

# As Slurm 22.05 sets them for the third task of `srun -N2 --ntasks-per-node=2`.
TASK = {
    "SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "2",
}  # fmt: skip
RANK = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("node_list", "hosts"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1 n2"),
        ("a,b", "a b"),
        ("gpu[008-011,020],x1", "gpu008 gpu009 gpu010 gpu011 gpu020 x1"),
        ("rack[1-2]n[3-4]-ib", "rack1n3-ib rack1n4-ib rack2n3-ib rack2n4-ib"),
    ],
)
def test_a_node_list_names_its_hosts_in_order(node_list, hosts):
    assert " ".join(expand_hosts(node_list)) == hosts


@pytest.mark.parametrize("node_list", ["", "n[1-2", "n[a-b]", "n[]", "n1,,n2"])
def test_what_is_no_node_list_is_refused(node_list):
    with pytest.raises(ConfigurationError, match="is no list of nodes"):
        expand_hosts(node_list)


def test_ports_of_neighbouring_jobs_and_steps_differ_and_are_not_ephemeral():
    ports = [
        main_port({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
        for job in range(123_000, 123_190)
        for step in range(20)
    ]
    assert len(set(ports)) == len(ports)
    assert min(ports) >= 20000
    assert max(ports) + 1 < 32768
    assert all(port % 2 == 0 for port in ports)  # the one after it is the job's too


def test_a_given_port_wins_and_has_to_be_one():
    assert main_port({"SLURM_JOB_ID": "5", "STOKER_MAIN_PORT": "4242"}) == 4242
    assert main_port({"SLURM_JOB_ID": "5", "STOKER_MAIN_PORT": ""}) == main_port(
        {"SLURM_JOB_ID": "5"}
    )
    for given in ("80", "65535", "4242; rm", "\u0664\u0662\u0664\u0662", "$(x)"):
        with pytest.raises(ConfigurationError, match=r"STOKER_MAIN_PORT=.* is no port"):
            main_port({"STOKER_MAIN_PORT": given})


def test_a_port_in_use_is_seen_on_whichever_address():
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0")):
        with socket.create_server((address, 0), family=family) as listener:
            assert not can_listen(listener.getsockname()[1])
    with listen(0) as listener:
        port = listener.getsockname()[1]
        assert not can_listen(port)
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    assert can_listen(port)


def test_a_task_of_several_becomes_a_rank():
    environment = dict(TASK)
    assert "srun's 4 tasks are the ranks" in adopt_slurm_tasks(environment)
    port = str(main_port(TASK))
    assert environment == TASK | RANK | {"MASTER_ADDR": "n1", "MASTER_PORT": port}
    environment = TASK | {"STOKER_MAIN_ADDRESS": "10.0.0.1", "STOKER_MAIN_PORT": "4242"}
    adopt_slurm_tasks(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.1", "4242")


@pytest.mark.parametrize(
    "changes",
    [
        {"RANK": "0"},
        {"WORLD_SIZE": "4"},
        {"ACCELERATE_MIXED_PRECISION": "no"},
        {"SLURM_STEP_NUM_TASKS": "1"},
    ],
    ids=["torchrun", "world", "accelerate", "one task"],
)
def test_other_launches_are_left_alone(changes):
    environment = TASK | changes
    assert adopt_slurm_tasks(environment) is None
    assert environment == TASK | changes
    batch = {"SLURM_JOB_ID": "5", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NODEID": "0"}
    assert adopt_slurm_tasks(dict(batch)) is None


@pytest.mark.parametrize(
    ("visible", "place"), [("0,1", ("1", "2")), ("1", ("0", "1")), ("", ("1", "2"))]
)
def test_a_task_bound_to_one_gpu_takes_number_0(visible, place):
    environment = TASK | {"SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": visible}
    adopt_slurm_tasks(environment)
    assert (environment["LOCAL_RANK"], environment["LOCAL_WORLD_SIZE"]) == place


def test_tasks_of_nodes_with_unequal_numbers_count_their_own():
    changes = {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_PROCID": "3"}
    environment = TASK | changes
    adopt_slurm_tasks(environment)
    assert environment["LOCAL_WORLD_SIZE"] == "1"


@pytest.mark.parametrize(("visible", "gpus"), [("0", "1"), ("0,1", "2")])
def test_more_tasks_than_gpus_are_refused(monkeypatch, visible, gpus):
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    tasks = {"SLURM_STEP_TASKS_PER_NODE": "3(x2)", "SLURM_STEP_NUM_TASKS": "6"}
    environment = TASK | tasks | {"CUDA_VISIBLE_DEVICES": visible, "SLURM_GPUS_ON_NODE": gpus}
    with pytest.raises(UnfitClusterError, match=rf"n2: 3 tasks share {gpus} GPU"):
        adopt_slurm_tasks(environment)


def test_rank_0_refuses_a_port_in_use(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    with listen(0) as listener:
        port = listener.getsockname()[1]
        environment = TASK | {"SLURM_PROCID": "0", "STOKER_MAIN_PORT": str(port)}
        with pytest.raises(UnfitClusterError, match=rf"n1: port {port} is in use .*unset STOKER"):
            adopt_slurm_tasks(environment)
        adopt_slurm_tasks(environment | {"SLURM_PROCID": "1"})


def test_a_strategy_that_nothing_would_read_is_refused():
    environment = TASK | {"ACCELERATE_CONFIG": "accelerate_configs/fsdp2.yaml"}
    with pytest.raises(ConfigurationError, match=r"fsdp2.yaml would be ignored.*launch_node.sh"):
        adopt_slurm_tasks(environment)
    assert adopt_slurm_tasks(TASK | {"ACCELERATE_CONFIG": "accelerate_configs/multi_gpu.yaml"})
