"""This machine: its name, its processor, its memory."""

import ctypes
import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from pathlib import Path


def host_name() -> str:
    """Slurm's name of this node (what `squeue` and `sinfo` show), else the host's own name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def global_rank() -> int:
    """Rank of this process over all nodes, as the launcher set it; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


# What Linux says of this processor; torch, which knows some of it, is not needed.

_FACTS = Path("/proc/cpuinfo")


def vendor() -> str:
    """Return the maker in CPUID's words, `AuthenticAMD` say; "" where Linux does not tell."""
    return _fact("vendor_id")


def model() -> str:
    """Return the name that the maker gave it; "" where Linux does not tell."""
    return _fact("model name")


def multiplies_in_tiles() -> bool:
    """Whether it has AMX; torch also knows whether the system lets a process use it."""
    return "amx_tile" in _fact("flags").split()


def _fact(name: str) -> str:
    """Return what stands behind a name, of the first core."""
    try:
        with _FACTS.open(encoding="utf-8") as lines:  # as far as the first core's: there are many
            return next((line.partition(":")[2].strip() for line in lines if _says(line, name)), "")
    except OSError:
        return ""


def _says(line: str, name: str) -> bool:
    return line.partition(":")[0].strip() == name


# What a process keeps of the host's memory besides its tensors: freed pieces and oneDNN's code.

_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # read by torch's allocator for CPUs

# glibc's variables by which a user decides about the heap, and its numbers for the same in mallopt.
_HEAP = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_NEVER, _NONE = -1, 0


def limit_host_memory(environment: MutableMapping[str, str]) -> None:
    """Set what torch's libraries read once, when they are loaded; what the user set stays."""
    if multiplies_in_tiles():  # measured on one such machine: Intel's with AMX
        environment.setdefault(_HUGE_PAGES, "1")
    # oneDNN keeps the code of each shape that it multiplied, half a megabyte or more, of a thousand
    # shapes if it is let. Chats of all lengths multiply some hundreds, few of them often.
    environment.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    # So does the layer between torch and oneDNN, another thousand: looking there first saves two
    # microseconds a product.
    environment.setdefault("LRU_CACHE_CAPACITY", "1")


def keep_freed_memory(environment: Mapping[str, str]) -> bool:
    """Let malloc keep what is freed from here on, for a process that trains on a CPU.

    False where nothing changes: with huge pages, where the user told malloc something, and without
    glibc. The peak stays as it was (docs/memory.md); after it less goes back to the system.
    """
    told = any(name in environment for name in _HEAP)
    told = told or "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if told or environment.get(_HUGE_PAGES) == "1" or mallopt is None:
        return False
    return bool(mallopt(_MMAP_MAX, _NONE) and mallopt(_TRIM_THRESHOLD, _NEVER))


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
