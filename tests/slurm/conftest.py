"""Fixtures of the Slurm tests: a real cluster, or a skip with the reason, and stand-ins."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import ROOT
from slurm_cluster import PATIENCE_S, PROGRAMS, SlurmCluster
from stand_ins import StandIns
from training_jobs import TrainingJobs, job_environment


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Start a Slurm with idle nodes. A test that stops a node has to start it again."""
    path = os.environ["PATH"] + os.pathsep + "/usr/sbin"
    if missing := [name for name in PROGRAMS if shutil.which(name, path=path) is None]:
        pytest.skip(f"{', '.join(missing)} not installed (Debian: slurm-wlm, munge)")
    if os.geteuid() != 0:
        pytest.skip("slurmd starts jobs only as root")
    cluster = SlurmCluster(Path(tmp_path_factory.mktemp("slurm")))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def jobs(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingJobs]:
    """Submit jobs with the shipped scripts to this Slurm, with a tokenizer, data and a model."""
    handed_in = TrainingJobs(slurm, tmp_path_factory.mktemp("files"))
    yield handed_in
    handed_in.remove_notes()


@pytest.fixture
def call(slurm: SlurmCluster) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command in the repository as a user would, on CPUs with one process per node."""

    def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
        environment = slurm.environment(job_environment({"STOKER_PROCESSES_PER_NODE": "1"} | env))
        return subprocess.run(
            command, cwd=ROOT, env=environment, text=True, timeout=PATIENCE_S, check=False,
            capture_output=True,
        )  # fmt: skip

    return run


@pytest.fixture
def stand_ins(tmp_path: Path) -> StandIns:
    return StandIns(tmp_path / "stand-ins", tmp_path / "repository")


@pytest.fixture
def idle(slurm: SlurmCluster) -> None:
    """Cancel jobs that a failed test left in the queue."""
    slurm.cancel_all()
    slurm.wait_for_nodes()
