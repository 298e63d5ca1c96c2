"""The arithmetic of a run, the types of its numbers, and what a dry run prints."""

import logging
import os
from dataclasses import replace

import pytest
import torch
from planned import LAUNCH, settings
from transformers import LlamaConfig

from utils.config.arguments import accumulation_steps
from utils.config.errors import ConfigurationError, Report
from utils.config.settings import parse_fine_tuning
from utils.plan.run_plan import OptimizerStates, choose_optimizer_states, precision_line, report_run

ROUNDED = {"dtype": "bfloat16", "stochastic_rounding": "true"}
LORA = {"dtype": "bfloat16", "use_peft": "true", "model_name_or_path": "m", "model_config": None}
FSDP2 = replace(LAUNCH, world_size=8, strategy="fsdp2")
SAVE_BEST = {
    "eval_data": "a=x", "eval_strategy": "steps", "eval_steps": 10,
    "metric_for_best_model": "eval_a_loss", "save_best": "true",
}  # fmt: skip


def test_what_does_not_divide_is_refused_with_the_nearest_sizes_that_work():
    assert accumulation_steps(24, 3, 4) == 2
    for size, advice in {
        20: "over 4 ranks .* makes 12 at once: use global_batch_size 12 or 24, or per_dev.* 1$",
        5: "use global_batch_size 12$",
        0: "use global_batch_size 12$",
        -1: "use global_batch_size 12$",
        32: "use global_batch_size 24 or 36, or per_device_train_batch_size 2$",
    }.items():
        with pytest.raises(ConfigurationError, match=advice):
            accumulation_steps(size, 3, 4)


def parsed(**changes):
    return settings(parse_fine_tuning, **changes)


@pytest.mark.parametrize(
    ("changes", "states", "said"),
    [
        ({}, None, "float32 weights, no mixed precision"),
        ({"optim_states": "float32"}, None, "float32 weights, no mixed precision"),
        ({"optim_states": "int8"}, OptimizerStates("int8", False), "Adam's states in int8"),
        ({"dtype": "bfloat16"}, None, "rounded to the nearest: updates below a 500th"),
        (ROUNDED, OptimizerStates("bfloat16", True), "in bfloat16, weights rounded stochastically"),
        (LORA, None, "bfloat16 weights, no mixed precision"),  # these weights are not trained
        (LORA | {"bf16": "true"}, None, "bfloat16 weights, mixed precision bf16"),
        (LORA | {"optim_states": "float32"}, None, "bfloat16 weights, no mixed precision"),
    ],
)
def test_torchs_own_optimizer_stays_where_it_keeps_what_is_asked_for(changes, states, said):
    given, config = parsed(**changes), LlamaConfig()
    chosen = choose_optimizer_states(given, config, LAUNCH)
    assert chosen == states
    assert said in precision_line(given, config, chosen, "cpu")


def test_float32_that_nobody_chose_is_spoken_of_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    hint = " (--fp16 true is several times as fast on this GPU)"
    # An explicit false needs no warning.
    for bf16, device, said in (("null", "cuda", hint), ("null", "cpu", ""), ("false", "cuda", "")):
        line = precision_line(parsed(bf16=bf16, use_cpu="false"), LlamaConfig(), None, device)
        assert line == f"float32 weights, no mixed precision{said}"


def test_states_that_cannot_be_kept_so_are_refused(monkeypatch):
    int8, config = parsed(optim_states="int8"), LlamaConfig(dtype=torch.float32)
    for strategy in ("zero2", "fsdp1"):
        with pytest.raises(ConfigurationError, match=f"states int8 .* not go with {strategy}"):
            choose_optimizer_states(int8, config, replace(LAUNCH, strategy=strategy))
    assert choose_optimizer_states(int8, config, replace(LAUNCH, strategy="fsdp2"))
    by_model = parsed(**ROUNDED | {"dtype": "auto"})
    with pytest.raises(ConfigurationError, match="no effect on weights in float32"):
        choose_optimizer_states(by_model, config, LAUNCH)
    assert choose_optimizer_states(by_model, LlamaConfig(dtype=torch.bfloat16), LAUNCH)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ConfigurationError, match=r"bf16 true \(the accelerate config says so\)"):
        parsed(**ROUNDED | {"bf16": "null"})


@pytest.fixture
def report(tmp_path):
    """Report a run of these settings and return its lines."""

    def run(launch=FSDP2, total_steps=1000, level=logging.INFO, **changes: object):
        given = {
            "output_dir": tmp_path / "run", "save_steps": 100, "per_device_train_batch_size": 1,
            "use_cpu": None, "dry_run": "true",
        } | changes  # fmt: skip
        parsed = settings(**given)
        lines = Report()
        report_run(parsed, launch, total_steps, 2**30, lines)
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
    report(launch=replace(FSDP2, strategy="ddp"))
    assert os.environ["WORLD_SIZE"] == "8"
