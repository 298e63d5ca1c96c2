"""Real trackers show all starts of a run as one run.

MLflow and trackio are not installed by default. To test them: pip install mlflow trackio, then
pytest tests/integration/test_trackers.py
"""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from launching import ROOT, quiet_environment
from wandb_server import wandb_server

from utils.host.journal_file import read_journal

# Every spelling of the secret contains these words.
WORDS = ("Xq7canary", "Yq8canary", "Zq9canary")
SECRETS = {
    "HF_TOKEN": f"hf_{WORDS[0]}{'c' * 30}",
    "MY_SECRET": f"quo\"te's \\{WORDS[1]}\\n+/%é<&>: #",
    "CLUSTER_PASSWORD": f"{WORDS[2]}-0123",
}
Points = list[tuple[int, float]]


@pytest.fixture
def tracked(pretraining, heldout, tmp_path):
    """Return a function: run with a tracker, cut the run back to step 3, finish it.

    It returns the run's directory, and its losses by step in training and evaluation.
    """

    def run(tracker: str) -> tuple[Path, dict[int, float], dict[int, float]]:
        pytest.importorskip(tracker)
        secrets = " and ".join(SECRETS.values())
        argv = pretraining(
            tmp_path / "run", report_to=tracker, **heldout, run_name=secrets, push_to_hub=True,
            hub_model_id=f"me/{SECRETS['CLUSTER_PASSWORD']}", sample_prompts=f"t9 {secrets}",
            sample_max_new_tokens=2,
        )  # fmt: skip
        home = {"HOME": str(tmp_path / "home"), "WANDB_MODE": "offline"}
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        shown = ""
        for _start in range(2):
            done = subprocess.run(
                [sys.executable, str(ROOT / "pretrain.py"), *argv], cwd=elsewhere,
                env=quiet_environment({**home, **SECRETS}), capture_output=True, text=True,
                check=False,
            )  # fmt: skip
            shown += done.stdout + done.stderr
            assert done.returncode == 0, shown
            tiny.cut(tmp_path / "run", 3)
        assert not list(elsewhere.iterdir()), "all is in the run directory"
        assert "as a scalar" not in shown
        assert "dropped this attribute" not in shown
        assert "changed since" not in shown, "a masked setting is the same as before"
        for path in (tmp_path / "run").rglob("*"):
            content = path.read_bytes() if path.is_file() else b""
            assert not [word for word in WORDS if word.encode() in content], path
        assert not [word for word in WORDS if word in shown]
        lines = read_journal(tmp_path / "run" / "metrics.jsonl")
        losses, evaluations = (
            {line["step"]: line[key] for line in lines if key in line}
            for key in ("loss", "eval_heldout_loss")
        )
        assert [*losses, *evaluations] == [1, 2, 3, 4, 5, 6, 3, 6]
        return tmp_path / "run", losses, evaluations

    return run


def test_tensorboard(tracked):
    run, losses, evaluations = tracked("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for tag, wanted in {"train/loss": losses, "eval/heldout_loss": evaluations}.items():
        found = [(event.step, event.value) for event in events.Scalars(tag)]
        assert [step for step, _ in found] == list(wanted), "no step twice"
        assert dict(found) == pytest.approx(wanted)


def assert_appended(found: Points, wanted: dict[int, float]) -> None:
    """Check the points of a tracker that only appends: steps that were undone are there twice."""
    assert dict(found) == wanted
    assert len(found) > len(wanted)


def test_mlflow(tracked):
    run, losses, evaluations = tracked("mlflow")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{run}/mlflow.db")
    experiment = client.get_experiment_by_name("stoker")
    (known,) = client.search_runs([experiment.experiment_id])
    assert known.info.status == "FINISHED"
    for name, wanted in {"loss": losses, "eval_heldout_loss": evaluations}.items():
        history = client.get_metric_history(known.info.run_id, name)
        assert_appended([(point.step, point.value) for point in history], wanted)


def points_of(lines: list[dict], name: str) -> Points:
    return [(line["train/global_step"], line[name]) for line in lines if name in line]


def test_trackio(tracked):
    run, losses, evaluations = tracked("trackio")
    (database,) = (run / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = list(connection.execute("select run_name, metrics from metrics order by id"))
    assert len({name for name, _ in rows}) == 1
    lines = [json.loads(metrics) for _, metrics in rows]
    assert_appended(points_of(lines, "train/loss"), losses)
    assert_appended(points_of(lines, "eval/heldout_loss"), evaluations)


def test_an_offline_wandb_record_is_uploaded_into_one_run(tracked, tmp_path):
    """status.py --sync reads .env. It uploads a killed start's record as far as it is complete."""
    run, losses, evaluations = tracked("wandb")
    killed, _ = records = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    os.truncate(killed, killed.stat().st_size - 10)
    key = "k" * 40

    def sync() -> tuple[int, str]:
        variables = {"HOME": str(tmp_path / "home"), "WANDB_BASE_URL": server.url}
        done = subprocess.run(
            [sys.executable, str(ROOT / "status.py"), str(run), "--sync"],
            cwd=tmp_path, env=quiet_environment(variables), capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    with wandb_server(key) as server:
        code, shown = sync()
        assert code == 2
        assert f"wandb did not take {records[0]}, {records[1]}" in shown
        assert "WANDB_API_KEY in the environment or .env" in shown
        assert not server.configs
        (tmp_path / ".env").write_text(f"WANDB_API_KEY={key}\n")
        (tmp_path / ".env").chmod(0o600)
        code, shown = sync()
        assert code == 0, shown
        assert key not in shown
        assert "this start was killed while it recorded" in shown
        assert sync() == (0, "wandb: 0 uploaded, nothing left\n")
    ((_, lines),) = server.points.items()
    assert_appended(points_of(lines, "train/loss"), losses)
    assert_appended(points_of(lines, "eval/heldout_loss"), evaluations)
    assert {kind for _, kind in server.artifacts} == {"report", "run_table"}, "samples are a table"
    assert b"<title>run</title>" in server.files["/artifact/report.html"]
