"""Checks of the ranks: they form one process group, can communicate and run the right strategy.

Without these checks, processes that are not connected would each train alone. accelerate would
silently replace a strategy that cannot run. A broken network would look like a hang.
"""

import logging
import os
import re
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from utils.config.errors import ConfigurationError, UnfitClusterError
from utils.config.launch_settings import REPLICAS, group_sizes
from utils.host.collectives import gathered
from utils.host.machine import host_name

logger = logging.getLogger(__name__)

# Ranks do not start at the same time: with a cold file cache, imports take a minute longer.
FIRST_COLLECTIVE_LIMIT_S = 180.0
NETWORK_ADVICE = (
    "Look at the interface that carries the traffic (NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME: the "
    "name that `ip -brief address` shows on every node), at firewalls between the nodes, and at "
    "what NCCL_DEBUG=INFO and TORCH_DISTRIBUTED_DEBUG=DETAIL log."
)
PEER_ENDED = re.compile("(closed|reset) by (peer|remote)|remote process exited", re.IGNORECASE)


@dataclass(frozen=True)
class LaunchFacts:
    """The rank of this process, the number of ranks, the strategy, all hosts and the device type.

    strategy  the strategy that `accelerate launch` requested: single, ddp, fsdp1, fsdp2, zero1,
              zero2, zero3, or zero_file (a DeepSpeed config file); it affects checkpoint files
    hosts     the host name of each rank
    device    the type of this process's device: "cuda" or "cpu"
    replicas  number of copies of the sharded states; only HSDP (fsdp2 with copies) has several
    gpus      the UUID of each rank's GPU, as nvidia-smi shows it; "" for a rank on a CPU
    """

    rank: int
    world_size: int
    strategy: str
    hosts: tuple[str, ...]
    device: str
    replicas: int = 1
    gpus: tuple[str, ...] = ()

    @property
    def shards(self) -> int:
        """The number of ranks that share one copy of the sharded states."""
        return self.world_size // self.replicas

    @property
    def name(self) -> str:
        """The strategy's name in messages: "hsdp" for fsdp2 with several copies of the states."""
        return "hsdp" if self.replicas > 1 else self.strategy


def check_launch() -> LaunchFacts:
    """Check that all processes are connected; return the facts of this launch.

    All ranks must call this, after they created TrainingArguments: its argument `use_cpu` sets the
    device of accelerate's `PartialState`. Raises ConfigurationError for a wrong command, and
    UnfitClusterError for a fault of the cluster.
    """
    from accelerate import PartialState

    state = PartialState()
    device = state.device.type
    check_connected(state.num_processes, torch.cuda.device_count() if device == "cuda" else 0)
    hosts = all_hosts(state.process_index, state.device)
    gpu = torch.cuda.get_device_properties(state.device) if device == "cuda" else None
    gpus = tuple(gathered(f"GPU-{getattr(gpu, 'uuid', '')}" if gpu else ""))
    strategy = requested_strategy(os.environ, state.num_processes)
    ranks, replicas = state.num_processes, requested_replicas(os.environ)
    return LaunchFacts(state.process_index, ranks, strategy, hosts, device, replicas, gpus)


