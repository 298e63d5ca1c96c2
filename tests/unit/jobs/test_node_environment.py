import stat
import tempfile
from pathlib import Path

import pytest

from utils.config.errors import ConfigurationError, StorageError
from utils.launch.node import (
    debugging,
    make_directories,
    make_node_directory,
    node_environment,
    threads_per_process,
)

DIRECTORY = Path("/tmp/stoker-5-x")


def test_the_directory_is_private_and_on_the_nodes_own_disk(tmp_path):
    slurm, own = tmp_path / "slurm", tmp_path / "own"
    for path in (slurm, own):
        path.mkdir()
    made = make_node_directory(
        {"SLURM_TMPDIR": str(slurm), "TMPDIR": str(own), "SLURM_JOB_ID": "5"}
    )
    assert made.parent == slurm
    assert made.name.startswith("stoker-5-")
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert make_node_directory({"SLURM_TMPDIR": "", "TMPDIR": str(own)}).parent == own


def test_a_disk_that_takes_no_directory_is_refused(tmp_path, monkeypatch, small_disk):
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    missing = tmp_path / "none"
    with pytest.raises(StorageError, match=rf"n2: .*{missing} \(TMPDIR\) \(No such file"):
        make_node_directory({"TMPDIR": str(missing)})
    directory = make_node_directory({"TMPDIR": str(small_disk)})
    added = {f"CACHE_{number}": str(directory / str(number)) for number in range(20)}
    with pytest.raises(StorageError, match=r"n2: .*No space left.*TMPDIR"):
        make_directories(directory, added)


def test_caches_are_private_unless_the_user_placed_them(tmp_path):
    added = node_environment({"TRITON_CACHE_DIR": "/scratch/triton"}, tmp_path)
    assert "TRITON_CACHE_DIR" not in added
    assert added["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache/torchinductor_cache_dir")
    make_directories(tmp_path, added)
    assert Path(added["TORCHINDUCTOR_CACHE_DIR"]).is_dir()
    assert Path(added["STOKER_NOTES_DIR"]).is_dir()
    assert "STOKER_NOTES_DIR" not in node_environment({"STOKER_NOTES_DIR": "/shared"}, tmp_path)


def test_temporary_files_leave_room_for_the_names_of_sockets():
    assert node_environment({}, DIRECTORY)["TMPDIR"] == f"{DIRECTORY}/tmp"
    assert "TMPDIR" not in node_environment({}, Path(f"/tmp/{'a' * 80}"))
    with tempfile.TemporaryDirectory(prefix="pymp-12345678", dir="/tmp") as shortest:
        assert len(shortest) < 107


def test_jobs_are_offline_unless_the_user_said_otherwise():
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    job = {"SLURM_JOB_ID": "5"}
    assert offline.items() <= node_environment(job, DIRECTORY).items()
    for environment in ({}, job | {"HF_HUB_OFFLINE": "0"}):
        assert not offline.keys() & node_environment(environment, DIRECTORY).keys()


def test_debugging_is_one_switch_that_keeps_what_the_user_set():
    assert "NCCL_DEBUG" not in node_environment({}, DIRECTORY)
    added = node_environment({"STOKER_DEBUG": "1", "NCCL_DEBUG": "TRACE"}, DIRECTORY)
    assert added["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert "NCCL_DEBUG" not in added
    assert not debugging({"STOKER_DEBUG": "0"})
    with pytest.raises(ConfigurationError, match="STOKER_DEBUG='yes': give 1"):
        debugging({"STOKER_DEBUG": "yes"})


@pytest.mark.parametrize(
    ("environment", "processes", "threads"),
    [
        ({"SLURM_CPUS_PER_TASK": "16", "SLURM_CPUS_ON_NODE": "64"}, 4, 4),
        ({"SLURM_CPUS_ON_NODE": "64"}, 4, 16),
        ({"SLURM_CPUS_PER_TASK": "2"}, 4, 1),
    ],
)
def test_cores_are_shared_equally(environment, processes, threads):
    assert threads_per_process(environment, processes) == threads


def test_nothing_shipped_turns_fast_networks_off():
    root = Path(__file__).parents[3]
    shipped = [
        *root.glob("slurm/*"),
        *root.glob("utils/**/*.py"),
        *root.glob("accelerate_configs/*"),
    ]
    assert len(shipped) > 50
    for path in shipped:
        for name in ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
            assert name not in path.read_text(), path
