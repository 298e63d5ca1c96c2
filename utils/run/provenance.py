"""The record of settings, code and machines of each start of a run, and the setup of trackers."""

import contextlib
import datetime
import importlib.metadata
import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.callbacks.live import fits_terminal
from utils.checkpoints.record import RunRecord
from utils.config.errors import ExitCode
from utils.config.settings import RunSettings
from utils.host.atomic_files import replace_text
from utils.host.redaction import redact, redacted
from utils.launch.processes import LaunchFacts
from utils.launch.signals import NODE_DIR
from utils.launch.slurm import job_times

logger = logging.getLogger(__name__)


def prepare_trackers(
    settings: RunSettings, name: str | None, output_dir: Path, run_id: str, step: int
) -> None:
    """Let the trackers of `report_to` write into the run directory, as one run for all starts.

    Sets their environment variables before the Trainer is made. Values that the user has set stay.
    `name` is the run's name in the trackers. `step` is the step from which this start resumes. Only
    rank 0 calls this.
    """
    place, default = output_dir.absolute(), os.environ.setdefault
    reporters = set(settings.training.report_to or ())
    if "trackio" in reporters:
        default("TRACKIO_DIR", f"{place}/trackio")
    if "tensorboard" in reporters:
        folder = default("TENSORBOARD_LOGGING_DIR", f"{place}/tensorboard")
        if Path(folder).is_dir():
            from torch.utils.tensorboard import SummaryWriter

            SummaryWriter(folder, purge_step=step + 1).close()  # hides steps to repeat
    if "mlflow" in reporters:
        import mlflow

        default("MLFLOW_TRACKING_URI", f"sqlite:///{place}/mlflow.db")
        mlflow.set_experiment(default("MLFLOW_EXPERIMENT_NAME", "stoker"))
        # MLflow chooses run ids itself. A tag finds the run that earlier starts made.
        tags = json.loads(os.environ.get("MLFLOW_TAGS", "{}")) | {"stoker_run_id": run_id}
        os.environ["MLFLOW_TAGS"] = json.dumps(tags)
        tagged = f"tags.stoker_run_id = '{run_id}'"
        for known in mlflow.search_runs(filter_string=tagged, output_format="list"):
            default("MLFLOW_RUN_ID", known.info.run_id)
    if "wandb" in reporters:
        import wandb

        prepare_wandb(output_dir, run_id)
        # Trainer uses this run of wandb, and adds only its own settings.
        config = redacted({**settings.resolved, "git": git_state(_REPOSITORY)})
        config = json.loads(json.dumps(config, default=str))
        wandb.init(name=name, config={"stoker": config})


def prepare_wandb(output_dir: Path, run_id: str) -> None:
    """Set wandb's environment variables. Go offline without a key or a connection to the server."""
    ours = {
        "PROJECT": "stoker", "DIR": str(output_dir), "RUN_ID": run_id, "RESUME": "allow",
        "NAME": output_dir.absolute().name, "QUIET": "true",
        "DATA_DIR": str(output_dir / "wandb"),  # of tables; by default below the home directory
        "CONSOLE": "off" if fits_terminal() else "auto",  # it would record each redraw of LiveView
    }  # fmt: skip
    for name, value in ours.items():
        os.environ.setdefault(f"WANDB_{name}", value)
    if any(redact(word) != word for word in sys.argv):
        # wandb uploads the command line with its metadata; there is no switch for that part alone.
        os.environ["WANDB_X_DISABLE_META"] = "true"
    if "WANDB_MODE" not in os.environ and (reason := _offline_reason()):
        os.environ["WANDB_MODE"], place = "offline", os.environ["WANDB_DIR"]
        usual, other = f"python status.py {place} --sync", f"wandb sync {place}/wandb"
        logger.info(
            "wandb: offline, because %s. Upload later from a machine with internet: %s",
            reason, usual if place == ours["DIR"] else other,
        )  # fmt: skip


