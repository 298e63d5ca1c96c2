import pytest

from utils.support.host import memory_room_bytes

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


@pytest.mark.parametrize("files", [VERSION_2, VERSION_1], ids=["version 2", "version 1"])
def test_the_tightest_group_counts_and_file_pages_do_not(tmp_path, files):
    """Slurm limits the job and the step within it."""
    files |= {"proc/meminfo": f"MemAvailable: {99 * 2**20} kB\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_room_bytes(tmp_path) == GIB + GIB // 2
    assert memory_room_bytes() > 2**20, "of this host"
