"""Inherited variables are named with their effects, and the limit of open files is raised."""

import logging
import os
import resource

import pytest

from utils.host.environment import LIMIT, OPEN_FILES, inherited, report_environment

# Variables that guides of clusters and of training projects set, and variables without effect.
ACTING = {
    "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "eth0", "CUDA_LAUNCH_BLOCKING": "1",
    "CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "1", "UCX_TLS": "tcp", "OMPI_MCA_coll": "^h",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVIDIA_TF32_OVERRIDE": "0", "TORCH_COMPILE_DISABLE": "1",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "PYTORCH_CUDA_ALLOC_CONF": "x",
    "TORCHDYNAMO_DISABLE": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
}  # fmt: skip
OTHERS = {
    "CUDA_HOME": "/usr/local/cuda", "CUDA_PATH": "/x", "NCCL_VERSION": "2.2", "PATH": "/bin",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "TRITON_CACHE_DIR": "/x", "FINDER": "1", "HOME": "/",
    "TORCHELASTIC_RUN_ID": "x", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "7200",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # accelerate's own
}  # fmt: skip


@pytest.fixture
def limits(monkeypatch):
    """Return a function that sets the limits of open files that the system reports."""
    now = [0, 0]

    def change(soft, hard):
        now[:] = soft, hard

    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(now))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: change(*both))
    change.now = now
    change(OPEN_FILES, OPEN_FILES)
    return change


def test_variables_are_named_with_their_effects(monkeypatch, caplog, limits):
    assert inherited({**ACTING, **OTHERS}) == [
        *sorted(f"{name}={value}" for name, value in ACTING.items()), f"{LIMIT}={OPEN_FILES}",
    ]  # fmt: skip
    for name in (*inherited(os.environ), "SLURM_JOB_ID", "WORLD_SIZE"):
        monkeypatch.delenv(name.partition("=")[0], raising=False)
    report_environment()
    assert not caplog.messages
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # logged, but no warning
    report_environment()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage().endswith("CUDA_VISIBLE_DEVICES=0 (only these GPUs are seen)")
    caplog.clear()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("UCX_TLS", "tcp")
    report_environment()
    monkeypatch.setenv("WORLD_SIZE", "2")  # launchers set OMP_NUM_THREADS
    report_environment()
    start = "inherited from the environment: CUDA_LAUNCH_BLOCKING=1 (several times slower), "
    assert caplog.messages == [
        f"{start}OMP_NUM_THREADS=1 (the threads of each rank), UCX_TLS=tcp", f"{start}UCX_TLS=tcp",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("soft", "hard", "after", "warned"),
    [
        (1024, 524288, (4096, 524288), False),
        (1024, -1, (4096, -1), False),
        (1024, 2048, (2048, 2048), True),
        (8192, 8192, (8192, 8192), False),
        (-1, -1, (-1, -1), False),
    ],
)
def test_the_limit_of_open_files_is_raised(soft, hard, after, warned, limits, caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    for name in ACTING:
        monkeypatch.delenv(name, raising=False)
    limits(soft, hard)
    report_environment()
    assert tuple(limits.now) == after
    told = [line for line in caplog.messages if line.startswith("ulimit -n can be at most 2,048")]
    assert bool(told) == warned
