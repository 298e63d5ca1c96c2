"""The old place of `run_script`, until both scripts import it from utils/cluster/script.py."""

from utils.cluster.script import run_script

__all__ = ["run_script"]
