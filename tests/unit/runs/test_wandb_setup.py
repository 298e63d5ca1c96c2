import importlib.util
import logging
import os
import socket
import sys
from types import SimpleNamespace

import pytest

from utils.config.errors import ConfigurationError
from utils.runs.provenance import mark_wandb_stopped, prepare_wandb


@pytest.fixture(autouse=True)
def _fresh_environment(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for scheme in ("https", "http", "all"):
        monkeypatch.delenv(f"{scheme}_proxy", raising=False)
        monkeypatch.delenv(f"{scheme}_proxy".upper(), raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--seed", "1"])


@pytest.fixture
def server(monkeypatch):
    """A reachable wandb server: something listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        yield


def test_without_a_key_it_goes_offline_and_says_how_to_upload(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        prepare_wandb(["wandb"], tmp_path / "run", rank=0)
    assert os.environ["WANDB_MODE"] == "offline"
    (line,) = [record.message for record in caplog.records]
    assert "no WANDB_API_KEY" in line
    assert f"wandb sync {tmp_path}/run/wandb/offline-run-*" in line


def test_with_a_key_and_a_server_it_stays_online(tmp_path, monkeypatch, server, caplog):
    monkeypatch.setenv("WANDB_API_KEY", "canary-key-123456")
    with caplog.at_level(logging.INFO):
        prepare_wandb(["wandb"], tmp_path, rank=0)
    assert "WANDB_MODE" not in os.environ
    assert not caplog.records


def test_a_login_in_netrc_counts_as_a_key(tmp_path, server, caplog):
    (tmp_path / "netrc").write_text("machine api.wandb.ai canary-nonsense canary\n")
    prepare_wandb(["wandb"], tmp_path, rank=0)
    assert os.environ.pop("WANDB_MODE") == "offline", "it cannot be parsed"
    assert "canary" not in caplog.text
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password canary\n")
    prepare_wandb(["wandb"], tmp_path, rank=0)
    assert "WANDB_MODE" not in os.environ


def test_a_server_out_of_reach_means_offline_instead_of_a_failed_start(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("WANDB_API_KEY", "canary-key-123456")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:1")
    with caplog.at_level(logging.INFO):
        prepare_wandb(["wandb"], tmp_path, rank=0)
    assert os.environ["WANDB_MODE"] == "offline"
    assert "127.0.0.1 cannot be reached from this node" in caplog.text
    assert "canary" not in caplog.text


def test_what_the_user_set_stays_and_behind_a_proxy_wandb_looks_itself(tmp_path, monkeypatch):
    chosen = {"PROJECT": "mine", "DIR": "/d", "RUN_ID": "r", "RESUME": "never"}
    for name, value in chosen.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("WANDB_API_KEY", "canary-key-123456")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    prepare_wandb(["wandb"], tmp_path, rank=0)
    assert {name: os.environ[f"WANDB_{name}"] for name in chosen} == chosen
    assert "WANDB_MODE" not in os.environ


def test_a_resumed_run_continues_the_same_wandb_run(tmp_path, monkeypatch):
    prepare_wandb(["wandb"], tmp_path / "run", rank=0)
    first = os.environ["WANDB_RUN_ID"]
    monkeypatch.delenv("WANDB_RUN_ID")
    prepare_wandb(["wandb"], tmp_path / "run", rank=0)
    assert os.environ["WANDB_RUN_ID"] == first
    assert os.environ["WANDB_RESUME"] == "allow"
    monkeypatch.delenv("WANDB_RUN_ID")
    prepare_wandb(["wandb"], tmp_path / "other", rank=0)
    assert os.environ["WANDB_RUN_ID"] != first


def test_a_command_line_with_a_secret_is_not_uploaded(tmp_path, monkeypatch):
    prepare_wandb(["wandb"], tmp_path, rank=0)
    assert "WANDB_X_DISABLE_META" not in os.environ
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--hub_token", "canary"])
    prepare_wandb(["wandb"], tmp_path, rank=0)
    assert os.environ["WANDB_X_DISABLE_META"] == "true"


def test_wandb_that_is_not_installed_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigurationError, match="pip install wandb"):
        prepare_wandb(["wandb"], tmp_path, rank=1)


@pytest.mark.parametrize(("report_to", "rank"), [([], 0), (["tensorboard"], 0), (["wandb"], 1)])
def test_where_wandb_does_not_run_nothing_is_set(tmp_path, report_to, rank):
    prepare_wandb(report_to, tmp_path / "run", rank)
    assert not [name for name in os.environ if name.startswith("WANDB_")]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_wandb_itself_runs_offline_with_these_settings_twice(tmp_path):
    import wandb

    runs = []
    for _ in range(2):
        for name in ("WANDB_RUN_ID", "WANDB_MODE"):
            os.environ.pop(name, None)
        prepare_wandb(["wandb"], tmp_path, rank=0)
        os.environ["WANDB_SILENT"] = "true"
        run = wandb.init()
        run.log({"loss": 1.0})
        runs.append((run.id, run.project))
        run.finish()
    assert runs[0] == runs[1]
    assert runs[0][1] == "stoker"
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) >= 1


def test_a_stopped_run_is_told_to_wandb_before_it_ends(monkeypatch):
    told = []

    class Run:
        def mark_preempting(self):
            told.append("preempting")

        def finish(self, exit_code):
            told.append(exit_code)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=Run()))
    mark_wandb_stopped(75)
    assert told == ["preempting", 75]
