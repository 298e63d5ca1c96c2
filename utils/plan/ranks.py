"""The groups, weights and first sequences of three ranks of a launch over several nodes.

A dry run reports them from a single process on a CPU. torch's fake process group lets this process
act as any rank. The group's collectives return at once and move no data. Weights are on the meta
device: only shapes, bytes and groups are real.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from utils.config.errors import ConfigurationError, Report
from utils.config.strategy import AssumedGpus
from utils.data.order import GlobalBatchSampler
from utils.launch.processes import LaunchFacts
from utils.model.adapters import with_adapters
from utils.model.architecture import MODEL_ERRORS, causal_lm_class, error_text
from utils.model.layers import marked_layers
from utils.plan.memory_estimate import GIB
from utils.plan.memory_trace import Setup, layer_kinds

LAYOUT_STRATEGIES = ("ddp", "fsdp2")
# The dry run warns if a rank holds more than this many times an even share of the weights.
UNEVEN = 1.02
SHARD, REPLICATE = "dp_shard", "dp_replicate"  # accelerate's names of the mesh's dimensions


@dataclass(frozen=True)
class ReducedModel:
    """A model on the meta device that has only the first of several equal layers.

    layers: {name of a layer in `model`: number of equal layers in the full model}.
    """

    model: nn.Module
    layers: Mapping[str, int]

    def weight_bytes(self, mesh: DeviceMesh | None = None) -> int:
        """Return the bytes of this rank's shards of the weights. mesh: None means no sharding."""
        model = copy.deepcopy(self.model)
        layers = {name: model.get_submodule(name) for name in self.layers}
        if mesh is not None and SHARD in (mesh.mesh_dim_names or ()):
            for part in (*layers.values(), model):
                fully_shard(part, mesh=mesh)
        repeated = [(count - 1) * own_bytes(layers[name]) for name, count in self.layers.items()]
        return own_bytes(model) + sum(repeated)


def report_ranks(
    setup: Setup, gpus: AssumedGpus, sampler: GlobalBatchSampler, report: Report
) -> None:
    """Add lines on the first, the middle and the last rank to `report`.

    Adds a warning if a rank has much more than an even share of the weights. Does nothing on one
    node, with DeepSpeed, or with weights in 4 bits. Raises ConfigurationError if torch cannot build
    the mesh or the shards.
    """
    launch, ranks = setup.launch, setup.launch.world_size
    if gpus.nodes == 1 or launch.strategy not in LAYOUT_STRATEGIES or setup.quantized is not None:
        return
    try:
        model = reduced_model(setup)
        chosen = (0, ranks // 2, ranks - 1)
        layouts = [describe_rank(setup, model, sampler, rank) for rank in chosen]
    except MODEL_ERRORS as error:
        raise ConfigurationError(
            f"strategy {launch.name} on {ranks:,} ranks: torch cannot lay out "
            f"{type(setup.config).__name__} ({error_text(error)}): give another dp_shard or "
            "strategy."
        ) from error
    for _, line in layouts:
        report.say(line)
    most = max(weights for weights, _ in layouts)
    even = model.weight_bytes() / (launch.shards if launch.strategy == "fsdp2" else 1)
    if most > UNEVEN * even:
        report.warn(
            f"memory: a rank holds {most / GIB:.2f} GiB of weights, {most / even:.1f} times an "
            "even share, and as much more of their gradients and states: torch divides each tensor "
            f"by its first dimension, and some are shorter than {launch.shards:,} ranks. Set "
            "strategy: hsdp and a smaller dp_shard."
        )


def _ranks_text(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return "no other"
    step = ranks[1] - ranks[0]
    return f"{ranks[0]:,} to {ranks[-1]:,}{f' by {step:,}' if step > 1 else ''}"


def describe_rank(
    setup: Setup, model: ReducedModel, sampler: GlobalBatchSampler, rank: int
) -> tuple[int, str]:
    """Return the bytes of a rank's weights, and a log line on its groups and first sequences.

    With context parallelism, consecutive ranks form a group and have the same sequences.
    """
    launch, size = setup.launch, setup.settings.run.context_parallel
    batches = GlobalBatchSampler(
        sampler.order, sampler.sizes, sampler.micro_batch_size, rank // size,
        launch.world_size // size, total_steps=1,
    )  # fmt: skip
    first = rank // size * size
    shared = f", sequences with {_ranks_text(range(first, first + size))}" if size > 1 else ""
    with fake_group(rank, launch.world_size):
        mesh = data_parallel_mesh(launch)
        shards, copies = _ranks_text(group_of(mesh, SHARD)), _ranks_text(group_of(mesh, REPLICATE))
        weights = model.weight_bytes(mesh)
    return weights, (
        f"rank {rank:,} of {launch.world_size:,}: shares a copy with {shards}{shared}, sums "
        f"gradients with {copies}, {weights / GIB:.2f} GiB of weights; first sequences: "
        f"{next(iter(batches))}"
    )


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """Open a process group in which this process acts as `rank`. Collectives move no data."""
    # Importing this module registers torch's backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "a dry run connects to no other process"
    store: Any = FakeStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def data_parallel_mesh(launch: LaunchFacts) -> DeviceMesh:
    """Return accelerate's mesh of ranks for DDP, FSDP2 or HSDP.

    The dimensions are dp_replicate (copies of the states) and dp_shard (shards of a copy). Context
    parallelism adds no dimension, because its groups are inside the groups of shards.
    """
    copies = launch.replicas if launch.strategy == "fsdp2" else launch.world_size
    sizes = ParallelismConfig(
        dp_replicate_size=copies, dp_shard_size=launch.world_size // copies,
        tp_size=1, cp_size=1, sp_size=1,
    )  # fmt: skip
    mesh: DeviceMesh = sizes.build_device_mesh("cpu")
    return mesh


def group_of(mesh: DeviceMesh, dimension: str) -> tuple[int, ...]:
    """Return the ranks of this rank's group in a dimension of the mesh.

    If the mesh lacks the dimension, return only this rank.
    """
    if dimension not in (mesh.mesh_dim_names or ()):
        return (dist.get_rank(),)
    return tuple(mesh[dimension].mesh.tolist())


def reduced_model(setup: Setup) -> ReducedModel:
    """Return the model without repeated layers, because sharding all layers takes a minute."""
    with torch.device("meta"):
        model_class: Any = causal_lm_class(setup.config)
        model = with_adapters(model_class(setup.config).to(setup.dtype), setup.settings.model)
    marked = marked_layers(model)
    layers = set(marked)
    names = [name for name, module in model.named_modules() if module in layers]
    counts = Counter(names[first] for first in layer_kinds(marked))
    for name in set(names) - set(counts):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, nn.Identity())
    return ReducedModel(model, counts)


def own_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's weights, or of this rank's shards of the weights."""
    weights: Iterator[Any] = module.parameters()
    parts = (each.to_local() if isinstance(each, DTensor) else each for each in weights)
    return sum(part.nbytes for part in parts)
