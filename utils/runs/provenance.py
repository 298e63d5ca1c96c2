"""Writes down where a run comes from at each start, and sets Weights & Biases up."""

import datetime
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from utils.checkpoints.files import earlier_starts, read_manifest
from utils.config.errors import ConfigurationError
from utils.launch.processes import LaunchFacts
from utils.support.files import replace_text
from utils.support.redaction import redact_argv

logger = logging.getLogger(__name__)

RUN_ID_FILE = "wandb_run_id"
_PROXIES = ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


def prepare_wandb(report_to: Sequence[str], output_dir: str | os.PathLike[str], rank: int) -> None:
    """Set wandb's environment variables on rank 0, before the Trainer is made.

    Without a key, or where the server cannot be reached, wandb goes offline and says so. A resumed
    run continues the same wandb run: its id is kept in `<output_dir>/wandb_run_id`. What the user
    set (WANDB_MODE, WANDB_PROJECT, ...) stays. Raises ConfigurationError when wandb is asked for
    but not installed.
    """
    if "wandb" not in report_to:
        return
    if importlib.util.find_spec("wandb") is None:
        raise ConfigurationError(
            "report_to asks for wandb, which is not installed: pip install wandb, or set "
            "--report_to none."
        )
    if rank != 0:
        return
    folder = Path(output_dir)
    os.environ.setdefault("WANDB_PROJECT", "stoker")
    os.environ.setdefault("WANDB_DIR", str(folder))
    os.environ.setdefault("WANDB_RUN_ID", _kept_run_id(folder))
    os.environ.setdefault("WANDB_RESUME", "allow")
    if redact_argv(sys.argv) != sys.argv:
        # wandb uploads the command line with its metadata; there is no switch for that part alone.
        os.environ["WANDB_X_DISABLE_META"] = "true"
    if "WANDB_MODE" not in os.environ:
        reason = _offline_reason()
        if reason:
            os.environ["WANDB_MODE"] = "offline"
            logger.info(
                "wandb: offline, because %s. Upload later from a machine with internet: "
                "wandb sync %s",
                reason,
                Path(os.environ["WANDB_DIR"]) / "wandb" / "offline-run-*",
            )


def mark_wandb_stopped(exit_code: int) -> None:
    """Tell wandb that the run resumes later: by its exit code alone it would count as crashed."""
    wandb = sys.modules.get("wandb")
    run = getattr(wandb, "run", None)
    if run is None:
        return
    run.mark_preempting()
    run.finish(exit_code=exit_code)


def _kept_run_id(folder: Path) -> str:
    """Return the wandb run id of this output directory, made at its first start."""
    path = folder / RUN_ID_FILE
    if path.is_file() and (kept := path.read_text(encoding="utf-8").strip()):
        return kept
    run_id = os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(path, run_id + "\n")
    return run_id


def _offline_reason() -> str | None:
    """Why wandb cannot go online; None when it can.

    Without this check a node without internet waits 90 seconds and then fails in `wandb.init`.
    """
    from requests.utils import get_netrc_auth

    server = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    host = server.hostname or "api.wandb.ai"
    if not os.environ.get("WANDB_API_KEY") and get_netrc_auth(f"https://{host}") is None:
        return "there is no WANDB_API_KEY (environment, .env) and no login in ~/.netrc"
    if any(os.environ.get(name) for name in _PROXIES):
        return None
    try:
        port = server.port or (80 if server.scheme == "http" else 443)
        socket.create_connection((host, port), timeout=5).close()
    except OSError as error:
        return f"{host} cannot be reached from this node ({error.strerror or error})"
    return None


PACKAGES = (
    "torch", "transformers", "trl", "accelerate", "datasets", "tokenizers", "peft", "deepspeed",
    "flash-attn",
)  # fmt: skip
_SLURM_FIELDS = {
    "job_id": "SLURM_JOB_ID",
    "job_name": "SLURM_JOB_NAME",
    "array_task_id": "SLURM_ARRAY_TASK_ID",
    "cluster": "SLURM_CLUSTER_NAME",
    "partition": "SLURM_JOB_PARTITION",
    "node_list": "SLURM_JOB_NODELIST",
    "nodes": "SLURM_JOB_NUM_NODES",
    "restart_count": "SLURM_RESTART_COUNT",
}
_REPOSITORY = Path(__file__).resolve().parents[2]


def write_provenance(
    path: str | os.PathLike[str],
    launch: LaunchFacts,
    *,
    run_id: str,
    resumed_from: str | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """Append this start to the list of starts in a JSON file and return it; rank 0 alone calls it.

    `facts` are what the caller knows of this start beyond command, code and machines; they must be
    JSON. The file is replaced in one step, so a kill leaves the old or the new one. Raises
    ConfigurationError when the file there is something else.
    """
    path = Path(path)
    starts = earlier_starts(path)
    entry = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "resumed_from": resumed_from,
        "argv": redact_argv(sys.argv),
        "python": platform.python_version(),
        "versions": package_versions(),
        "git": git_state(_REPOSITORY),
        "launch": {
            "strategy": launch.strategy,
            "world_size": launch.world_size,
            "hosts": list(dict.fromkeys(launch.hosts)),
            "devices": _device_names(launch.device),
        },
        "slurm": slurm_job(os.environ),
        **facts,
    }
    content = {"format": 1, "run_id": run_id, "starts": [*starts, entry]}
    replace_text(path, json.dumps(content, indent=2) + "\n")
    return entry


def package_versions() -> dict[str, str | None]:
    """Return the versions of the packages that make the numbers; None: not installed."""
    return {name: _version(name) for name in PACKAGES}


def warn_of_other_versions(checkpoint: str) -> None:
    """Warn of packages of other versions than wrote a checkpoint: the order of sums may change."""
    written = read_manifest(Path(checkpoint)).versions
    now = package_versions()
    changed = [
        f"{name} {written[name] or 'none'} -> {now[name] or 'none'}"
        for name in PACKAGES
        if name in written and written[name] != now[name]
    ]
    if changed:
        logger.warning(
            "%s was written with other versions: %s. From here on the numbers may differ in their "
            "last bits from those of a run that kept the old ones.",
            checkpoint,
            ", ".join(changed),
        )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the repository at `folder` and whether files differ from it; None without git.

    None too when `folder` only lies inside another repository, whose commit says nothing of it.
    """
    top = _git(folder, "rev-parse", "--show-toplevel")
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    if top is None or commit is None or changes is None or Path(top) != folder.resolve():
        return None
    return {"commit": commit, "dirty": bool(changes)}


def _git(folder: Path, *command: str) -> str | None:
    try:
        # optional locks off: other processes' git commands must not fail because of ours
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *command],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def slurm_job(environment: Mapping[str, str]) -> dict[str, str | None] | None:
    """Slurm's facts about this job; None outside of one."""
    if "SLURM_JOB_ID" not in environment:
        return None
    return {field: environment.get(name) for field, name in _SLURM_FIELDS.items()}


def _device_names(device: str) -> list[str]:
    """Names of the devices that rank 0 sees."""
    if device != "cuda":
        return [device]
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
