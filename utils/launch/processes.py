"""The checks of a launch by its ranks: they form one group, can talk, and train as was asked.

A launch that went wrong seldom fails: processes that do not find each other each train alone and
write to one output directory, a strategy that cannot run silently becomes another one, and a
network that does not carry the ranks' traffic shows as a job that waits in silence.
"""

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from utils.config.errors import ConfigurationError, UnfitClusterError
from utils.support.host import host_name

if TYPE_CHECKING:
    import torch

Answer = TypeVar("Answer")

# Ranks start apart: a node whose file cache is cold imports a minute longer.
FIRST_COLLECTIVE_LIMIT_S = 180.0
ADVICE = (
    "Look at the interface that carries the traffic (NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME: the "
    "name that `ip -brief address` shows on every node), at firewalls between the nodes, and at "
    "what STOKER_DEBUG=1 logs."
)


@dataclass(frozen=True)
class LaunchFacts:
    """What this process is among all processes of the run.

    `strategy` is what the launcher asked for: single, ddp, fsdp1, fsdp2, zero1, zero2 or zero3
    (zero_file where a DeepSpeed config file decides). `hosts` holds one host name per rank.
    """

    rank: int
    world_size: int
    strategy: str
    hosts: tuple[str, ...]
    device: str


def check_launch() -> LaunchFacts:
    """Check that all processes found each other; every rank calls it, before the data is opened.

    Call it once TrainingArguments exists: parsing `use_cpu` sets accelerate's `PartialState` up.
    Raises ConfigurationError, or UnfitClusterError where it is not the command that is wrong.
    """
    import torch
    from accelerate import PartialState

    state = PartialState()
    device = state.device.type
    visible_gpus = torch.cuda.device_count() if device == "cuda" else 0
    problem = launch_problem(os.environ, state.num_processes, visible_gpus)
    if problem is not None:
        raise problem
    hosts: tuple[str, ...] = (host_name(),)
    if state.num_processes > 1:
        hosts = meet_all_ranks(state.process_index, state.num_processes, state.device)
    return LaunchFacts(
        rank=state.process_index,
        world_size=state.num_processes,
        strategy=requested_strategy(os.environ, state.num_processes),
        hosts=hosts,
        device=device,
    )


def launch_problem(
    environment: Mapping[str, str], processes: int, visible_gpus: int
) -> ConfigurationError | None:
    """Say what is wrong with a launch of `processes` connected processes; None when nothing is."""
    asked = int(environment.get("WORLD_SIZE", "1"))
    if asked != processes:
        return _unconnected(environment, asked, processes)
    if "WORLD_SIZE" in environment:
        return None
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks > 1:
        return ConfigurationError(
            f"srun started {tasks} copies of this script that do not know of each other "
            f"(SLURM_STEP_NUM_TASKS={tasks}, no WORLD_SIZE). Start one task per node "
            "(--ntasks-per-node=1) with slurm/launch_node.sh or `accelerate launch` in it, which "
            "starts the processes."
        )
    if visible_gpus > 1:
        return ConfigurationError(
            f"{visible_gpus} GPUs are visible, but one process was started: transformers' Trainer "
            "would use DataParallel, which is slow and changes the batch. Use one GPU "
            "(CUDA_VISIBLE_DEVICES=0) or all of them (slurm/launch_node.sh, or accelerate launch "
            f"--config_file accelerate_configs/multi_gpu.yaml --num_processes {visible_gpus} ...)."
        )
    return None


def _unconnected(environment: Mapping[str, str], asked: int, processes: int) -> ConfigurationError:
    problem = (
        f"{host_name()}: the launcher started {asked} processes, but accelerate connected "
        f"{processes}: each would train alone and write to the same output directory. "
    )
    # Set where a scheduler handed out GPUs; the value names or counts them.
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE"):
        if environment.get(name):
            return UnfitClusterError(
                f"{problem}Devices were allocated here ({name}={environment[name]}), but torch "
                f"sees none: look at nvidia-smi on {host_name()} and whether torch is built for "
                "them."
            )
    return ConfigurationError(
        f"{problem}Without a GPU give the script --use_cpu true or set ACCELERATE_USE_CPU=true; "
        "with GPUs check that torch sees them on every node (nvidia-smi, CUDA_VISIBLE_DEVICES)."
    )


