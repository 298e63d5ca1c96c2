"""Sets Weights & Biases up so that it works online, offline and across restarts."""

import importlib.util
import logging
import netrc
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from utils.cluster.tokens import redact_argv
from utils.cluster.whole_files import replace_text
from utils.config.errors import ConfigurationError

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
    """Tell wandb that the run goes on later: by its exit code alone it would count as crashed."""
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
    server = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    host = server.hostname or "api.wandb.ai"
    if not os.environ.get("WANDB_API_KEY") and not _has_netrc_entry(host):
        return "there is no WANDB_API_KEY (environment, .env) and no login in ~/.netrc"
    if any(os.environ.get(name) for name in _PROXIES):
        return None
    try:
        port = server.port or (80 if server.scheme == "http" else 443)
        socket.create_connection((host, port), timeout=5).close()
    except OSError as error:
        return f"{host} cannot be reached from this node ({error.strerror or error})"
    return None


def _has_netrc_entry(host: str) -> bool:
    path = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    if not path.is_file():
        return False
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except netrc.NetrcParseError:
        # Its message can hold the file's text.
        logger.warning("%s cannot be parsed: no wandb login taken from it", path)
        return False
