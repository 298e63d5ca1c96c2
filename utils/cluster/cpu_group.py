"""A group of all ranks over the CPUs' network, whatever the devices talk over."""

import datetime
import os
from typing import Any

import torch

from utils.cluster.host import host_name
from utils.config.errors import UnfitClusterError


def cpu_group(timeout_s: float) -> Any:
    """Make a gloo group of all ranks; None for a process that is alone.

    Collective over ranks. Raises UnfitClusterError.
    """
    distributed = torch.distributed
    alone = not (distributed.is_available() and distributed.is_initialized())
    if alone or distributed.get_world_size() == 1:
        return None
    try:
        return distributed.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
    except RuntimeError as error:
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "unset")
        raise UnfitClusterError(
            f"{host_name()}: the ranks cannot reach each other over gloo (GLOO_SOCKET_IFNAME "
            f"is {interface}): {error}. Set it to the interface that the nodes share, in "
            "slurm/cluster.env."
        ) from error
