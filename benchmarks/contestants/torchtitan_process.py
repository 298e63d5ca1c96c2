"""What torchtitan takes for granted of its process: a launcher, a newer torch, a GPU."""

import contextlib
import gc
import importlib.util
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed.fsdp

from benchmarks.recording.job import CannotRunError

GIB = 2**30


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """Stand in for torchrun with one process; what torchtitan changed in it is as before then."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with mock.patch.dict(os.environ, launched):
        try:
            yield
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            torch.autograd.set_multithreading_enabled(True)
            gc.enable()


def supply_what_is_missing() -> None:
    """Let torchtitan 0.3 run with torch 2.11 and, for rehearsals, without a GPU.

    To be called before anything of torchtitan is imported. Raises CannotRunError without triton,
    which it imports whatever it trains.
    """
    if importlib.util.find_spec("triton") is None:
        raise CannotRunError("triton is not installed")
    distributed: Any = torch.distributed
    if not hasattr(distributed.fsdp, "DataParallelMeshDims"):
        # For meshes of several dimensions: it is imported, and one process never makes one.
        distributed.fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})
    if not hasattr(distributed, "set_timeout"):
        distributed.set_timeout = distributed.distributed_c10d._set_pg_timeout  # its older name
    if not torch.cuda.is_available():
        from torchtitan.tools import utils

        utils.device_type, utils.device_module = "cpu", cpu_as_device()


def cpu_as_device() -> Any:
    """Return what torchtitan asks of torch.cuda, for a CPU; of its memory nothing is known."""
    return SimpleNamespace(
        set_device=lambda _device: None,
        device_count=lambda: 1,
        current_device=lambda: 0,
        synchronize=lambda: None,
        get_device_name=lambda _device: "CPU",
        get_device_properties=lambda _device: SimpleNamespace(total_memory=GIB),
        memory_stats=lambda _device: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
    )
