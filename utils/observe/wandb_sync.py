"""Uploads wandb's offline records from a machine that reaches wandb's server."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from utils.config.errors import ConfigurationError
from utils.host.redaction import load_env_file, redact
from utils.observe.run_state import read_status, runs_below

CUT_OFF = "incomplete record"  # wandb's message about a record without an end


def sync_wandb(directories: Sequence[str], all_in: str | None) -> int:
    """Upload the records of all starts that are not uploaded yet, each into its run.

    Returns an exit code. The record of a running start is left for later, because wandb accepts a
    file only once. The record of a killed start is uploaded as far as it is complete; `wandb sync`
    alone would upload it again at each call, and never reach later starts. The key is WANDB_API_KEY
    (from the environment or `.env`) or a login. Raises ConfigurationError if wandb refuses one.
    """
    runs = [Path(each) for each in directories] or runs_below(Path(all_in or "runs"))
    load_env_file()
    done, left = 0, []
    for run in runs:
        files = records(run)
        if files and read_status(run, {}).state == "running":
            _say(f"{run} is running; to follow it: wandb beta sync --live {files.pop()}")
        for file in files:
            if _upload(file):
                done += 1
            else:
                left.append(str(file))
    if left:
        raise ConfigurationError(
            f"wandb did not take {', '.join(left)}, as it says above. It needs WANDB_API_KEY in "
            "the environment or .env, or `wandb login`, and a server in reach."
        )
    _say(f"wandb: {done} uploaded, nothing left")
    return 0


def records(run: Path) -> list[Path]:
    """Return the records of a run's starts that are not uploaded yet, the latest last."""
    found = run.glob("wandb/offline-run-*/run-*.wandb")
    return sorted(file for file in found if not _marker(file).exists())


def _marker(file: Path) -> Path:
    return file.with_name(f"{file.name}.synced")


def _upload(file: Path) -> bool:
    words = [sys.executable, "-m", "wandb", "sync", str(file)]
    online = {**os.environ, "WANDB_MODE": "online"}  # jobs are offline
    cut_off = False
    with subprocess.Popen(
        words, env=online, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            _say(line.rstrip())
            cut_off = cut_off or CUT_OFF in line
    if cut_off:
        _say("wandb: this start was killed while it recorded; what is complete is uploaded")
        _marker(file).touch()
    return _marker(file).exists()


def _say(text: str) -> None:
    sys.stdout.write(f"{redact(text)}\n")
    sys.stdout.flush()
