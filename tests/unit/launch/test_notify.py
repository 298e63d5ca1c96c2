"""A webhook gets what became of a job, and no secret; one that fails says so without its URL."""

import http.server
import json
import subprocess
import sys
import threading

import pytest
from launching import ROOT, quiet_environment

from utils.launch.notify import main, tell

EVENT = ["failed", "runs/a", "7", 'rank 3 on n2 failed: ValueError: "canary-0123456789" $(no)']


@pytest.fixture
def webhook():
    """A server on this machine; `status` is what it answers, `requests` what it got."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.server.requests.append((self.path, self.headers["Content-Type"], body))
            self.send_response(self.server.status)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests, server.status = [], 200
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_webhook_gets_one_object_without_secrets(webhook, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "canary-0123456789")
    monkeypatch.setenv("STOKER_ON_EVENT", f"http://127.0.0.1:{webhook.server_port}/T0/secret")
    assert main(EVENT) == 0
    ((path, kind, body),) = webhook.requests
    assert (path, kind) == ("/T0/secret", "application/json")
    reason = 'rank 3 on n2 failed: ValueError: "***" $(no)'
    line = f"runs/a failed (job 7): {reason}"
    assert json.loads(body) == {
        "event": "failed", "run": "runs/a", "job": "7", "reason": reason, "text": line,
        "content": line,
    }  # fmt: skip
    assert capsys.readouterr().err == ""
    webhook.status = 403
    assert main(EVENT) == 1
    said = capsys.readouterr().err
    assert "answered 403" in said
    assert "secret" not in said
    assert str(webhook.server_port) not in said


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/secret", "http://[secret", "http://a b/secret"]
)
def test_a_webhook_that_is_not_there_is_one_line(url, monkeypatch, capsys):
    monkeypatch.setenv("STOKER_ON_EVENT", url)
    assert main(EVENT) == 1
    said = capsys.readouterr().err
    assert said.startswith("the webhook of STOKER_ON_EVENT was not told: it cannot be reached (")
    assert said.count("\n") == 1
    assert "secret" not in said


def test_without_a_job_script_the_run_tells_itself(webhook, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STOKER_ON_EVENT", f"http://127.0.0.1:{webhook.server_port}/T0/secret")
    tell("stopped", tmp_path, "step 3 of 9")
    monkeypatch.setenv("STOKER_NODE_DIR", str(tmp_path))  # a job script tells
    tell("stopped", tmp_path, "step 3 of 9")
    assert [json.loads(body)["text"] for *_, body in webhook.requests] == [
        f"{tmp_path} stopped: step 3 of 9"
    ]
    monkeypatch.delenv("STOKER_NODE_DIR")
    monkeypatch.setenv("STOKER_ON_EVENT", str(tmp_path / "no command"))
    tell("stopped", tmp_path, "step 3 of 9")
    said = capsys.readouterr().err
    assert said == "STOKER_ON_EVENT: No such file or directory; nothing else depends on it\n"


def test_a_run_that_fails_tells_its_error(webhook, tmp_path):
    """At the very end of the process, as a script has it."""
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from utils.launch.script import run_script\n"
        "from utils.support.run_lock import take_run_lock\n"
        "def main():\n    take_run_lock(Path(sys.argv[1]))\n    raise ValueError('of the test')\n"
        "sys.exit(run_script(main))\n"
    )
    env = quiet_environment({"STOKER_ON_EVENT": f"http://127.0.0.1:{webhook.server_port}/"})
    words = [sys.executable, "-c", script, str(tmp_path)]
    assert subprocess.run(words, cwd=ROOT, env=env, check=False).returncode == 1
    ((*_, body),) = webhook.requests
    assert json.loads(body)["text"].startswith(f"{tmp_path} failed: ValueError: of the test (")
