from utils.support.host import memory_room_bytes

GIB = 2**30


def host(root, cgroup, available_kib, files):
    """A host's /proc and /sys as far as they are read."""
    contents = {
        "proc/self/cgroup": cgroup,
        "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {available_kib} kB\n",
        **files,
    }
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_tightest_group_counts_and_file_pages_do_not(tmp_path):
    """Slurm limits the job and the step within it; version 2 of control groups."""
    job, step = "sys/fs/cgroup/slurm/job_7", "sys/fs/cgroup/slurm/job_7/step_0"
    files = {
        f"{job}/memory.max": f"{4 * GIB}\n",
        f"{job}/memory.current": f"{3 * GIB}\n",
        f"{job}/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
        f"{step}/memory.max": "max\n",
        f"{step}/memory.current": f"{3 * GIB}\n",
        f"{step}/memory.stat": "inactive_file 0\n",
    }
    root = host(tmp_path, "0::/slurm/job_7/step_0\n", 99 * 2**20, files)
    assert memory_room_bytes(root) == GIB + GIB // 2


def test_version_1_of_control_groups_counts_too(tmp_path):
    job = "sys/fs/cgroup/memory/slurm/uid_1/job_7"
    files = {
        f"{job}/memory.limit_in_bytes": str(2 * GIB),
        f"{job}/memory.usage_in_bytes": str(GIB),
        f"{job}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 4}\n",
    }
    cgroup = "11:cpu,cpuacct:/x\n4:memory:/slurm/uid_1/job_7\n0::/system\n"
    assert memory_room_bytes(host(tmp_path, cgroup, 99 * 2**20, files)) == GIB + GIB // 4


def test_this_host_has_room():
    assert memory_room_bytes() > 2**20