def end_wandb(report: Path, stopped: bool) -> None:
    """Store the report in wandb, as a panel and an artifact, and mark a stopped run as preempted.

    Without the mark wandb would show a stopped run as failed, because of its exit code.
    """
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is not None and report.is_file():
        run.log({"report": sys.modules["wandb"].Html(str(report), inject=False)})
        run.log_artifact(str(report), name=f"report-{run.id}", type="report")
    if run is not None and stopped:
        run.mark_preempting()
        run.finish(exit_code=ExitCode.STOPPED)


def _offline_reason() -> str | None:
    """Return why wandb cannot go online, or None if it can.

    Without this check a node without internet waits 90 seconds and then fails in `wandb.init`.
    """
    import requests

    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    if not os.environ.get("WANDB_API_KEY") and requests.utils.get_netrc_auth(server) is None:
        return "there is no WANDB_API_KEY (environment, .env) and no login in ~/.netrc"
    try:
        requests.head(server, timeout=5)  # through the proxy, if there is one
    except requests.RequestException as error:
        return f"{server} cannot be reached from this node ({type(error).__name__})"
    return None


PACKAGES = (
    "torch", "transformers", "trl", "accelerate", "datasets", "tokenizers", "peft", "deepspeed",
    "flash-attn",
)  # fmt: skip
_SLURM_FIELDS = {
    "job_id": "SLURM_JOB_ID", "job_name": "SLURM_JOB_NAME",
    "array_job_id": "SLURM_ARRAY_JOB_ID", "array_task_id": "SLURM_ARRAY_TASK_ID",
    "cluster": "SLURM_CLUSTER_NAME", "partition": "SLURM_JOB_PARTITION",
    "node_list": "SLURM_JOB_NODELIST", "nodes": "SLURM_JOB_NUM_NODES",
    "restart_count": "SLURM_RESTART_COUNT",
}  # fmt: skip
LAUNCHER = "slurm/launch_node.sh"
_REPOSITORY = Path(__file__).resolve().parents[2]


def write_provenance(
    path: Path, launch: LaunchFacts, *, run_id: str, resumed_from: str | None, **facts: Any
) -> None:
    """Append an entry for this start to the list of starts in a JSON file; only on rank 0.

    `facts` are the caller's JSON values for the entry, besides command, code and machines. A kill
    leaves the old file or the new one. Raises ConfigurationError if the file has other contents.
    """
    import torch

    devices = [launch.device]
    if launch.device == "cuda":
        devices = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
    slurm = slurm_job(os.environ)
    entry = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "resumed_from": resumed_from,
        "argv": sys.argv,
        "python": platform.python_version(),
        "git": git_state(_REPOSITORY),
        "launch": {
            "strategy": launch.strategy,
            "world_size": launch.world_size,
            "hosts": list(dict.fromkeys(launch.hosts)),
            "devices": devices,
            "launcher": LAUNCHER if NODE_DIR in os.environ else None,
        },
        "slurm": slurm and {**slurm, **job_times()},
        **facts,
    }
    content = {"format": 1, "run_id": run_id, "starts": [*RunRecord(path.parent).starts, entry]}
    replace_text(path, json.dumps(content, indent=2) + "\n")


def package_versions() -> dict[str, str | None]:
    """Return the versions of the packages that affect a run's numbers; None if not installed."""
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the git repository at `folder` and whether files differ, or None."""
    if not (folder / ".git").exists():
        return None
    # Optional locks off: other processes' git commands must not fail because of ours.
    command = ["git", "--no-optional-locks", "-C", str(folder)]
    command += ["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    commit, _, changed = done.stdout.strip().partition("-")
    return {"commit": commit, "dirty": bool(changed)}


def slurm_job(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return Slurm's facts about this job, or None outside of a job."""
    if "SLURM_JOB_ID" not in environment:
        return None
    return {field: environment.get(name) for field, name in _SLURM_FIELDS.items()}
