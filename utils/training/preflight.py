"""Looks at the storage and the clocks of all hosts before anything is written or trained."""

from pathlib import Path

from utils.cluster.launch import LaunchFacts


def check_storage(output_dir: Path, checkpoint_bytes: int, launch: LaunchFacts) -> None:
    """Check that all hosts write to one ``output_dir`` with room for two checkpoints.

    Every rank calls it, and every rank raises the same error.
    """
