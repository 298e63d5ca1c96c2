"""Host name, rank, processor and memory of this process."""

import ctypes
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def host_name() -> str:
    """Return Slurm's name of this node (see `sinfo`), or the host name outside of Slurm."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def global_rank() -> int:
    """Return this process's global rank, which the launcher sets; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def set_death_signal(number: int) -> None:
    """Let the kernel send the signal `number` to this process when its parent dies (0: never).

    Each thread has its own setting. The kernel sends the signal if any thread has asked for it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def cpu_fact(name: str) -> str:
    """Return a field, such as `vendor_id`, of the first core in /proc/cpuinfo; "" if missing."""
    found = re.search(rf"^{name}\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    return found[1].strip() if found else ""


def memory_room_bytes(root: Path = Path("/")) -> int:
    """Return how many more bytes of memory this job can use on this host.

    Slurm limits the memory of a step, job and user by control groups. Files in /dev/shm count as
    used. Cached file pages that the kernel can drop count as free. `root` is for tests.
    """
    rooms = [1024.0 * _read_counts(root / "proc/meminfo")["MemAvailable:"]]
    for version, groups in _memory_groups(root):
        names = ("memory.max", "memory.current", "inactive_file")
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        rooms += [_free_bytes(group, *names) for group in groups]
    return int(max(0, min(rooms)))


def memory_kills(root: Path = Path("/")) -> int:
    """Return the number of processes of this job that the kernel has killed for lack of memory.

    The number comes from the innermost control group that counts such kills. It includes kills due
    to an outer group's limit. If no control group has a count, return the number of the whole host.
    """
    for version, groups in _memory_groups(root):
        name = "memory.events" if version == 2 else "memory.oom_control"
        if counting := [group / name for group in groups if (group / name).is_file()]:
            return _read_counts(counting[0]).get("oom_kill", 0)
    return _read_counts(root / "proc/vmstat").get("oom_kill", 0)


def _memory_groups(root: Path) -> Iterator[tuple[int, list[Path]]]:
    """Yield (cgroup version, folders) for each memory control group of this process.

    folders: the group's folder and all parent folders, innermost first
    """
    known = root / "proc/self/cgroup"
    for line in known.read_text(encoding="utf-8").splitlines() if known.is_file() else ():
        _, controllers, path = line.split(":", 2)
        mount = "memory" if "memory" in controllers.split(",") else ""  # of version 1
        if mount or controllers == "":
            group = root / "sys/fs/cgroup" / mount / path.lstrip("/")
            yield 1 if mount else 2, [group, *group.parents]


def _free_bytes(group: Path, limit: str, usage: str, droppable: str) -> float:
    if not (group / limit).is_file():
        return float("inf")  # the root group, or a path that is not visible in this container
    allowed = (group / limit).read_text(encoding="utf-8").strip()
    used = int((group / usage).read_text(encoding="utf-8"))
    statistics = _read_counts(group / "memory.stat")
    return float(allowed.replace("max", "inf")) - used + statistics.get(droppable, 0)


def _read_counts(path: Path) -> dict[str, int]:
    """Return {name: number} from a kernel file with a name and a number per line; {} if missing."""
    if not path.is_file():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {words[0]: int(words[1]) for words in map(str.split, lines)}
