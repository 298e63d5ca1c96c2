"""A dry run prints what will happen, and refuses a GPU strategy on a CPU."""

import logging
import os
from dataclasses import replace

import planned
import pytest

from utils.config.errors import ConfigurationError
from utils.launch.processes import LaunchFacts
from utils.plan.run_plan import report_run

LAUNCH = LaunchFacts(0, 8, "fsdp2", (), "cpu")
SAVE_BEST = {
    "eval_data": "a=x", "eval_strategy": "steps", "eval_steps": 10,
    "metric_for_best_model": "eval_a_loss", "save_best": "true",
}  # fmt: skip


@pytest.fixture
def report(tmp_path):
    """Report a run of these settings and return its lines."""

    def run(launch=LAUNCH, total_steps=1000, level=logging.INFO, **settings: object):
        given = {
            "output_dir": tmp_path / "run", "save_steps": 100, "per_device_train_batch_size": 1,
            "use_cpu": None, "dry_run": "true",
        } | settings  # fmt: skip
        parsed = planned.settings(**given)
        lines = report_run(parsed, launch, total_steps, checkpoint_bytes=2**30)
        return "\n".join(text for at, text in lines if at == level)

    return run


def test_what_will_happen_is_a_fact_per_line(report, tmp_path):
    assert report().splitlines() == [
        "processes: 8, strategy fsdp2",
        "saves: every 100 steps (10 in all), at least every 30 minutes; at most 3 at once, "
        "1.0 GiB each: 3.0 GiB, plus final/",
        f"run directory: {tmp_path}/run (new)",
        f"to stop it with a checkpoint: touch {tmp_path}/run/STOP",
    ]
    assert report(level=logging.WARNING) == ""
    unsaved = report(level=logging.WARNING, save_strategy="no", save_steps=None)
    assert unsaved == "save_strategy no: only a stop is saved, a crash loses everything"


def test_every_kind_of_save_is_reported(report):
    assert "10 in all), each new best; at most 4 at once" in report(**SAVE_BEST, save_minutes="0")
    assert "(3 in all); " in report(total_steps=250, save_minutes="0")
    assert "at most 3 at once" in report(save_total_limit=2)
    assert "at most 10 at once" in report(save_total_limit="null")
    assert "saves: every 250 steps (4 in all)" in report(save_steps=0.25)
    epochs = {"save_strategy": "epoch", "save_steps": None, "num_train_epochs": 4}
    assert "saves: every 100 steps (4 in all)" in report(**epochs, total_steps=400)


def test_a_strategy_for_gpus_is_refused_on_a_cpu(report, monkeypatch):
    # A dry run on a login node uses the CPU although the user did not ask for it.
    report()
    with pytest.raises(ConfigurationError, match="fsdp2 needs GPUs, but use_cpu"):
        report(use_cpu="true")
    # With WORLD_SIZE set, accelerate would wait for seven other processes.
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(ConfigurationError, match="ACCELERATE_USE_CPU asks for the CPU"):
        report()
    report(launch=replace(LAUNCH, strategy="ddp"))
    assert os.environ["WORLD_SIZE"] == "8"
