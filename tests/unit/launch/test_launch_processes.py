"""Launches: what is wrong with one, the first collective of all ranks, the strategy that runs."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from launching import free_port, quiet_environment

from utils.config.errors import ConfigurationError, ExitCode
from utils.launch import processes as launch
from utils.launch.processes import (
    LaunchFacts,
    actual_strategy,
    check_launch,
    check_strategy,
    launch_problem,
)

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("environment", "processes", "visible_gpus", "code", "message"),
    [
        ({"WORLD_SIZE": "2"}, 1, 0, 2, r"n1: .*started 2 processes, .* connected 1.*--use_cpu"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, 1, 1, 2, r"srun started 4 copies.*--ntasks-per-node=1"),
        ({}, 1, 4, 2, r"4 GPUs are visible.*CUDA_VISIBLE_DEVICES=0.*--num_processes 4"),
        (
            {"WORLD_SIZE": "2", "SLURM_STEP_GPUS": "0,1"}, 1, 0,
            ExitCode.UNFIT, r"SLURM_STEP_GPUS=0,1\), but torch sees none.* n1",
        ),
    ],
)  # fmt: skip
def test_a_launch_that_went_wrong_is_explained(
    environment, processes, visible_gpus, code, message, monkeypatch
):
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    problem = launch_problem(environment, processes, visible_gpus)
    assert problem.exit_code == code
    with pytest.raises(ConfigurationError, match=message):
        raise problem


@pytest.mark.parametrize(
    ("environment", "processes", "visible_gpus"),
    [
        ({}, 1, 0),
        ({"MASTER_ADDR": "n1"}, 1, 1),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}, 1, 1),
        ({"WORLD_SIZE": "8", "SLURM_STEP_NUM_TASKS": "2"}, 8, 4),
        ({"WORLD_SIZE": "1"}, 1, 4),
    ],
)
def test_a_sound_launch_has_no_problem(environment, processes, visible_gpus):
    assert launch_problem(environment, processes, visible_gpus) is None


@pytest.mark.parametrize(
    ("requested", "actual", "device", "message"),
    [
        ("fsdp2", "ddp", "cpu", "asked for fsdp2, but accelerate runs ddp.*need GPUs"),
        ("fsdp2", "fsdp1", "cuda", "asked for fsdp2, but accelerate runs fsdp1.*--fsdp"),
        ("zero2", "zero3", "cuda", "asked for zero2, but accelerate runs zero3"),
        ("single", "zero2", "cuda", "asked for single, but accelerate runs zero2"),
        ("single", "ddp", "cuda", None),
        ("fsdp2", "fsdp2", "cuda", None),
        ("zero_file", "zero3", "cuda", None),
    ],
)
def test_another_strategy_than_asked_for_is_refused(
    monkeypatch, requested, actual, device, message
):
    monkeypatch.setattr(launch, "actual_strategy", lambda: actual)
    facts = LaunchFacts(0, 1, requested, ("n1",), device)
    if message is None:
        check_strategy(facts)
        return
    with pytest.raises(ConfigurationError, match=message):
        check_strategy(facts)


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [("NO", "single"), ("MULTI_GPU", "ddp"), ("MULTI_CPU", "ddp"), ("FSDP", "fsdp2"),
     ("DEEPSPEED", "zero3")],
)  # fmt: skip
def test_the_actual_strategy_is_read_from_accelerates_state(monkeypatch, kind, strategy):
    from accelerate.utils import DistributedType

    state = SimpleNamespace(
        distributed_type=DistributedType(kind),
        fsdp_plugin=SimpleNamespace(fsdp_version=2),
        deepspeed_plugin=SimpleNamespace(zero_stage=3),
    )
    monkeypatch.setattr("accelerate.state.AcceleratorState", lambda: state)
    assert actual_strategy() == strategy


def test_one_process_passes_unless_more_were_started(monkeypatch):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    Accelerator(cpu=True)
    facts = check_launch()
    assert (facts.rank, facts.world_size) == (0, 1)
    assert (facts.strategy, facts.device, len(facts.hosts)) == ("single", "cpu", 1)
    check_strategy(facts)
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
    launch.FIRST_COLLECTIVE_LIMIT_S = 3

    def main():
        PartialState(cpu=True)
        {trouble}
        print(launch.check_launch())
        dist.barrier()

    sys.exit(run_script(main))
"""


def run_ranks(trouble: str, processes: int = 2) -> list[tuple[int, str]]:
    """The exit code and all output of each rank; they have names of hosts, n0, n1, ..."""
    program = textwrap.dedent(RANK).replace("{trouble}", trouble)
    port = str(free_port())
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=quiet_environment(
                {
                    "RANK": str(rank),
                    "LOCAL_RANK": "0",
                    "WORLD_SIZE": str(processes),
                    "LOCAL_WORLD_SIZE": "1",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "SLURMD_NODENAME": f"n{rank}",
                    "SLURM_STEP_NODELIST": "n[0-1]",
                    "PYTHONPATH": str(ROOT),
                }
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]
    ended = []
    for process in started:
        output, _ = process.communicate(timeout=60)
        ended.append((process.returncode, output))
    return ended


@pytest.mark.slow
def test_ranks_that_meet_know_each_others_hosts():
    for rank, (code, output) in enumerate(run_ranks("pass")):
        assert code == 0, output
        assert f"rank={rank}" in output
        assert "hosts=('n0', 'n1')" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("if rank == 1: time.sleep(5); os._exit(9)", "there is no sign of rank 1, n1."),
        (
            "if rank == 1: dist.all_gather_object = lambda *_: time.sleep(100)",
            "though all ranks are there. Look at the interface",
        ),
    ],
    ids=["absent", "stuck"],
)
def test_a_collective_that_never_ends_names_the_cause_and_does_not_keep_the_process(
    trouble, message
):
    begin = time.monotonic()
    (code, output), _ = run_ranks(trouble)
    assert code == 69, output
    said = "n0 rank 0 of 2: the first collective of all ranks (cpu) did not end within 3 s"
    assert said in output
    assert message in output
    assert time.monotonic() - begin < 40
