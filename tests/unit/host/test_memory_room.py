from pathlib import Path

import pytest

from utils.host.machine import memory_kills, memory_room_bytes

GIB = 2**30
JOB, STEP = "sys/fs/cgroup/slurm/job_7", "sys/fs/cgroup/slurm/job_7/step_0"
OLD = "sys/fs/cgroup/memory/slurm/job_7"


VERSION_2 = {
    "proc/self/cgroup": "0::/slurm/job_7/step_0\n",
    f"{JOB}/memory.max": f"{4 * GIB}\n",
    f"{JOB}/memory.current": f"{3 * GIB}\n",
    f"{JOB}/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
    f"{STEP}/memory.max": "max\n",
    f"{STEP}/memory.current": f"{3 * GIB}\n",
    f"{STEP}/memory.stat": "inactive_file 0\n",
}
VERSION_1 = {
    "proc/self/cgroup": "11:cpu,cpuacct:/x\n4:memory:/slurm/job_7\n0::/system\n",
    f"{OLD}/memory.limit_in_bytes": str(3 * GIB),
    f"{OLD}/memory.usage_in_bytes": str(2 * GIB),
    f"{OLD}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n",
}


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize("files", [VERSION_2, VERSION_1], ids=["version 2", "version 1"])
def test_the_tightest_group_counts_and_file_pages_do_not(tmp_path, files):
    """Slurm limits the job, and the step within the job."""
    files |= {"proc/meminfo": f"MemAvailable: {99 * 2**20} kB\n"}
    write(tmp_path, files)
    assert memory_room_bytes(tmp_path) == GIB + GIB // 2
    assert memory_room_bytes() > 2**20, "of this host"


@pytest.mark.parametrize(
    "files",
    [
        VERSION_2 | {f"{STEP}/memory.events": "oom 9\noom_kill 2\n"},
        VERSION_2 | {f"{JOB}/memory.events": "oom_kill 2\n"},  # the step has no group for memory
        VERSION_1 | {f"{OLD}/memory.oom_control": "under_oom 0\noom_kill 2\n"},
        # In a container, the group's path is one of the host.
        {
            "proc/self/cgroup": "4:memory:/docker/a\n",
            "sys/fs/cgroup/memory/memory.oom_control": "oom_kill 2\n",
        },
        {"proc/vmstat": "nr_free_pages 5\noom_kill 2\n"},  # a kernel without control groups
    ],
    ids=["version 2", "of the job", "version 1", "container", "no groups"],
)
def test_kills_are_counted_in_the_nearest_group(tmp_path, files):
    """Outer groups and the host also count kills of other jobs."""
    others = {
        "sys/fs/cgroup/memory.events": "oom_kill 7\n",
        "sys/fs/cgroup/memory/slurm/memory.oom_control": "oom_kill 7\n",
        f"{JOB}/step_1/memory.events": "oom_kill 7\n",
    }
    write(tmp_path, {"proc/vmstat": "oom_kill 7\n"} | others | files)
    assert memory_kills(tmp_path) == 2


def test_an_old_kernel_counts_no_kills(tmp_path):
    write(tmp_path, VERSION_1 | {f"{OLD}/memory.oom_control": "under_oom 0\n"})
    assert memory_kills(tmp_path) == 0
