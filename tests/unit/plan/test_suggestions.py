"""--suggest prints the fastest settings that fit, by the forecast, and keeps the global batch."""

import logging
import re
from dataclasses import replace

import planned
import pytest
from planned import LLAMA
from transformers import AutoConfig

from utils.config.errors import ConfigurationError, Report
from utils.config.strategy import AssumedGpus, assumed_gpus
from utils.plan.forecast import (
    Candidate,
    best_of,
    forecast_line,
    make_planner,
    rough_duration,
    shown_durations,
    shown_speeds,
    suggest,
)
from utils.plan.memory_estimate import GIB, WORKSPACE_BYTES
from utils.plan.memory_plan import MEMORY_MARGIN, RESERVED

WIDE = AutoConfig.for_model(
    "llama", hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, vocab_size=2048,
)  # fmt: skip


@pytest.fixture
def plan(monkeypatch):
    """Return a function that makes the planner of a run on four GPUs of `memory_mib` MiB each."""
    for name in ("WORLD_SIZE", "ACCELERATE_CONFIG", "STOKER_GPU_MEMORY_GIB"):
        monkeypatch.delenv(name, raising=False)

    def make(memory_mib: float, ranks=4, strategy="fsdp2", **changes):
        given = planned.settings(
            use_cpu=None, dry_run="true", assume="4xA100-40GB", sequence_length=256, bf16="true",
            **{"global_batch_size": 16} | changes,
        )  # fmt: skip
        run = planned.setup(WIDE, given, world_size=ranks, strategy=strategy)
        planner = make_planner(run, 128.0)
        gpus = AssumedGpus("A100", 1, 4, memory_mib / 1024, 312e12, 300e9)
        return replace(planner, gpus=gpus)

    return make


def suggested(planner):
    report = Report()
    suggest(planner, report)
    ((level, text),) = report
    return level, text


def test_what_is_suggested_fits_and_keeps_the_global_batch(plan):
    # 16 bytes per parameter do not fit a GPU. A quarter of them fits with recomputation.
    planner = plan(200)
    found = list(planner.candidates())
    assert {one.strategy for one in found} == {"fsdp2"}
    room = 200 * 2**20 * (1 - RESERVED["cuda"])
    assert all(one.total_bytes * MEMORY_MARGIN["cuda"] <= room for one in found)
    assert all(16 % (4 * one.micro_batch) == 0 for one in found)
    _, text = suggested(planner)
    lines = text.splitlines()
    assert "suggest: the fastest that fits 4 x A100, by forecast (global_batch_size 16)" in lines[0]
    assert lines[1] == "  strategy: fsdp2"
    best = best_of(found)
    assert lines[2:4] == [
        f"  per_device_train_batch_size: {best.micro_batch}",
        f"  activation_checkpointing: {best.recomputed}",
    ]
    assert lines[4] == "the best of each kind:"
    row = rf"  fsdp2 +{best.micro_batch} +{best.recomputed} +0\.\d +[\d,]+ to [\d,]+"
    assert re.fullmatch(row, lines[6])
    assert planner.setup.settings.run.global_batch_size == 16
    _, text = suggested(plan(200, global_batch_size=None, per_device_train_batch_size=4))
    assert text.splitlines()[3] == "  global_batch_size: 16", "the recipe does not have it"
    # Pasted into the recipe, the settings have the same prediction as in the table.
    again = plan(200, per_device_train_batch_size=best.micro_batch)
    assert again.candidate("fsdp2", best.micro_batch, best.recomputed) == best


def test_a_start_takes_what_is_suggested_beside_the_run_s_other_settings(plan):
    sharded = plan(200, ddp_comm_hook="bf16")
    assert "  strategy: fsdp2\n  per_device_train_batch_size: " in suggested(sharded)[1]
    assert "\n  ddp_comm_hook: null\n  activation_checkpointing" in suggested(sharded)[1]
    text = suggested(plan(40_000, ddp_comm_hook="bf16", global_batch_size=4))[1]
    assert "strategy: multi_gpu" in text
    assert "ddp_comm_hook" not in text
    planner = plan(40_000)
    settings = planner.setup.settings
    of_hsdp = replace(settings, run=replace(settings.run, dp_shard=2))
    hybrid = replace(planner, setup=replace(planner.setup, settings=of_hsdp))
    assert "\n  dp_shard: null\n" in suggested(hybrid)[1]
    # Each size of a growing batch divides, the first one too.
    growing = {"global_batch_size": '{"0": 4, "9": 16}', "per_device_train_batch_size": 1}
    assert {one.micro_batch for one in plan(40_000, **growing).candidates()} == {1}
    assert "GPUs: 8" not in suggested(plan(140, **growing))[1]


