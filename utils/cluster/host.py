"""The name of this machine, as the person who reads the log knows it."""

import os
import socket


def host_name() -> str:
    """Slurm's name of this node (what `squeue` and `sinfo` show), else the host's own name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
