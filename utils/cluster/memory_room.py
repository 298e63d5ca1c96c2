"""How much more memory the processes of this job may take on this host."""

from pathlib import Path

_KIB = 1024


def memory_room_bytes(root: Path = Path("/")) -> int:
    """Return the least of what the kernel has available and what each control group leaves.

    Slurm limits a job's memory by control groups, and what is in /dev/shm counts. File pages that
    the kernel would drop first are no use of memory. `root` is there for tests.
    """
    room = [_available_bytes(root)]
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


def _available_bytes(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text(encoding="utf-8").splitlines():
        name, value = line.split(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * _KIB
    raise AssertionError("no Linux since 3.14 is without MemAvailable")


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
