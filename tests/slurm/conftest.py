"""The Slurm that the tests of this folder share, or the reason why there is none."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from slurm_cluster import SlurmCluster, missing_programs
from training_jobs import TrainingJobs


def why_not() -> str | None:
    """Why no Slurm can be started on this machine; None when it can."""
    missing = missing_programs()
    if missing:
        return f"{', '.join(missing)} not installed (Debian: slurm-wlm, munge)"
    if os.geteuid() != 0:
        return "slurmd starts jobs only as root"
    return None


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Two idle nodes; tests that hurt them bring them back (`start_node`, `wait_for_nodes`)."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    cluster = SlurmCluster(Path(tmp_path_factory.mktemp("slurm")))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def jobs(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingJobs]:
    """The shipped job scripts on that Slurm, with a tokenizer, data and the demo's model."""
    files = tmp_path_factory.mktemp("files")
    tiny.make_tokenizer(files / "tokenizer")
    tiny.save(files / "documents", {"input_ids": tiny.documents(400, seed=0)})
    tiny.save(files / "heldout", {"input_ids": tiny.documents(31, seed=1)})
    handed_in = TrainingJobs(slurm, files)
    yield handed_in
    handed_in.remove_notes()


@pytest.fixture
def idle(slurm: SlurmCluster) -> None:
    """Begin without a job of an earlier test, which may have failed and left one in the queue."""
    slurm.cancel_all()
    slurm.wait_for_nodes()
