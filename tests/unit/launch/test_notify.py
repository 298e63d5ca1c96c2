"""A webhook gets a job's outcome without secrets; a failure is logged without its URL."""

import http.server
import json
import threading

import pytest

from utils.launch.notify import main, send_message

EVENT = ["failed", "runs/a", "7", 'rank 3 on n2 failed: ValueError: "canary-0123456789" $(no)']


@pytest.fixture
def webhook():
    """Run a server on this machine that answers with `status` and records `requests`."""

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
    """This tests a webhook. tests/integration/test_run_report.py tests a command, in whole runs."""
    monkeypatch.setenv("STOKER_ON_EVENT", f"http://127.0.0.1:{webhook.server_port}/T0/secret")
    for code, text in ((0, "done"), (75, "stopped with a checkpoint"), (78, "step 3\nmore")):
        send_message(tmp_path, code, text)
    assert [json.loads(body)["text"] for *_, body in webhook.requests] == [
        f"{tmp_path} finished: done",
        f"{tmp_path} stopped: stopped with a checkpoint",
        f"{tmp_path} failed: step 3",
    ]
    monkeypatch.setenv("STOKER_ON_EVENT", str(tmp_path / "no command"))
    send_message(tmp_path, 0, "done")
    said = capsys.readouterr().err
    assert said == "STOKER_ON_EVENT: No such file or directory; nothing else depends on it\n"


def test_a_command_gets_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary-0123456789")
    command, told = tmp_path / "tell", tmp_path / "told"
    command.write_text(f'#!/bin/sh\necho "$1 $4 $STOKER_TEXT" > {told}\n')
    command.chmod(0o755)
    monkeypatch.setenv("STOKER_ON_EVENT", str(command))
    send_message(tmp_path, 1, "died of canary-0123456789\nand more")
    assert told.read_text() == "failed died of *** died of ***\n"