def test_more_memory_recomputes_less_and_does_not_shard(plan):
    kinds = [best_of(list(plan(mib).candidates())) for mib in (185, 40_000)]
    chosen = [(one.strategy, one.micro_batch, one.recomputed) for one in kinds]
    assert chosen == [("fsdp2", 1, "full"), ("ddp", 4, "none")]


def test_where_nothing_fits_it_says_what_would(plan):
    level, text = suggested(plan(140))
    assert level == logging.WARNING
    assert "suggest: nothing fits 4 x A100; by the same prediction this fits: GPUs: 16" in text
    assert "GPUs: 16, strategy: fsdp2, per_device_train_batch_size: 1" in text
    assert "use_peft" not in text, "pretraining has none"


def test_deepspeeds_strategies_are_tried_where_it_is_used(plan):
    tried = {one.strategy for one in plan(40_000, strategy="zero2").candidates()}
    assert tried == {"ddp", "zero1", "zero2", "zero3", "fsdp2"}
    alone = plan(40_000, ranks=1, strategy="single")
    assert {one.strategy for one in alone.candidates()} == {"single"}


def test_on_several_nodes_a_copy_on_each_is_suggested_where_it_fits(plan):
    """HSDP wins over FSDP2 if both are equally fast."""
    nodes = AssumedGpus("A100", 2, 2, 250 / 1024, 312e12, 300e9)

    def best(memory_mib: float) -> Candidate:
        planner = replace(plan(0), gpus=replace(nodes, memory_gib=memory_mib / 1024))
        return best_of(list(planner.candidates()))

    assert [best(mib).strategy for mib in (200, 300)] == ["fsdp2", "hsdp"]
    planner = replace(plan(0), gpus=nodes)
    by_four = replace(planner.setup.launch, replicas=1)
    two, four = planner.candidate("hsdp", 1, "full"), planner.candidate("fsdp2", 1, "full")
    assert two.total_bytes > four.total_bytes
    own = replace(planner, setup=replace(planner.setup, launch=replace(by_four, replicas=4)))
    assert own.candidate("hsdp", 1, "full").total_bytes > two.total_bytes, "the run's dp_shard"


def test_gpus_have_to_be_known_and_their_speed_may_not_be(plan, monkeypatch):
    run = planned.setup(LLAMA, planned.settings(dry_run="true"), world_size=4, strategy="fsdp2")
    with pytest.raises(ConfigurationError, match="add --assume 8xH100-80GB"):
        make_planner(run, 9.0)
    monkeypatch.setenv("STOKER_GPU_MEMORY_GIB", "40")
    known = make_planner(run, 9.0)
    assert (known.gpus.memory_gib, known.gpus.world_size) == (40, 4)
    text = suggested(known)[1]
    assert "fits 4 x GPUs of 40 GiB, by forecast" in text
    assert text.endswith("?")
    planner = plan(40_000)
    assert planner.candidate("ddp", 1, "none").total_bytes > WORKSPACE_BYTES, "that of a GPU"
    assert "; less, as documents" in forecast_line(planner, "none", 100, to_longest=True)
    line = forecast_line(planner, "none", 100)
    assert re.search(
        r"forecast: [\d,]+ to [\d,]+ tokens/s on 4 x A100, .* s a step, .* in all", line
    )
    planner = replace(planner, gpus=assumed_gpus("4x40GB"))
    line = forecast_line(planner, "none", 10, to_longest=True)
    assert line == "forecast: no speed, only the memory of 4 x 40GB is known"


def test_of_two_as_fast_the_simpler_comes_first():
    rows = [
        Candidate("ddp", 1, "none", GIB, (1.0, 100.0), True),
        Candidate("ddp", 2, "none", GIB, (1.0, 99.0), True),
        Candidate("fsdp2", 4, "none", GIB, (1.0, 100.5), True),
        Candidate("ddp", 4, "full", 1, (1.0, 80.0), True),
    ]  # fmt: skip
    assert best_of(rows) is rows[1]


def test_durations_are_as_exact_as_a_forecast():
    shown = {30.2: "31 seconds", 600: "10 minutes", 9000: "2.5 hours", 46_000: "13 hours"}
    assert {seconds: rough_duration(seconds) for seconds in shown} == shown
    assert rough_duration(864_000) == "10 days"
    assert shown_speeds((6_480.0, 8_289.0)) == "6,500 to 8,300"
    assert shown_speeds((8_289.0, 8_289.0)) == "8,300"
    assert shown_durations(3600 * 1000, (200.0, 250.0)) == "4 to 5 hours"
    assert shown_durations(60 * 1000, (4.0, 16.0)) == "62 minutes to 4.2 hours"
    assert shown_durations(3600 * 1000, (200.0, 200.0)) == "5 hours"
