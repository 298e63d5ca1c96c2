"""The choice of activation checkpointing, and the refusal of what a GPU cannot hold."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from families import tiny_config
from planned import LAUNCH, LLAMA, settings

from utils.config.errors import ConfigurationError
from utils.launch.processes import LaunchFacts
from utils.model.compilation import CHOICES
from utils.model.loss_head import LossHeadChoice
from utils.planning import memory_plan
from utils.planning.memory_estimate import GIB, MemoryEstimate
from utils.planning.memory_plan import GPUS, plan_memory, planned_device, refusal
from utils.planning.memory_trace import Workload

WORK = Workload(1, 64, torch.float32, None, "cuda", None, LossHeadChoice("fused", ""))
ALONE = LaunchFacts(0, 1, "single", ("n1",), "cuda")


@pytest.mark.parametrize(
    ("given", "gib"),
    [
        (None, None), ("", None), ("80", 80), ("39.5", 39.5), ("H100", 79.1), ("h100", 79.1),
        ("NVIDIA H200", 139.8), ("A100-40GB", 39.4), ("A100_80", 79.1), ("MI300X", 191.7),
        ("RTX 4090", 23.6), ("94 GiB", 94),
    ],
)  # fmt: skip
def test_a_number_of_gib_or_a_name(given, gib):
    environment = {} if given is None else {"STOKER_GPU_MEMORY_GIB": given}
    expected = (None, None) if gib is None else (int(gib * GIB * 0.94), int(gib * GIB))
    assert planned_device(environment) == expected


@pytest.mark.parametrize("given", ["H1000X", "-3", "0", "nan", "80 GPUs"])
def test_anything_else_is_refused_with_the_names(given):
    with pytest.raises(ConfigurationError, match=f"{given}: expected the GiB of one GPU.*H100"):
        planned_device({"STOKER_GPU_MEMORY_GIB": given})


def test_names_are_as_they_are_looked_up():
    for name, gib in GPUS.items():
        assert planned_device({"STOKER_GPU_MEMORY_GIB": name.upper()})[1] == int(gib * GIB)


def estimate(launch, work, choice):
    """A model of 90 GiB, and 10 GiB a sequence, or one where it is checkpointed."""
    shared = 90 * GIB // (launch.world_size if launch.strategy == "fsdp2" else 1)
    activations = work.rows * (GIB if choice == "full" else 10 * GIB)
    return MemoryEstimate(1, 1, shared, 0, 0, activations, 0, 0, counted=True)


def refused(launch, rows, choice, device_gib):
    work = replace(WORK, rows=rows)
    needed = estimate(launch, work, choice).total
    return refusal(needed, int(device_gib * GIB), launch, work, choice, estimate)


def test_the_refusal_says_which_strategy_can_hold_it():
    said = refused(ALONE, 4, "none", 80)
    assert "130.0 GiB predicted for a GPU of 80.0 GiB (strategy single, 1 rank, micro-b" in said
    assert "what fits: accelerate_configs/fsdp2.yaml on 2 GPUs (activation_checkpointing: f" in said
    assert ": 49.0 GiB" in said
    assert "activation_checkpointing: full: " not in said  # 94 GiB


def test_what_costs_least_comes_first():
    said = refused(ALONE, 4, "none", 110)
    first, second, _ = said.partition("what fits: ")[2].split("; or ")
    assert first == "activation_checkpointing: full: 94.0 GiB"
    assert second == "per_device_train_batch_size: 1: 100.0 GiB"


def test_under_fsdp_it_takes_more_gpus():
    launch = replace(ALONE, strategy="fsdp2", world_size=2)
    assert "fsdp2.yaml on 8 GPUs" in refused(launch, 1, "full", 15)


def test_where_nothing_can_hold_it_that_is_logged():
    assert "nothing fits it, up to 1024 GPUs" in refused(ALONE, 1, "full", 0.5)


@pytest.mark.parametrize(
    ("gib", "counted", "ends"), [(90, True, True), (85, True, False), (900, False, False)]
)
def test_a_prediction_may_be_wrong_and_a_rule_of_thumb_refuses_nothing(
    gib, counted, ends, monkeypatch
):
    made = MemoryEstimate(1, 1, gib * GIB, 0, 0, 0, 0, 0, counted=counted)
    monkeypatch.setattr(memory_plan, "estimate_memory", lambda *_: made)
    monkeypatch.setenv("STOKER_GPU_MEMORY_GIB", "80")
    expected = pytest.raises(ConfigurationError, match="for a GPU of 80") if ends else nullcontext()
    kernels = memory_plan.Kernels(None, LossHeadChoice("fused", ""), compiled=False)
    with expected:
        assert plan_memory(settings(), LLAMA, ALONE, kernels).choice == "none"


TOTALS = {"none": 30, "selective": 20, "full": 10}


@pytest.mark.parametrize(
    ("room", "choice"), [(33, "none"), (32, "selective"), (21, "full"), (5, "full")]
)
def test_auto_takes_the_least_recomputation_that_fits(room, choice):
    chosen, reason = memory_plan.choose("auto", TOTALS, room, 1.1)
    assert chosen == choice
    assert ("nothing fits" in reason) == (room == 5)


def test_what_is_set_is_not_changed():
    assert memory_plan.choose("none", {"none": 30}, 5, 1.1)[0] == "none"


def test_one_place_says_what_is_recomputed(monkeypatch):
    sharded = LaunchFacts(0, 2, "zero3", ("here",), "cpu")
    with pytest.raises(ConfigurationError, match="selective does not go with ZeRO-3"):
        memory_plan.requested_choice(settings(activation_checkpointing="selective"), sharded)
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    sharded = LaunchFacts(0, 2, "fsdp2", ("here",), "cpu")
    with pytest.raises(ConfigurationError, match="leave it to the recipe"):
        memory_plan.requested_choice(settings(), sharded)


def test_a_model_without_checkpointing_is_not_checkpointed():
    jetmoe, llama = tiny_config("jetmoe"), tiny_config("llama")
    assert list(memory_plan.choices("auto", jetmoe, LAUNCH)) == ["none"]
    assert list(memory_plan.choices("auto", llama, LAUNCH)) == list(CHOICES)
    with pytest.raises(ConfigurationError, match="full: transformers has none for jetmoe"):
        memory_plan.choices("full", jetmoe, LAUNCH)


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        ({}, "none"),
        ({"activation_checkpointing": "false"}, "none"),
        ({"activation_checkpointing": "true"}, "full"),
        ({"gradient_checkpointing": "true"}, "full"),
        ({"activation_checkpointing": "selective"}, "selective"),
        ({"activation_checkpointing": "auto"}, "auto"),
    ],
)
def test_words_and_booleans(given, choice):
    assert memory_plan.requested_choice(settings(**given), LAUNCH) == choice
