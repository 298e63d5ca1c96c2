"""Launches: their faults, the first collective of all ranks, the strategy that runs."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from launching import ROOT, free_port, quiet_environment

from utils.config.errors import ConfigurationError
from utils.launch import processes as module
from utils.launch.processes import (
    LaunchFacts,
    all_hosts,
    check_connected,
    check_launch,
    check_running_strategy,
)


def test_a_launch_that_went_wrong_is_explained(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    for environment, processes, visible_gpus, message in [
        ({"WORLD_SIZE": "2"}, 1, 0, r"n1: .*started 2 processes, .* connected 1.*--use_cpu"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, 1, 1, r"srun started 4 copies.*--ntasks-per-node=1"),
        ({}, 1, 4, r"4 GPUs are visible.*CUDA_VISIBLE_DEVICES=0.*launch_node.sh"),
        ({"WORLD_SIZE": "8", "SLURM_STEP_NUM_TASKS": "2"}, 8, 4, None),
        ({"WORLD_SIZE": "1"}, 1, 4, None),
    ]:
        for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        if message is None:
            check_connected(processes, visible_gpus)
        else:
            with pytest.raises(ConfigurationError, match=message):
                check_connected(processes, visible_gpus)


def test_another_strategy_than_asked_for_is_refused(monkeypatch):
    from accelerate.utils import DistributedType

    state = SimpleNamespace(
        distributed_type=DistributedType.DEEPSPEED,
        deepspeed_plugin=SimpleNamespace(zero_stage=2),
        fsdp_plugin=SimpleNamespace(fsdp_version=1),
        parallelism_config=None,
    )
    monkeypatch.setattr("accelerate.state.AcceleratorState", lambda: state)
    facts = LaunchFacts(0, 1, "zero_file", ("n1",), "cuda")
    check_running_strategy(facts)
    with pytest.raises(ConfigurationError, match="asked for zero3, but accelerate runs zero2"):
        check_running_strategy(replace(facts, strategy="zero3"))
    state.distributed_type = DistributedType.FSDP
    with pytest.raises(ConfigurationError, match="asked for fsdp2, but accelerate runs fsdp1"):
        check_running_strategy(replace(facts, strategy="fsdp2"))
    state.fsdp_plugin.fsdp_version = 2
    hybrid = replace(facts, strategy="fsdp2", world_size=8, replicas=4)
    with pytest.raises(ConfigurationError, match=r"for 4 copies .* accelerate runs 1: use acc"):
        check_running_strategy(hybrid)
    state.parallelism_config = SimpleNamespace(dp_replicate_size=4)
    check_running_strategy(hybrid)
    assert (hybrid.shards, hybrid.name) == (2, "hsdp")


def test_one_process_passes_unless_more_were_started(monkeypatch):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    Accelerator(cpu=True)
    check_running_strategy(check_launch())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="started 2 processes"):
        check_launch()


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:19883.", False),
        (
            "[gloo/transport/tcp/pair.cc] Read error [10.0.0.1]:9: Connection reset by peer",
            False,
        ),
        ("ncclRemoteError: remote process exited or there was a network error", False),
        ("NCCL error: unhandled system error\nsocketStartConnect: no route to host", True),
        ("Gloo connectFullMesh failed: Connection refused", True),
    ],
)
def test_a_rank_that_ends_in_the_first_collective_is_no_unfit_cluster(said, refused, monkeypatch):
    def fail(_):
        raise RuntimeError(said)

    monkeypatch.setattr(module, "gathered", fail)
    with pytest.raises((RuntimeError, ConfigurationError)) as found:
        all_hosts(1, torch.device("cpu"))
    assert isinstance(found.value, ConfigurationError) is refused, "which ends the job for good"
    assert said.splitlines()[0] in str(found.value)


# The program of two ranks. The second one hangs in the first collective.
RANK = """
import os, sys, time
import torch.distributed as dist
from accelerate import PartialState
from utils.launch import processes as launch
from utils.launch.script import run_script

launch.FIRST_COLLECTIVE_LIMIT_S = 2

def main():
    PartialState(cpu=True)
    if os.environ["RANK"] == "1":
        dist.all_gather_object = lambda *_, **__: time.sleep(9999)
    launch.check_launch()

sys.exit(run_script(main))
"""


@pytest.mark.slow
def test_a_first_collective_that_is_stuck_ends_in_time():
    common = {
        "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env=quiet_environment(common | {"RANK": rank, "SLURMD_NODENAME": f"n{rank}"}),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    output, _ = [process.communicate()[0] for process in ranks]
    assert ranks[0].returncode == 69, output
    said = "n0 rank 0: the first collective of all ranks (cpu) did not end within 2 s. If a "
    assert said in output
