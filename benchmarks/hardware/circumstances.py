"""On what and with which versions something was measured."""

import datetime
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.hardware.device import gpu_facts
from utils.host.machine import cpu_fact

PACKAGES = (
    "torch", "transformers", "trl", "accelerate", "datasets", "numpy", "pyarrow", "flash-attn",
    "liger-kernel", "cut-cross-entropy", "litgpt", "unsloth", "torchtune", "torchao",
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]


def circumstances(made_by: str) -> dict[str, Any]:
    """Return the command, the date, the commit, the hardware and the versions installed."""
    return {
        "made_by": made_by,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": current_commit(),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "hardware": hardware(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
    }


def current_commit() -> str:
    """Return the short name of the commit that is checked out, "" where there is no git."""
    return _git("rev-parse", "--short", "HEAD")


def hardware() -> dict[str, Any]:
    """Return what computes here."""
    import torch

    found: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "amx": bool(torch.cpu._is_amx_tile_supported()),
        "avx512_bf16": bool(torch.cpu._is_avx512_bf16_supported()),
    }
    if facts := gpu_facts():
        found["gpu"] = facts.pop("name")
        found["gpu_facts"] = facts
    return found


def cpu_name() -> str:
    """Return the processor's name as Linux has it."""
    return cpu_fact("model name") or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    if shutil.which("git") is None:
        return ""
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()
