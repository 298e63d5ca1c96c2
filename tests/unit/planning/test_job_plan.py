"""Settings are held against the job they are to run in, before the job is queued."""

import json
import logging
import os
from dataclasses import replace

import pytest

from utils.config.errors import ConfigurationError
from utils.config.settings import parse_pretraining
from utils.launch.processes import LaunchFacts
from utils.launch.slurm import REQUEST, JobRequest, StopSignal
from utils.planning.job import Saves, measured_pace, report_job

REQUESTED = JobRequest(
    job_script="slurm/multinode_job.sh",
    nodes=2,
    gpus_per_node=4,
    processes_per_node=4,
    tasks_per_node=1,
    strategy="fsdp2",
    strategy_file="accelerate_configs/fsdp2.yaml",
    time_limit_s=3600,
    signal=StopSignal("USR1", 300, to_batch_shell=True),
    requeue=True,
    job_name="pretrain",
    log="%x-%j.log",
    sources={"time": "-t60", "signal": "slurm/multinode_job.sh:9"},
)
LAUNCH = LaunchFacts(0, 8, "fsdp2", (), "cpu")


@pytest.fixture
def report(tmp_path, monkeypatch, caplog):
    """Report a job of these settings and return what was said; None for no request."""

    def run(request=REQUESTED, launch=LAUNCH, total_steps=1000, **settings: object):
        given = {
            "output_dir": tmp_path / "run",
            "global_batch_size": 8,
            "train_data": "x",
            "sequence_length": 64,
            "model_config": "m.json",
            "save_steps": 100,
            "per_device_train_batch_size": 1,
            "dry_run": "true",
        } | settings
        parsed = parse_pretraining(
            [f"--{key}={value}" for key, value in given.items() if value], "test"
        )
        monkeypatch.delenv(REQUEST, raising=False)
        if request is not None:
            monkeypatch.setenv(REQUEST, request.to_json())
        caplog.clear()
        with caplog.at_level(logging.INFO, "utils.planning.job"):
            report_job(parsed, launch, total_steps, checkpoint_bytes=2**30)
        return [(record.levelname, record.getMessage()) for record in caplog.records]

    return run


def said(records, level="INFO"):
    return "\n".join(text for name, text in records if name == level)


def journal(directory, step_time_s=2.0, step=200):
    directory.mkdir(exist_ok=True)
    lines = [{"event": "started", "step": 0}]
    lines += [{"event": "train", "step": at, "step_time_s": step_time_s} for at in (100, step)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_what_will_happen_is_one_fact_a_line(report, tmp_path):
    records = report()
    assert said(records, "WARNING") == ""
    assert said(records).splitlines() == [
        "processes: 8 processes, strategy fsdp2",
        "saves: every 100 steps, 10 in all, and when the last one is 30 minutes old; the newest 3 "
        "are kept",
        "storage: a checkpoint takes about 1.0 GiB, 3 at once (2 stay while the last one is "
        "written): about 3.0 GiB, beside final/",
        f"run directory: {tmp_path}/run (new)",
        "job: pretrain, 2 nodes of 4 GPUs, 4 processes; strategy fsdp2 from "
        "accelerate_configs/fsdp2.yaml",
        "time limit: 1h00m; stop signal after 55m00s: the run saves, exits with 75, and the job "
        "queues again and goes on",
        "pace: a step and a save together must fit into the 300 s between stop signal and time "
        "limit",
        "log: %x-%j.log",
        f"to stop it with a checkpoint: touch {tmp_path}/run/STOP",
    ]


def test_without_the_clock_a_step_may_take_too_long_for_a_checkpoint(report):
    for minutes in ("0", "55.1"):
        text = said(report(save_minutes=minutes))
        assert (
            "pace: not measured yet; the first periodic checkpoint comes in time if a step takes "
            "at most 33 s" in text
        )
    assert "not measured yet" not in said(report(save_minutes="54.9"))


def test_every_kind_of_save_is_said(report):
    settings = {"eval_data": "a=x", "eval_strategy": "steps", "eval_steps": 10}
    settings |= {"metric_for_best_model": "eval_a_loss", "save_best": "true"}
    assert "10 in all, and of each new best, and when" in said(report(**settings))
    assert "10 in all; the newest 3" in said(report(save_minutes="0"))
    text = said(report(save_minutes="0", async_save="true"))
    assert "10 in all, in the background; the newest 3" in text
    assert "pace: a step and two saves together must fit into the 300 s" in text
    assert "saves: none" in said(report(save_strategy="no", save_steps=None))


def test_the_storage_that_checkpoints_take_is_said(report):
    assert ", 3 at once (2 stay while" in said(report(save_total_limit=2))
    assert ", 10 at once (9 stay while the last one is written): about 10.0 GiB" in said(
        report(save_total_limit="null")
    )
    assert "about 1.0 GiB, 1 at most: about 1.0 GiB" in said(report(total_steps=50))
    settings = {"eval_data": "a=x", "eval_strategy": "steps", "eval_steps": 10}
    settings |= {"metric_for_best_model": "eval_a_loss", "save_best": "true"}
    assert "one more where the best is none of the newest: about" in said(report(**settings))


def test_the_rhythm_says_what_is_ahead():
    saves = Saves(100, 0, False, False, 3)
    assert [saves.scheduled(250, since) for since in (0, 99, 100, 200, 249, 250)] == [
        3, 3, 2, 1, 1, 0,
    ]  # fmt: skip
    assert Saves(None, 0, False, False, 3).scheduled(250) == 0


def test_without_a_request_nothing_is_said_about_a_job(report):
    text = said(report(request=None))
    assert "saves: every 100 steps" in text
    assert "job:" not in text
    assert "time limit" not in text


def test_a_measured_pace_gives_duration_restarts_and_lost_work(report, tmp_path):
    journal(tmp_path / "run")
    text = said(report(total_steps=5200))
    # 5000 steps of 2 s are 10,000 s: more than three periods of 3300 s, so three restarts.
    assert "5,000 steps left take about 2h46m, 3 restarts at the time limit" in text
    assert "lost work: a crash costs at most 100 steps, 3m20s" in text
    text = said(report(total_steps=5200, save_minutes=2))
    assert "lost work: a crash costs at most 60 steps, 2m00s" in text
    assert "0 restarts" in said(report(total_steps=1000))


def test_the_pace_is_that_of_the_median_step(tmp_path):
    assert measured_pace(tmp_path) is None
    journal(tmp_path)
    assert measured_pace(tmp_path).step_time_s == 2.0
    assert measured_pace(tmp_path).step == 200
    with (tmp_path / "metrics.jsonl").open("a") as file:  # a step that waited for something
        file.write('{"event": "train", "step": 300, "step_time_s": 60.0}\n')
    assert measured_pace(tmp_path).step_time_s == 2.0
    (tmp_path / "metrics.jsonl").write_text('{"event": "train", "step": 1, "loss": 2}\n')
    assert measured_pace(tmp_path) is None


def test_a_share_of_all_steps_and_epochs_are_worked_out(report):
    assert "saves: every 250 steps, 4 in all" in said(report(save_steps=0.25))
    text = said(report(save_strategy="epoch", save_steps=None, num_train_epochs=4, total_steps=400))
    assert "saves: every 100 steps, 4 in all" in text


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (
            {"signal": StopSignal("USR1", 3600, True)},
            {},
            r"--signal \(slurm/multinode_job.sh:9\) comes 3600 s before the end of a time limit "
            r"of 3600 s \(-t60\): the job would stop as it starts.*longer --time",
        ),
        ({"tasks_per_node": 4}, {}, "starts 4 tasks per node.*give --ntasks-per-node=1"),
        (
            {"signal": None},
            {"save_strategy": "no", "save_steps": None},
            "save_strategy no, and no signal.*everything would be lost.*--signal=B:USR1@300",
        ),
        (
            {"signal": StopSignal("USR1", 300, False)},
            {"save_strategy": "no", "save_steps": None},
            "everything would be lost",
        ),
    ],
)
def test_requests_that_cannot_work_are_refused(report, change, settings, message):
    with pytest.raises(ConfigurationError, match=f"(?s){message}"):
        report(replace(REQUESTED, **change), **settings)