def meet_all_ranks(rank: int, world_size: int, device: "torch.device") -> tuple[str, ...]:
    """Return the host of every rank, after all have summed a number.

    Every rank of an initialised process group calls it. Raises UnfitClusterError, which names this
    host and rank, and ranks that did not come. The stuck collective then stays behind in a thread:
    end the process without its teardown, as `run_script` does.
    """
    name = f"{host_name()} rank {rank} of {world_size}"
    collective = f"the first all-reduce of all ranks ({device.type})"
    try:
        store = _announce(rank)
        hosts, total = call_within(
            FIRST_COLLECTIVE_LIMIT_S, lambda: _hosts_and_sum(rank, world_size, device)
        )
    except TimeoutError:
        problem = _absence(store, world_size) or (
            f"all ranks are there, but {collective} did not end within "
            f"{FIRST_COLLECTIVE_LIMIT_S:g} s. {ADVICE}"
        )
        raise UnfitClusterError(f"{name}: {problem}") from None
    except RuntimeError as error:  # of which torch's DistError is one
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnfitClusterError(f"{name}: {collective} failed ({first_line}). {ADVICE}") from error
    expected = world_size * (world_size + 1) // 2
    if total != expected:
        raise UnfitClusterError(
            f"{name}: {collective} gave {total}, not {expected}: a device or a network adapter "
            "computes wrongly. Leave nodes out one by one (sbatch --exclude) to find it: "
            f"{', '.join(sorted(set(hosts)))}."
        )
    return tuple(hosts)


def _announce(rank: int) -> "torch.distributed.TCPStore | None":
    """Write this rank's host into the store at rank 0, for the others' error message."""
    from torch.distributed import TCPStore

    if "MASTER_ADDR" not in os.environ:
        return None  # the process group met elsewhere (MPI): there is no store to ask
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        timeout=timedelta(seconds=60),
        wait_for_workers=False,
    )
    store.set(_key(rank), host_name())
    return store


def _key(rank: int) -> str:
    return f"stoker/start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/rank-{rank}"


def _absence(store: "torch.distributed.TCPStore | None", world_size: int) -> str | None:
    """Name the ranks, and the nodes, that did not come; None when all did."""
    if store is None:
        return None
    try:
        missing = [rank for rank in range(world_size) if not store.check([_key(rank)])]
        came = {store.get(_key(rank)).decode() for rank in range(world_size) if rank not in missing}
    except RuntimeError:
        return None  # rank 0, and the store with it, has given up already
    if not missing:
        return None
    silent = [host for host in os.environ.get("STOKER_NODE_HOSTS", "").split() if host not in came]
    hosts = f" (no rank at all of {', '.join(silent)})" if silent else ""
    ranks = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return (
        f"{'rank' if len(missing) == 1 else 'ranks'} {ranks} did not come within "
        f"{FIRST_COLLECTIVE_LIMIT_S:g} s{hosts}. Look in the log for what happened there; a file "
        "system that is slow to import from, or a process that never started, shows like this too."
    )


def _hosts_and_sum(rank: int, world_size: int, device: "torch.device") -> tuple[list[str], int]:
    import torch

    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)  # each thread has a current device
    number = torch.tensor(rank + 1, device=device)
    torch.distributed.all_reduce(number)
    hosts = [""] * world_size
    torch.distributed.all_gather_object(hosts, host_name())
    return hosts, int(number.item())


def call_within(limit_s: float, action: Callable[[], Answer]) -> Answer:
    """Return the answer of `action`, or raise what it raises; TimeoutError after `limit_s`.

    It runs in a daemon thread: what hangs in storage or network does not keep the process.
    """
    answer: Future[Answer] = Future()

    def act() -> None:
        try:
            answer.set_result(action())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=act, name="with a limit", daemon=True).start()
    return answer.result(limit_s)


def requested_strategy(environment: Mapping[str, str], processes: int) -> str:
    """Name the strategy that `accelerate launch` asked for through the environment."""
    if environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        if environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none") != "none":
            return "zero_file"
        return "zero" + environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    if environment.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        return "fsdp" + environment.get("FSDP_VERSION", "1")
    return "ddp" if processes > 1 else "single"


def check_strategy(facts: LaunchFacts) -> None:
    """Check that accelerate runs the strategy that was asked for; call it once a Trainer exists.

    Raises ConfigurationError: with a CPU, for one, FSDP and DeepSpeed become plain DDP in silence.
    """
    requested, actual = facts.strategy, actual_strategy()
    if requested == actual or (requested, actual[:4]) == ("zero_file", "zero"):
        return
    # A launcher with one process: accelerate wraps it as DDP of one, which changes nothing.
    if {requested, actual} == {"single", "ddp"}:
        return
    on_cpu = (
        " FSDP and DeepSpeed need GPUs: on a CPU use accelerate_configs/cpu.yaml."
        if facts.device == "cpu"
        else " Check the accelerate config and the script's --fsdp and --deepspeed flags."
    )
    raise ConfigurationError(
        f"The launcher asked for {requested}, but accelerate runs {actual}.{on_cpu}"
    )


def actual_strategy() -> str:
    """Name the strategy that accelerate runs, in `LaunchFacts` terms."""
    from accelerate.state import AcceleratorState

    state = AcceleratorState()
    kind = state.distributed_type.value
    if kind == "DEEPSPEED":
        return f"zero{state.deepspeed_plugin.zero_stage}"
    if kind == "FSDP":
        return f"fsdp{state.fsdp_plugin.fsdp_version}"
    return "single" if kind == "NO" else "ddp"
