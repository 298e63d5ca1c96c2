"""Uploads what wandb recorded offline, from a machine that reaches its server."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from utils.config.errors import ConfigurationError
from utils.status.run_state import read_status, runs_below
from utils.support.redaction import load_env_file, redact

CUT_OFF = "incomplete record"  # what wandb says of a record whose end is missing


def sync_wandb(directories: Sequence[str], all_in: str | None) -> int:
    """Upload what starts recorded and is not uploaded yet, each into its run.

    Returns an exit code. A start that is still recording is left for later: wandb takes a file
    once. Of one that was killed what is complete goes up; wandb by itself would send that again at
    each call, and the starts behind it never. The key is WANDB_API_KEY, of `.env` too, or a login.
    Raises ConfigurationError for what wandb does not take.
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
    """Return what wandb recorded in a run's starts and has not uploaded, the latest last."""
    found = run.glob("wandb/offline-run-*/run-*.wandb")
    return sorted(file for file in found if not _marker(file).exists())


def _marker(file: Path) -> Path:
    return file.with_name(f"{file.name}.synced")


def _upload(file: Path) -> bool:
    words = [sys.executable, "-m", "wandb", "sync", str(file)]
    online = {**os.environ, "WANDB_MODE": "online"}  # offline is chosen for jobs
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
