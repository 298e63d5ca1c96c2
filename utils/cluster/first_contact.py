"""The first collective of a run: every rank comes and one all-reduce is right, within a limit.

Without it a network that does not carry the ranks' traffic shows as a job that waits in silence,
for half an hour with the default time-out of process groups.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from utils.cluster.host import host_name
from utils.cluster.limits import call_within
from utils.config.errors import UnfitClusterError

if TYPE_CHECKING:
    import torch

# Ranks start apart: a node whose file cache is cold imports a minute longer.
ARRIVAL_LIMIT_S = 120.0
COLLECTIVE_LIMIT_S = 60.0
ADVICE = (
    "Look at the interface that carries the traffic (NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME: the "
    "name that `ip -brief address` shows on every node), at firewalls between the nodes, and at "
    "what STOKER_DEBUG=1 logs."
)


def meet_all_ranks(rank: int, world_size: int, device: "torch.device") -> tuple[str, ...]:
    """Return the host of every rank, once they have all come and summed a number together.

    Every rank of an initialised process group calls it. Raises UnfitClusterError, which names this
    host and rank, and ranks that did not come. The stuck collective then stays behind in a thread:
    end the process without its teardown, as `run_script` does.
    """
    _await_all(rank, world_size)
    problem = (
        f"{_name(rank, world_size)}: all ranks are there, but their first all-reduce "
        f"({device.type}) {{}}: the network between the nodes, or between the devices, does not "
        f"carry it. {ADVICE}"
    )
    try:
        hosts, total = call_within(
            COLLECTIVE_LIMIT_S, lambda: _sum_and_hosts(rank, world_size, device)
        )
    except TimeoutError:
        raise UnfitClusterError(
            problem.format(f"did not end within {COLLECTIVE_LIMIT_S:g} s")
        ) from None
    except RuntimeError as error:  # of which torch's DistError is one
        raise UnfitClusterError(problem.format(f"failed ({_first_line(error)})")) from error
    expected = world_size * (world_size + 1) // 2
    if total != expected:
        raise UnfitClusterError(
            f"{_name(rank, world_size)}: the first all-reduce of all ranks gave {total}, not "
            f"{expected}: a device or a network adapter computes wrongly. Leave nodes out one by "
            f"one (sbatch --exclude) to find it: {', '.join(sorted(set(hosts)))}."
        )
    return tuple(hosts)


def _name(rank: int, world_size: int) -> str:
    return f"{host_name()} rank {rank} of {world_size}"


def _await_all(rank: int, world_size: int) -> None:
    """Wait until all ranks have called this; name those that did not."""
    import torch.distributed as dist

    if "MASTER_ADDR" not in os.environ:
        return  # the process group met elsewhere (MPI): there is no store to ask
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    prefix = f"stoker/start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    try:
        store = dist.TCPStore(
            address, port, timeout=timedelta(seconds=COLLECTIVE_LIMIT_S), wait_for_workers=False
        )
        store.set(f"{prefix}/rank-{rank}", host_name())
        if store.add(f"{prefix}/count", 1) == world_size:
            store.set(f"{prefix}/all", "")
        try:
            store.wait([f"{prefix}/all"], timedelta(seconds=ARRIVAL_LIMIT_S))
            return
        except dist.DistStoreError:
            arrived = {
                number: store.get(f"{prefix}/rank-{number}").decode()
                for number in range(world_size)
                if store.check([f"{prefix}/rank-{number}"])
            }
    except dist.DistError as error:
        raise UnfitClusterError(
            f"{_name(rank, world_size)}: {address}:{port}, where all ranks meet, does not answer "
            f"({_first_line(error)}). {ADVICE}"
        ) from error
    raise UnfitClusterError(_absence(rank, world_size, arrived))


def _absence(rank: int, world_size: int, arrived: dict[int, str]) -> str:
    missing = [number for number in range(world_size) if number not in arrived]
    asked = os.environ.get("STOKER_NODE_HOSTS", "").split()
    silent = [host for host in asked if host not in arrived.values()]
    hosts = f" (no rank at all of {', '.join(silent)})" if silent else ""
    return (
        f"{_name(rank, world_size)}: {_ranks(missing)} did not come within {ARRIVAL_LIMIT_S:g} s"
        f"{hosts}. Look in the log for what happened there; a file system that is slow to import "
        "from, or a process that never started, shows like this too."
    )


def _ranks(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {shown}"


def _sum_and_hosts(rank: int, world_size: int, device: "torch.device") -> tuple[list[str], int]:
    import torch

    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)  # each thread has a current device
    number = torch.tensor(rank + 1, device=device)
    torch.distributed.all_reduce(number)
    hosts = [""] * world_size
    torch.distributed.all_gather_object(hosts, host_name())
    return hosts, int(number.item())


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