def check_connected(processes: int, visible_gpus: int) -> None:
    """Raise ConfigurationError unless accelerate connected all processes that were started.

    Several visible GPUs for a single process are also an error. processes: the number of processes
    that accelerate connected. visible_gpus: the number of GPUs that torch sees; 0 on a CPU.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if started != processes:
        raise ConfigurationError(
            f"{host_name()}: the launcher started {started} processes, but accelerate connected "
            f"{processes}: each would train alone and write to the same output directory. Without "
            "a GPU give the script --use_cpu true or set ACCELERATE_USE_CPU=true; with GPUs check "
            "that torch sees them on every node (nvidia-smi, CUDA_VISIBLE_DEVICES)."
        )
    if "WORLD_SIZE" in os.environ:
        return
    if tasks > 1:
        raise ConfigurationError(
            f"srun started {tasks} copies of this script that do not know of each other "
            f"(SLURM_STEP_NUM_TASKS={tasks}, no WORLD_SIZE): srun --ntasks-per-node=1 "
            "slurm/launch_node.sh SCRIPT ... starts a process per GPU on each node."
        )
    if visible_gpus > 1:
        raise ConfigurationError(
            f"{visible_gpus} GPUs are visible, but one process was started: transformers' Trainer "
            "would use DataParallel, which is slow and changes the batch. Use one GPU "
            "(CUDA_VISIBLE_DEVICES=0) or all of them (slurm/launch_node.sh SCRIPT ...)."
        )


def all_hosts(rank: int, device: torch.device) -> tuple[str, ...]:
    """Gather the host name of each rank. This is the first collective, and tests the network.

    All ranks must call this. rank: the rank of this process. device: the device of this process.
    Raises UnfitClusterError if the collective fails or takes too long, and torch's error if another
    rank ended. The process must end by os._exit, as in `run_script`, because a blocked collective
    stays in a daemon thread.
    """
    answer: Future[tuple[str, ...]] = Future()

    def gather() -> None:
        try:
            if device.type != "cpu" and device.index is not None:
                torch.accelerator.set_device_index(device.index)  # each thread has a current device
            answer.set_result(tuple(gathered(host_name())))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=gather, name="first collective", daemon=True).start()
    try:
        return answer.result(FIRST_COLLECTIVE_LIMIT_S)
    except TimeoutError:
        failure = (
            f"did not end within {FIRST_COLLECTIVE_LIMIT_S:g} s. If a node says nothing of this, "
            "its ranks did not come: see what they printed."
        )
    except RuntimeError as error:  # includes torch's DistError
        if PEER_ENDED.search(str(error)):
            raise
        failure = f"failed ({(str(error).strip() or type(error).__name__).splitlines()[0]})."
    what = f"rank {rank}: the first collective of all ranks ({device.type})"
    raise UnfitClusterError(f"{host_name()} {what} {failure} {NETWORK_ADVICE}")


def requested_strategy(environment: Mapping[str, str], processes: int) -> str:
    """Return the strategy (see LaunchFacts) that accelerate's environment variables select.

    If these variables are not set, return "single" for one process and "ddp" for several.
    """
    if environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        if environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none") != "none":
            return "zero_file"
        return "zero" + environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    if environment.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        return "fsdp" + environment.get("FSDP_VERSION", "1")
    return "ddp" if processes > 1 else "single"


def exchange_in_bf16(model: Any) -> None:
    """Let a DDP model's ranks exchange gradients in bfloat16. Call before the first backward."""

    # torch refuses the name bf16_compress_hook without NCCL, although gloo can sum in bfloat16.
    def exchange(
        group: Any, bucket: torch.distributed.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        return bf16_compress_hook(group, bucket)

    model.register_comm_hook(None, exchange)


def requested_replicas(environment: Mapping[str, str]) -> int:
    """Return the number of copies of the sharded states that accelerate's variables request."""
    return int(group_sizes(environment).get(REPLICAS, "1"))


def report_groups(launch: LaunchFacts, per_node: int) -> None:
    """Log the number of HSDP's copies and of shards per copy; warn if a copy needs several nodes.

    per_node: the number of GPUs on a node
    """
    copies, shards = launch.replicas, launch.shards
    also = ", as with fsdp2: there is one copy" if copies == 1 else ""
    logger.info("hsdp: %d x the states, each sharded over %d ranks%s", copies, shards, also)
    if shards > per_node:
        logger.warning(
            "dp_shard %d: a node has %d GPUs, so each layer's weights cross the network twice per "
            "micro-batch; with dp_shard %d only gradients do, once per step",
            shards, per_node, per_node,
        )  # fmt: skip


def has_replicas(accelerator: Any) -> bool:
    """Return whether accelerate runs FSDP2 with several copies of the sharded states (HSDP)."""
    sizes = accelerator.parallelism_config
    return accelerator.is_fsdp2 and sizes is not None and sizes.dp_replicate_enabled


def tune_strategy(accelerator: Any) -> None:
    """Configure accelerate for less memory and float32 sums. Call before `accelerator.prepare`.

    DDP then keeps no second copy of the gradients. FSDP2 then sums gradients over ranks in float32
    after every micro-batch, so that no rank keeps the full gradients of all weights.
    """
    if accelerator.ddp_handler is not None:
        accelerator.ddp_handler.gradient_as_bucket_view = True  # saves two copies per step
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version == 2 and plugin.mixed_precision_policy:
        # accelerate's policy would round the loss and the gradients' sums over ranks to bf16.
        plugin.mixed_precision_policy = replace(
            plugin.mixed_precision_policy, reduce_dtype=torch.float32, output_dtype=None
        )
    if accelerator.is_fsdp2:
        # By default each rank keeps the full gradients until the last micro-batch of a step.
        accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True


def check_running_strategy(facts: LaunchFacts) -> None:
    """Raise ConfigurationError unless accelerate runs the requested strategy.

    For example, accelerate silently replaces FSDP by DDP on a CPU. Call this after the Trainer was
    created.
    """
    from accelerate.state import AcceleratorState

    state = AcceleratorState()
    requested, actual = facts.strategy, "ddp"
    sizes = state.parallelism_config
    replicas = 1 if sizes is None else sizes.dp_replicate_size
    if facts.strategy == "fsdp2" and replicas != facts.replicas:
        raise ConfigurationError(
            f"The launcher asked for {facts.replicas} copies of the sharded states, but accelerate "
            f"runs {replicas}: use accelerate_configs/hsdp.yaml and the setting dp_shard."
        )
    if state.distributed_type.value == "DEEPSPEED":
        actual = f"zero{state.deepspeed_plugin.zero_stage}"
    elif state.distributed_type.value == "FSDP":
        actual = f"fsdp{state.fsdp_plugin.fsdp_version}"
    elif state.distributed_type.value == "NO":
        actual = "single"
    # accelerate may run one process as DDP of one rank, which changes nothing.
    same = requested == actual or {requested, actual} == {"single", "ddp"}
    if same or (requested, actual[:4]) == ("zero_file", "zero"):
        return
    raise ConfigurationError(
        f"The launcher asked for {requested}, but accelerate runs {actual} on {facts.device}. FSDP "
        "and DeepSpeed need GPUs: on a CPU use accelerate_configs/cpu.yaml. On GPUs check the "
        "accelerate config and the script's --fsdp and --deepspeed flags."
    )
