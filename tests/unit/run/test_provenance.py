"""Each start records its provenance without secrets, and configures wandb."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import requests

from utils.host.machine import cpu_fact
from utils.launch.processes import LaunchFacts
from utils.run.provenance import git_state, write_provenance
from utils.run.trackers import end_wandb, prepare_trackers, prepare_wandb

LAUNCH = LaunchFacts(0, 3, "fsdp2", hosts=("n1", "n1", "n2"), device="cpu")


def write(path, **changes):
    known = {"script": "pretrain", "run_id": "a1", "resumed_from": None, "data": {"train": "abc"}}
    write_provenance(path, LAUNCH, **(known | changes))


def test_each_start_records_where_it_comes_from(tmp_path, monkeypatch):
    path = tmp_path / "provenance.json"
    monkeypatch.setenv("WANDB_API_KEY", "canary-0123456789")
    argv = ["pretrain.py", "--run_name", "canary-0123456789"]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("STOKER_NODE_DIR", raising=False)
    write(path)
    monkeypatch.setenv("STOKER_NODE_DIR", str(tmp_path / "node"))
    write(path, resumed_from="checkpoint-3")
    assert "canary" not in path.read_text()
    first, second = json.loads(path.read_text())["starts"]
    assert first["argv"] == ["pretrain.py", "--run_name", "***"]
    assert first["launch"] == {
        "strategy": "fsdp2", "world_size": 3, "hosts": ["n1", "n2"], "devices": ["cpu"],
        "launcher": None, "replicas": 1, "gpus": [], "cpu": cpu_fact("model name"),
    }  # fmt: skip
    assert second["launch"]["launcher"] == "slurm/launch_node.sh"
    assert first["slurm"]["job_id"] == "7"
    assert (first["script"], first["data"]) == ("pretrain", {"train": "abc"})
    assert (first["resumed_from"], second["resumed_from"]) == (None, "checkpoint-3")
    assert list(tmp_path.iterdir()) == [path], "no draft is left"


def test_git_tells_commit_and_changes(tmp_path):
    assert git_state(tmp_path) is None
    (tmp_path / "a").write_text("1")
    for command in ("init -q", "add a", "-c user.name=t -c user.email=t@t commit -qm one"):
        subprocess.run(["git", "-C", tmp_path, *command.split()], check=True)
    clean = git_state(tmp_path)
    assert len(clean["commit"]) == 40
    assert not clean["dirty"]
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path) == clean | {"dirty": True}
    (tmp_path / "stoker").mkdir()
    assert git_state(tmp_path / "stoker") is None, "another repository's commit says nothing of it"


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    """Pretend that wandb has no settings and no login, and that its server can be reached."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        del os.environ[name]
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--seed", "1"])
    monkeypatch.setattr("requests.head", lambda *_args, **_options: None)
    return monkeypatch


def test_wandb_is_online_with_a_login_and_a_server_and_says_how_to_upload(tmp_path, wandb, caplog):
    caplog.set_level("INFO")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password canary\n")
    prepare_wandb(tmp_path, "a1")
    (tmp_path / "netrc").unlink()
    wandb.setenv("WANDB_API_KEY", "canary-key-123456")
    prepare_wandb(tmp_path, "a1")
    assert "WANDB_MODE" not in os.environ
    own = [os.environ[f"WANDB_{name}"] for name in ("RUN_ID", "RESUME", "PROJECT", "DIR")]
    assert own == ["a1", "allow", "stoker", str(tmp_path)]
    wandb.delenv("WANDB_API_KEY")
    prepare_wandb(tmp_path, "a1")
    assert os.environ.pop("WANDB_MODE") == "offline"
    (line,) = caplog.messages
    assert "no WANDB_API_KEY" in line
    assert f": python status.py {tmp_path} --sync" in line
    wandb.setenv("WANDB_API_KEY", "canary-key-123456")
    wandb.setattr("requests.head", mock.Mock(side_effect=requests.ConnectionError))
    prepare_wandb(tmp_path, "a1")
    assert os.environ.pop("WANDB_MODE") == "offline", "instead of a failed start"
    wandb.setenv("WANDB_DIR", "/elsewhere")
    prepare_wandb(tmp_path, "a1")
    assert caplog.messages[-1].endswith(": wandb sync /elsewhere/wandb")
    assert "canary" not in caplog.text


def test_what_the_user_set_stays_and_a_secret_is_not_uploaded(tmp_path, wandb):
    wandb.setenv("HF_TOKEN", "canary-0123456789")
    wandb.setattr(sys, "argv", ["pretrain.py", "--run_name", "canary-0123456789"])
    chosen = {"PROJECT": "mine", "DIR": "/d", "RUN_ID": "r", "RESUME": "never", "MODE": "offline"}
    for name, value in chosen.items():
        wandb.setenv(f"WANDB_{name}", value)
    prepare_wandb(tmp_path, "a1")
    assert {name: os.environ[f"WANDB_{name}"] for name in chosen} == chosen
    assert os.environ["WANDB_X_DISABLE_META"] == "true"


def test_wandb_gets_the_report_and_the_stop_before_the_run_ends(tmp_path, monkeypatch):
    told = []
    run = SimpleNamespace(
        id="a1",
        log=told.append,
        log_artifact=lambda *what, **more: told.append((*what, more)),
        mark_preempting=lambda: told.append("preempting"),
        finish=lambda **how: told.append(how),
    )
    wandb = SimpleNamespace(run=run, Html=lambda path, inject: (path, inject))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    report = tmp_path / "report.html"
    end_wandb(report, stopped=True)
    assert told == ["preempting", {"exit_code": 75}]
    report.touch()
    end_wandb(report, stopped=False)
    kept = (str(report), {"name": "report-a1", "type": "report"})
    assert told[2:] == [{"report": (str(report), False)}, kept]


def test_mlflow_finds_its_run_and_keeps_user_settings(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    asked, known = [], [SimpleNamespace(info=SimpleNamespace(run_id="r7"))]
    mlflow = SimpleNamespace(
        set_experiment=asked.append,
        search_runs=lambda **how: asked.append(how["filter_string"]) or known,
    )
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setenv("MLFLOW_TAGS", '{"team": "x"}')
    training = SimpleNamespace(report_to=["mlflow"])
    settings = SimpleNamespace(training=training, resolved={}, output_dir=tmp_path)
    prepare_trackers(settings, "run", "a1b2c3d4", 0)
    assert asked == ["stoker", "tags.stoker_run_id = 'a1b2c3d4'"]
    assert os.environ["MLFLOW_TRACKING_URI"] == f"sqlite:///{tmp_path}/mlflow.db"
    assert json.loads(os.environ["MLFLOW_TAGS"]) == {"team": "x", "stoker_run_id": "a1b2c3d4"}
    assert os.environ["MLFLOW_RUN_ID"] == "r7"
