"""Packages that are not installed here: said in a line, before anything needs them."""

import importlib.util
import sys

# What the scripts import; pyproject.toml has their versions.
REQUIRED = (
    "torch", "transformers", "trl", "datasets", "accelerate", "peft", "tokenizers", "safetensors",
    "omegaconf", "pyarrow", "numpy", "dotenv", "rich", "tqdm", "yaml", "psutil",
)  # fmt: skip


def is_installed(package: str) -> bool:
    """Whether Python would find a package; it is not imported."""
    return importlib.util.find_spec(package) is not None


def without_packages(missing: str) -> str:
    """Say that this Python lacks a package that every script needs."""
    return (
        f"{sys.executable} has no {missing}: activate the environment that has Stoker's packages "
        "(`source .venv/bin/activate`; in jobs slurm/cluster.env does it, on a file system that "
        "the nodes see), or install them: pip install -r requirements.lock"
    )


def missing_required() -> str | None:
    """Return the packages of every script that are not here, in words; None: all are."""
    missing = [name for name in REQUIRED if not is_installed(name)]
    if len(missing) > 3:
        return f"{', '.join(missing[:3])} and {len(missing) - 3} more"
    return " and ".join(missing) or None
