"""The Slurm that the tests of this folder share, or the reason why there is none."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, missing_programs


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
