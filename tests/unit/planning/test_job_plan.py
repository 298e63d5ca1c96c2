"""Settings are checked against the job they are to run in, before it waits in the queue."""

import logging
import os
import re
from dataclasses import replace

import planned
import pytest

from utils.config.errors import ConfigurationError
from utils.launch.processes import LaunchFacts
from utils.launch.slurm import REQUEST, JobRequest
from utils.planning.job import Saves, report_job

REQUESTED = JobRequest(
    job_script="slurm/multinode_job.sh", job_name="pretrain", nodes=2, processes_per_node=4,
    gpus_per_node=4, strategy="fsdp2", strategy_file="accelerate_configs/fsdp2.yaml",
    time_limit_s=3600, signal_lead_s=300, requeue=True,
)  # fmt: skip
LAUNCH = LaunchFacts(0, 8, "fsdp2", (), "cpu")
SAVE_BEST = {
    "eval_data": "a=x", "eval_strategy": "steps", "eval_steps": 10,
    "metric_for_best_model": "eval_a_loss", "save_best": "true",
}  # fmt: skip


@pytest.fixture
def report(tmp_path, monkeypatch, caplog):
    """Report a job of these settings and return its lines; None for no request."""

    def run(request=REQUESTED, launch=LAUNCH, total_steps=1000, level="INFO", **settings: object):
        given = {
            "output_dir": tmp_path / "run", "save_steps": 100, "per_device_train_batch_size": 1,
            "use_cpu": None, "dry_run": "true",
        } | settings  # fmt: skip
        parsed = planned.settings(**given)
        monkeypatch.delenv(REQUEST, raising=False)
        if request is not None:
            monkeypatch.setenv(REQUEST, request.to_json())
        caplog.clear()
        with caplog.at_level(logging.INFO, "utils.planning.job"):
            report_job(parsed, launch, total_steps, checkpoint_bytes=2**30)
        return "\n".join(
            record.getMessage() for record in caplog.records if record.levelname == level
        )

    return run


def test_what_will_happen_is_a_fact_per_line(report, tmp_path):
    of_the_run = [
        "processes: 8, strategy fsdp2",
        "saves: every 100 steps (10 in all), at least every 30 minutes; at most 3 at once, "
        "1.0 GiB each: 3.0 GiB, plus final/",
        f"run directory: {tmp_path}/run (new)",
    ]
    assert report(request=None).splitlines() == of_the_run
    assert report().splitlines() == [
        *of_the_run,
        "job: pretrain, 2 node(s) of 4 GPUs, 4 process(es); strategy fsdp2 from "
        "accelerate_configs/fsdp2.yaml",
        "time limit: 1h00m; stop signal after 55m00s: the run saves and is queued again and "
        "resumes",
        f"to stop it with a checkpoint: touch {tmp_path}/run/STOP",
    ]
    assert report(level="WARNING") == ""


def test_every_kind_of_save_is_reported(report):
    assert "10 in all), each new best; at most 4 at once" in report(**SAVE_BEST, save_minutes="0")
    assert "saves: none" in report(save_strategy="no", save_steps=None)
    assert "at most 3 at once" in report(save_total_limit=2)
    assert "at most 10 at once" in report(save_total_limit="null")
    assert "saves: every 250 steps (4 in all)" in report(save_steps=0.25)
    epochs = {"save_strategy": "epoch", "save_steps": None, "num_train_epochs": 4}
    assert "saves: every 100 steps (4 in all)" in report(**epochs, total_steps=400)
    assert [Saves(100, 0, False, 3).scheduled(steps) for steps in (50, 200, 250)] == [1, 2, 3]


def test_what_cannot_work_is_refused_all_at_once(report, monkeypatch):
    late = replace(REQUESTED, signal_lead_s=3600)
    message = r"time limit is 1h00m, but .*signal comes 3600 s before it.*stop as it starts.*--time"
    with pytest.raises(ConfigurationError, match=message):
        report(late)
    with pytest.raises(ConfigurationError, match="fsdp2 needs GPUs, but use_cpu") as caught:
        report(late, use_cpu="true")
    assert len(caught.value.problems) == 2
    # A dry run on a login node is built for the CPU by itself: no fault of the user.
    report(request=None)
    # WORLD_SIZE would make accelerate wait for seven others.
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(ConfigurationError, match="ACCELERATE_USE_CPU asks for the CPU"):
        report(request=None)
    report(request=None, launch=replace(LAUNCH, strategy="ddp"))
    assert os.environ["WORLD_SIZE"] == "8"


def test_what_works_but_badly_is_a_warning(report):
    for change, settings, message in (
        ({"signal_lead_s": None}, {}, "no stop signal .*--signal=B:USR1@300 to slurm/multi"),
        ({"requeue": False}, {}, "not requeued"),
        ({}, {"save_strategy": "no", "save_steps": None}, "a crash loses everything"),
    ):
        warning = report(replace(REQUESTED, **change), level="WARNING", **settings)
        assert len(warning.splitlines()) == 1
        assert re.search(message, warning)
