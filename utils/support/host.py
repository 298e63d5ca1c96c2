"""This machine: its name, its processor, its memory."""

import os
import re
import socket
from pathlib import Path


def host_name() -> str:
    """Slurm's name of this node (what `squeue` and `sinfo` show), else the host's own name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def global_rank() -> int:
    """Rank of this process over all nodes, as the launcher set it; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def cpu_fact(name: str) -> str:
    """Return what /proc/cpuinfo says of the first core, `vendor_id` or `model name`; else ""."""
    found = re.search(rf"^{name}\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    return found[1].strip() if found else ""


def memory_room_bytes(root: Path = Path("/")) -> int:
    """Return how much more memory this job may take here: what the kernel and Slurm leave.

    Slurm limits a job's memory by control groups, around its step, job and user; what is in
    /dev/shm counts, file pages that the kernel would drop first do not. `root` is for tests.
    """
    memory = (root / "proc/meminfo").read_text(encoding="utf-8")
    available_kib = re.findall(r"^MemAvailable: *([0-9]+) kB$", memory, re.MULTILINE)[0]
    rooms = [float(available_kib) * 1024]
    for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, names = "", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):  # version 1 of control groups
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mount = "memory"
        else:
            continue
        group = root / "sys/fs/cgroup" / mount / path.lstrip("/")
        rooms += [_room(directory, *names) for directory in (group, *group.parents)]
    return int(max(0, min(rooms)))


def _room(group: Path, limit: str, usage: str, droppable: str) -> float:
    """Return the bytes that one control group leaves; infinity where it has no limit."""
    if not (group / limit).is_file():
        return float("inf")  # the root; in a container the path may be the host's
    allowed = (group / limit).read_text(encoding="utf-8").strip()
    used = int((group / usage).read_text(encoding="utf-8"))
    lines = (group / "memory.stat").read_text(encoding="utf-8").splitlines()
    statistics = dict(line.split() for line in lines)
    return float(allowed.replace("max", "inf")) - used + int(statistics.get(droppable, 0))
