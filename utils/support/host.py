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
    facts = Path("/proc/cpuinfo")
    found = re.search(rf"^{name}\s*: (.*)$", facts.read_text() if facts.exists() else "", re.M)
    return found[1].strip() if found else ""


# How much more memory the processes of this job may take on this host.


def memory_room_bytes(root: Path = Path("/")) -> int:
    """Return the least of what the kernel has available and what each control group leaves.

    Slurm limits a job's memory by control groups, and what is in /dev/shm counts. File pages that
    the kernel would drop first are no use of memory. `root` is there for tests.
    """
    memory = (root / "proc/meminfo").read_text(encoding="utf-8")
    room = [int(re.findall(r"^MemAvailable: *([0-9]+) kB$", memory, re.MULTILINE)[0]) * 1024]
    for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            room += _group_rooms(root / "sys/fs/cgroup", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            room += _group_rooms(
                root / "sys/fs/cgroup/memory",
                path,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
    return max(0, min(room))


def _group_rooms(mount: Path, path: str, limit_file: str, usage_file: str) -> list[int]:
    """Return what a group and those around it (step, job, user) leave, where they limit."""
    rooms = []
    group = mount / path.lstrip("/")
    for directory in (group, *group.parents):
        if not directory.is_relative_to(mount):
            break
        limit, usage = directory / limit_file, directory / usage_file
        if not (limit.is_file() and usage.is_file()):
            continue  # the root has no limit; in a container the path may be the host's
        allowed = limit.read_text(encoding="utf-8").strip()
        if allowed != "max":
            used = int(usage.read_text(encoding="utf-8"))
            rooms.append(int(allowed) - used + _droppable_bytes(directory))
    return rooms


def _droppable_bytes(group: Path) -> int:
    statistics = dict(
        line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines()
    )
    # Version 1 counts the groups within under a name of its own.
    return int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))
