import io
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from tqdm import tqdm

from utils.launch.environment import (
    LineFormatter,
    LineHandler,
    configure_environment,
    configure_logging,
)
from utils.support.host import host_name

ROOT = Path(__file__).parents[3]


@pytest.fixture
def fresh_logging(monkeypatch):
    """Undo what configure_logging changes in this process."""
    logging.captureWarnings(False)  # on from an earlier run in this process, it would do nothing
    root = logging.getLogger()
    handlers, level, factory = list(root.handlers), root.level, logging.getLogRecordFactory()
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    yield
    logging.captureWarnings(False)
    logging.setLogRecordFactory(factory)
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("datasets", "httpx", "py.warnings"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def logged(level=logging.INFO):
    out = io.StringIO()
    configure_logging()
    (handler,) = [known for known in logging.getLogger().handlers if isinstance(known, LineHandler)]
    handler.setStream(out)
    log = logging.getLogger("utils.test")
    log.info("started")
    log.warning("careful")
    logging.getLogger("datasets").info("noise")
    warnings.warn("odd thing", stacklevel=1)
    return out.getvalue().splitlines()


def test_rank_0_tells_everything_one_line_an_event(fresh_logging, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    configure_logging()  # a second time doubles no line
    lines = [line.split("  ", 1) for line in logged()]
    assert [len(clock) for clock, _ in lines] == [len("12:34:56")] * 3
    messages = [message for _, message in lines]
    assert messages[:2] == ["started", "WARNING  careful"]
    assert messages[2].startswith("WARNING  UserWarning: odd thing (")


def test_other_ranks_warn_only_and_say_who_they_are(fresh_logging, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    (line,) = logged()
    assert line.endswith(f"  {host_name()} rank 3  WARNING  careful")


def test_a_line_does_not_break_a_progress_bar():
    out = io.StringIO()
    handler = LineHandler()
    handler.setStream(out)
    handler.setFormatter(LineFormatter(0))
    with tqdm(total=3, file=out, mininterval=0) as bar:
        bar.update(1)
        handler.emit(logging.LogRecord("x", logging.INFO, "f", 1, "hello", None, None))
        bar.update(1)
    shown = out.getvalue()
    # On a line of its own: the bar was wiped before and drawn again after.
    assert "hello\n" in shown
    before = shown[: shown.index("hello")].rsplit("\r", 1)[1]
    assert "%" not in before


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, "1"),
        ({"SLURM_JOB_ID": "7", "HF_HUB_OFFLINE": "0"}, "0"),
    ],
)
def test_a_slurm_job_is_offline_unless_the_user_said_otherwise(
    monkeypatch, caplog, environment, expected
):
    for name in ("HF_HUB_OFFLINE", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.INFO):
        configure_environment()
    assert os.environ.get("HF_HUB_OFFLINE") == expected
    assert ("offline (Slurm job); HF_HUB_OFFLINE=0 allows" in caplog.text) == (expected == "1")


def test_telemetry_and_fork_warnings_are_off_unless_the_user_said_otherwise(monkeypatch):
    monkeypatch.delenv("HF_HUB_DISABLE_TELEMETRY", raising=False)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    configure_environment()
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"
    assert os.environ["DO_NOT_TRACK"] == "1"
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


@pytest.mark.slow
def test_the_switches_reach_the_libraries_and_nothing_heavy_is_imported():
    code = (
        "import sys; from utils.launch.environment import configure_environment;"
        "configure_environment();"
        "heavy = {'torch', 'transformers', 'huggingface_hub'};"
        "print(sorted(heavy & set(sys.modules)));"
        "from huggingface_hub import constants;"
        "print(constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_TELEMETRY,"
        " constants.HF_HUB_DISABLE_PROGRESS_BARS)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment["SLURM_JOB_ID"] = "7"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["[]", "True True True"]


def test_tasks_of_srun_are_ranks_before_anything_is_said(fresh_logging, monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    task = {
        "SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "n[1-2]",
    }  # fmt: skip
    for name, value in task.items():
        monkeypatch.setenv(name, value)
    configure_environment()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "2")
    out = capsys.readouterr().out
    assert "launch: srun's 2 tasks are the ranks, rank 0 is at n1:" in out
    assert "offline (Slurm job)" in out
