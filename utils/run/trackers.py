"""The trackers of a run: Weights & Biases, MLflow, TensorBoard, Trackio."""

import json
import logging
import os
import sys
from pathlib import Path

from utils.callbacks.journal import fits_terminal
from utils.config.errors import ExitCode
from utils.config.settings import RunSettings
from utils.host.redaction import redact, redacted
from utils.launch.opening import git_state

logger = logging.getLogger(__name__)


def prepare_trackers(settings: RunSettings, name: str | None, run_id: str, step: int) -> None:
    """Set up the trackers in `report_to` to write to output_dir. A resume continues their runs.

    Sets environment variables that the user has not set, and calls `wandb.init`. Rank 0 calls this
    before the Trainer is created. name: the run's name in wandb. step: the step of the checkpoint
    to resume from, or 0.
    """
    directory, default = settings.output_dir.absolute(), os.environ.setdefault
    reporters = set(settings.training.report_to or ())
    if "trackio" in reporters:
        default("TRACKIO_DIR", f"{directory}/trackio")
    if "tensorboard" in reporters:
        folder = default("TENSORBOARD_LOGGING_DIR", f"{directory}/tensorboard")
        if Path(folder).is_dir():
            from torch.utils.tensorboard import SummaryWriter

            SummaryWriter(folder, purge_step=step + 1).close()  # hides steps that will repeat
    if "mlflow" in reporters:
        import mlflow

        default("MLFLOW_TRACKING_URI", f"sqlite:///{directory}/mlflow.db")
        mlflow.set_experiment(default("MLFLOW_EXPERIMENT_NAME", "stoker"))
        # MLflow chooses run ids itself. A tag identifies the run of earlier starts.
        tags = json.loads(os.environ.get("MLFLOW_TAGS", "{}")) | {"stoker_run_id": run_id}
        os.environ["MLFLOW_TAGS"] = json.dumps(tags)
        tagged = f"tags.stoker_run_id = '{run_id}'"
        for known in mlflow.search_runs(filter_string=tagged, output_format="list"):
            default("MLFLOW_RUN_ID", known.info.run_id)
    if "wandb" in reporters:
        import wandb

        prepare_wandb(settings.output_dir, run_id)
        # Trainer uses this wandb run, and adds only TrainingArguments and the model's config.
        config = redacted({**settings.resolved, "git": git_state()})
        config = json.loads(json.dumps(config, default=str))
        wandb.init(name=name, config={"stoker": config})


def prepare_wandb(output_dir: Path, run_id: str) -> None:
    """Set wandb's environment variables that the user has not set.

    Choose offline mode if there is no API key or no connection.
    """
    ours = {
        "PROJECT": "stoker", "DIR": str(output_dir), "RUN_ID": run_id, "RESUME": "allow",
        "NAME": output_dir.absolute().name, "QUIET": "true",
        "DATA_DIR": str(output_dir / "wandb"),  # for tables; by default below the home directory
        "CONSOLE": "off" if fits_terminal() else "auto",  # no redraws of LiveView
    }  # fmt: skip
    for name, value in ours.items():
        os.environ.setdefault(f"WANDB_{name}", value)
    if any(redact(word) != word for word in sys.argv):
        # wandb uploads the command line with its metadata. No switch excludes it alone.
        os.environ["WANDB_X_DISABLE_META"] = "true"
    if "WANDB_MODE" not in os.environ and (reason := _offline_reason()):
        os.environ["WANDB_MODE"], directory = "offline", os.environ["WANDB_DIR"]
        usual, other = f"python status.py {directory} --sync", f"wandb sync {directory}/wandb"
        logger.info(
            "wandb: offline, because %s. Upload later from a machine with internet: %s",
            reason, usual if directory == ours["DIR"] else other,
        )  # fmt: skip


def end_wandb(report: Path, stopped: bool) -> None:
    """Store report.html in wandb as a panel and an artifact. Mark a stopped run as preempted.

    report: the path of report.html. Without the mark, wandb would show a stopped run as failed,
    because the exit code is not 0.
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
