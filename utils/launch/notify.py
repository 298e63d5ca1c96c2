"""Tells the user's webhook what became of a job; slurm/job_setup.sh calls it at a job's end.

    STOKER_ON_EVENT=https://... python -m utils.launch.notify EVENT RUN JOB TEXT

The URL gets one JSON object by POST. `text` and `content`, where Slack, Mattermost and Discord look
for a message, hold all of it in a line. Secrets are redacted, and the URL, which often holds a
token, is in no message of ours.
"""

import http.client
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence

from utils.support.redaction import redact

TIMEOUT_S = 8.0  # the job script waits for 10


def main(argv: Sequence[str] | None = None) -> int:
    """Send the event that the words tell; returns 1, with a line, if nobody took it."""
    event, run, job, text = map(redact, sys.argv[1:] if argv is None else argv)
    line = f"{run or 'job'} {event} (job {job}): {text}"
    content = {"event": event, "run": run, "job": job, "reason": text, "text": line}
    try:
        request = urllib.request.Request(  # noqa: S310 - the caller takes http and https alone
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
    sys.stderr.write(f"the webhook of STOKER_ON_EVENT was not told: {redact(problem)}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
