"""Launches: what is wrong with one, the first collective of all ranks, the strategy that runs."""

import re
import subprocess
import sys
import textwrap
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from launching import free_port, quiet_environment

from utils.config.errors import ConfigurationError
from utils.launch.processes import LaunchFacts, check_launch, check_strategy, launch_problem

ROOT = Path(__file__).parents[3]


def test_a_launch_that_went_wrong_is_explained(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    for environment, processes, visible_gpus, message in [
        ({"WORLD_SIZE": "2"}, 1, 0, r"n1: .*started 2 processes, .* connected 1.*--use_cpu"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, 1, 1, r"srun started 4 copies.*--ntasks-per-node=1"),
        ({}, 1, 4, r"4 GPUs are visible.*CUDA_VISIBLE_DEVICES=0.*launch_node.sh"),
        ({"MASTER_ADDR": "n1"}, 1, 1, None),
        ({"WORLD_SIZE": "8", "SLURM_STEP_NUM_TASKS": "2"}, 8, 4, None),
        ({"WORLD_SIZE": "1"}, 1, 4, None),
    ]:
        problem = launch_problem(environment, processes, visible_gpus)
        assert (problem is None) == (message is None)
        assert message is None or re.search(message, problem)


@pytest.mark.parametrize(
    ("requested", "kind", "number", "refused"),
    [
        ("fsdp2", "MULTI_CPU", 0, "asked for fsdp2, but accelerate runs ddp on cuda"),
        ("fsdp2", "FSDP", 1, "asked for fsdp2, but accelerate runs fsdp1"),
        ("single", "DEEPSPEED", 2, "asked for single, but accelerate runs zero2"),
        ("single", "NO", 0, None),
        ("fsdp2", "FSDP", 2, None),
        ("zero_file", "DEEPSPEED", 3, None),
    ],
)
def test_another_strategy_than_asked_for_is_refused(monkeypatch, requested, kind, number, refused):
    from accelerate.utils import DistributedType

    state = SimpleNamespace(
        distributed_type=DistributedType(kind),
        fsdp_plugin=SimpleNamespace(fsdp_version=number),
        deepspeed_plugin=SimpleNamespace(zero_stage=number),
    )
    monkeypatch.setattr("accelerate.state.AcceleratorState", lambda: state)
    with pytest.raises(ConfigurationError, match=refused) if refused else nullcontext():
        check_strategy(LaunchFacts(0, 1, requested, ("n1",), "cuda"))


def test_one_process_passes_unless_more_were_started(monkeypatch):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    Accelerator(cpu=True)
    check_strategy(check_launch())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="started 2 processes"):
        check_launch()


# What each of two ranks does; {trouble} is what goes wrong in it.
RANK = """
    import os, sys, time
    import torch.distributed as dist
    from accelerate import PartialState
    from utils.launch import processes as launch
    from utils.launch.script import run_script

    rank = int(os.environ["RANK"])
    launch.FIRST_COLLECTIVE_LIMIT_S = 2

    def main():
        PartialState(cpu=True)
        {trouble}
        print(launch.check_launch())
        dist.barrier()

    sys.exit(run_script(main))
"""


def run_ranks(trouble: str) -> list[tuple[int, str]]:
    """The exit code and all output of each rank; they have names of hosts, n0, n1, ..."""
    program = textwrap.dedent(RANK).replace("{trouble}", trouble)
    port = str(free_port())
    common = {
        "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": port,
        "MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=quiet_environment(common | {"RANK": rank, "SLURMD_NODENAME": f"n{rank}"}),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    outputs = [process.communicate(timeout=60)[0] for process in started]
    return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "trouble", ["time.sleep(4); os._exit(9)", "dist.all_gather_object = lambda *_: time.sleep(99)"]
)
def test_a_first_collective_that_one_rank_misses_or_that_is_stuck_ends_in_time(trouble):
    begin = time.monotonic()
    (code, output), _ = run_ranks(f"if rank == 1: {trouble}")
    assert code == 69, output
    said = "n0 rank 0 of 2: the first collective of all ranks (cpu) did not end within 2 s. If a "
    assert said in output
    assert time.monotonic() - begin < 40
