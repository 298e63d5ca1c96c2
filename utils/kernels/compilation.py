"""Compiles a model layer by layer, with static shapes, into a cache that outlives the job.

Whole models are not compiled: transformers would then make a dense attention mask, and every layer
would be compiled anew. Layers alike share what was compiled for the first of them.
"""

import os
import shutil
from pathlib import Path

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from utils.cluster.kept import cache_root
from utils.config.errors import ConfigurationError

# Read by torch when it first compiles; its own default is in /tmp, which ends with the job.
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# What changes from step to step among a layer's arguments that are no tensors, as torch calls it.
OPEN_NUMBERS = ("L['kwargs']['max_length_q']", "L['kwargs']['max_length_k']")
LEAST_GRAPHS = 8  # torch's own limit
COMPILERS = ("g++", "c++", "clang++", "gcc", "cc")


def prepare_compilation(strategy: str, compiles_here: bool = True) -> Path:
    """Check that layers can be compiled; return the directory that keeps what was compiled.

    That is $TORCHINDUCTOR_CACHE_DIR, or stoker/compiled below the user's cache directory. In a job
    it is on the node's disk, and handed on by the launcher (utils/jobs/compile_cache.py).
    `strategy` as in `LaunchFacts`. Raises ConfigurationError under ZeRO-3, and where there is no
    C++ compiler, unless another host compiles.
    """
    if strategy == "zero3":
        raise ConfigurationError(
            "--compile true: ZeRO-3 gathers weights in hooks around every module, which torch "
            "would compile again and again; take fsdp2.yaml, which shards as much, or set "
            "--compile false"
        )
    given = os.environ.get("CXX") or os.environ.get("CC") or ""
    compiler = next(iter(given.split()), None)  # "ccache g++": torch runs the first word
    if compiles_here and not any(
        shutil.which(name) for name in ([compiler] if compiler else COMPILERS)
    ):
        raise ConfigurationError(
            "--compile true needs a C++ compiler, and "
            + (f"{compiler} (CXX, CC) is not found" if compiler else "none of g++, clang++ is here")
            + ": load or install one, or set --compile false"
        )
    compiled = cache_root().expanduser() / "compiled"
    return Path(os.environ.setdefault(CACHE_VARIABLE, str(compiled)))


def marked_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model of transformers, as it marks them for checkpointing."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def compile_layers(model: nn.Module) -> int:
    """Compile each layer of `model` when it first runs; return how many there are.

    Shapes are static: another micro-batch size or row length, as in an evaluation, is compiled
    once more. Where torch would give up after too many of them and go on without compiling, it
    raises instead.
    """
    layers = marked_layers(model)
    if not layers:
        raise ConfigurationError(
            f"--compile true: {type(model).__name__} is not built of layers that transformers "
            "marks as such; set --compile false"
        )
    # No two layers may be alike, and each is compiled for training and for evaluation.
    torch._dynamo.config.recompile_limit = max(LEAST_GRAPHS, 2 * len(layers))
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    given = [name for name in torch.compiler.config.dynamic_sources.split(",") if name]
    torch.compiler.config.dynamic_sources = ",".join(dict.fromkeys([*given, *OPEN_NUMBERS]))
    for layer in layers:
        layer.compile(dynamic=False)
    return len(layers)


def leave_length_open(tensor: torch.Tensor) -> None:
    """Let layers be compiled for any length of this tensor's first dimension.

    The one shape that is not static is that of the documents' boundaries; a bound for their lengths
    is a number that is left open too.
    """
    torch._dynamo.mark_dynamic(tensor, 0)


def compiled_graphs() -> int:
    """Return how many graphs this process has compiled so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
