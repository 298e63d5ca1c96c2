"""Two processes meet, or say within the limit why they do not."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from launching import free_port, quiet_environment

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.slow

# What each of two ranks does; {trouble} is what goes wrong in it.
RANK = """
    import os, sys, time
    import torch.distributed as dist
    from accelerate import PartialState
    from utils.cluster import first_contact, launch
    from utils.cluster.script import run_script

    rank = int(os.environ["RANK"])
    first_contact.ARRIVAL_LIMIT_S = 3
    first_contact.COLLECTIVE_LIMIT_S = 3

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
                    "STOKER_NODE_HOSTS": "n0 n1",
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


def test_ranks_that_meet_know_each_others_hosts():
    for rank, (code, output) in enumerate(run_ranks("pass")):
        assert code == 0, output
        assert f"rank={rank}" in output
        assert "hosts=('n0', 'n1')" in output


def test_a_rank_that_never_comes_is_named_with_its_node():
    begin = time.monotonic()
    (code, output), _ = run_ranks("if rank == 1: time.sleep(5); os._exit(9)")
    assert code == 69, output
    assert "n0 rank 0 of 2: rank 1 did not come within 3 s (no rank at all of n1)" in output
    assert time.monotonic() - begin < 40


def test_a_collective_that_never_ends_is_said_and_does_not_keep_the_process():
    (code, output), (other, _) = run_ranks(
        "if rank == 1: dist.all_reduce = lambda tensor: time.sleep(100)"
    )
    assert (code, other) == (69, 69), output
    assert "cluster error on n0" in output
    assert "n0 rank 0 of 2: all ranks are there, but their first all-reduce (cpu)" in output
    assert "did not end within 3 s" in output
    assert "GLOO_SOCKET_IFNAME" in output
    assert "STOKER_DEBUG=1" in output


def test_a_collective_that_fails_is_said():
    (code, output), _ = run_ranks(
        "dist.all_reduce = lambda tensor: (_ for _ in ()).throw(RuntimeError('broken'))"
    )
    assert code == 69, output
    assert "first all-reduce (cpu) failed (broken)" in output


def test_a_wrong_sum_is_refused_naming_the_hosts():
    wrong = "honest = dist.all_reduce; dist.all_reduce = lambda x: (honest(x), x.add_(rank == 0))"
    (code, output), (other, _) = run_ranks(wrong)
    assert code == 69, output
    assert "n0 rank 0 of 2: the first all-reduce of all ranks gave 4, not 3" in output
    assert "(sbatch --exclude) to find it: n0, n1." in output
    assert other in (0, 1, 69)