def test_a_save_interval_beyond_the_limit_is_refused_unless_the_signal_saves(report, tmp_path):
    journal(tmp_path / "run", step_time_s=40.0)
    assert "lost work" in said(report())  # the stop signal saves
    with pytest.raises(ConfigurationError, match="one every 1h06m, but the time limit is 1h00m"):
        report(replace(REQUESTED, signal=None), save_minutes="0")
    report(replace(REQUESTED, signal=None), save_steps=50, save_minutes="0")
    report(replace(REQUESTED, signal=None))  # by the clock
    # Nothing was measured: nothing to refuse.
    (tmp_path / "run" / "metrics.jsonl").unlink()
    report(replace(REQUESTED, signal=None))


def test_all_faults_are_named_at_once(report):
    request = replace(REQUESTED, tasks_per_node=2, signal=StopSignal("USR1", 9999, True))
    with pytest.raises(ConfigurationError) as caught:
        report(request, use_cpu="true")
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        ({"signal": None}, {}, "no --signal: .*Add #SBATCH --signal=B:USR1@300 to slurm/multi"),
        (
            {"signal": StopSignal("TERM", 300, True)},
            {},
            r"--signal \(slurm/multinode_job.sh:9\): the batch shell is not told",
        ),
        ({"requeue": False}, {}, "--no-requeue: a stopped job waits for your sbatch"),
        ({"requeue": None}, {}, "no --requeue: .*Add #SBATCH --requeue"),
        (
            {},
            {"save_strategy": "no", "save_steps": None},
            "only a stop is saved, a crash or a lost node loses",
        ),
    ],
)
def test_what_works_but_badly_is_a_warning(report, change, settings, message):
    import re

    warnings = said(report(replace(REQUESTED, **change), **settings), "WARNING")
    assert re.fullmatch(f".*{message}.*", warnings), warnings


def test_no_time_limit_leaves_the_partitions(report):
    text = said(report(replace(REQUESTED, time_limit_s=None, signal=None)))
    assert "time limit: none asked for, the partition's counts" in text


def test_sharding_on_a_cpu_is_refused_as_the_run_would(report, monkeypatch):
    with pytest.raises(ConfigurationError, match=r"fsdp2 needs GPUs, but use_cpu True"):
        report(request=None, use_cpu="true")
    # A dry run on a login node is built for the CPU by itself: no fault of the user.
    report(request=None)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(ConfigurationError, match="but ACCELERATE_USE_CPU asks for the CPU"):
        report(request=None)
    report(request=None, launch=replace(LAUNCH, strategy="ddp"))


def test_the_run_directory_reaches_submit(report, tmp_path):
    found = tmp_path / "facts.json"
    report(replace(REQUESTED, facts_file=str(found)), output_dir="runs/a b")
    assert json.loads(found.read_text()) == {"output_dir": "runs/a b"}


def test_a_dry_run_stands_for_processes_that_are_not_there(report, monkeypatch):
    """WORLD_SIZE would make accelerate wait for seven others."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    report(request=None, launch=replace(LAUNCH, strategy="ddp"))
    assert os.environ["WORLD_SIZE"] == "8"
