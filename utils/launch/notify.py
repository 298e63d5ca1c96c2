"""Messages about the end of a run, sent to the webhook URL or the command in STOKER_ON_EVENT.

    STOKER_ON_EVENT=https://... python -m utils.launch.notify EVENT RUN JOB TEXT

In a job, slurm/job_setup.sh calls the command, or runs this module for a webhook. Without a job
script, `send_message` does the same. The webhook gets one JSON object by POST. Slack and
Mattermost show the value of `text`, Discord shows `content`. Secrets are masked. The URL often
contains a token, so Stoker does not print the URL.
"""

import http.client
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from utils.config.errors import ExitCode
from utils.host.redaction import redact, write_error

TIMEOUT_S = 8.0  # the job script waits for 10


def send_message(run: Path, code: int, text: str) -> None:
    """Send a message about the end of a run to STOKER_ON_EVENT, if set. Raises nothing.

    code: the exit code of the run. text: why the run ended; only the first line is sent.
    """
    target = os.environ.get("STOKER_ON_EVENT")
    if not target:
        return
    event = {0: "finished", ExitCode.STOPPED: "stopped"}.get(code, "failed")
    if text.startswith("stopped"):  # exit code 0 at max_gpu_hours
        event = "stopped"
    words = [event, str(run), "", redact(text).partition("\n")[0]]
    if target.startswith(("http://", "https://")):
        main(words)
        return
    names = ("STOKER_EVENT", "STOKER_RUN", "STOKER_JOB", "STOKER_TEXT")
    env = {**os.environ, **dict(zip(names, words, strict=True))}
    try:
        subprocess.run(
            [target, *words], env=env, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        write_error(f"STOKER_ON_EVENT: {reason}; nothing else depends on it\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Send a message to the webhook STOKER_ON_EVENT; return 0, or 1 if sending fails.

    argv: [event, run, job, text]. A failure is reported in a line on stderr.
    """
    event, run, job, text = map(redact, sys.argv[1:] if argv is None else argv)
    line = f"{run or 'job'} {event}{f' (job {job})' if job else ''}: {text}"
    content = {"event": event, "run": run, "job": job, "reason": text, "text": line}
    try:
        request = urllib.request.Request(  # noqa: S310 - callers check for http and https
            os.environ["STOKER_ON_EVENT"],
            json.dumps({**content, "content": line}).encode(),
            {"Content-Type": "application/json", "User-Agent": "stoker"},
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):  # noqa: S310 - see above
            return 0
    except urllib.error.HTTPError as error:
        problem = f"it answered {error.code} {error.reason}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        problem = f"it cannot be reached ({type(reason).__name__})"
    write_error(f"the webhook of STOKER_ON_EVENT was not told: {problem}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
