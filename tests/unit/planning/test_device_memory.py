"""The GPU that a dry run plans for, and the refusal of what it cannot hold."""

from dataclasses import replace

import pytest
import torch

from utils.config.errors import ConfigurationError
from utils.launch.processes import LaunchFacts
from utils.model.loss_head import LossHeadChoice
from utils.planning.memory_estimate import GIB, MemoryEstimate
from utils.planning.memory_plan import GPUS, planned_device_bytes, refuse_too_large
from utils.planning.memory_trace import Workload

WORK = Workload(1, 64, torch.float32, None, "cuda", None, LossHeadChoice("fused", ""), ())
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
    found = planned_device_bytes(environment)
    assert found == (None if gib is None else int(gib * GIB))


@pytest.mark.parametrize("given", ["H1000X", "-3", "0", "nan", "80 GPUs"])
def test_anything_else_is_refused_with_the_names(given):
    with pytest.raises(ConfigurationError, match=f"{given}: expected the GiB of one GPU.*H100"):
        planned_device_bytes({"STOKER_GPU_MEMORY_GIB": given})


def test_names_are_as_they_are_looked_up():
    for name, gib in GPUS.items():
        assert planned_device_bytes({"STOKER_GPU_MEMORY_GIB": name.upper()}) == int(gib * GIB)


def estimate(launch, work, choice):
    """A model of 90 GiB, and 10 GiB a sequence, or one where it is checkpointed."""
    shared = 90 * GIB // (launch.world_size if launch.strategy == "fsdp2" else 1)
    activations = work.rows * (GIB if choice == "full" else 10 * GIB)
    return MemoryEstimate(1, 1, shared, 0, 0, activations, 0, 0, counted=True)


def refusal(launch, rows, choice, device_gib, margin=1.1):
    plan = (launch, replace(WORK, rows=rows), choice)
    with pytest.raises(ConfigurationError) as caught:
        refuse_too_large(estimate(*plan), int(device_gib * GIB), margin, plan, estimate)
    return str(caught.value)


def test_the_refusal_says_which_strategy_can_hold_it():
    said = refusal(ALONE, 4, "none", 80)
    assert "130.0 GiB predicted for a GPU of 80.0 GiB (strategy single, 1 rank, micro-b" in said
    assert "what fits: accelerate_configs/fsdp2.yaml on 2 GPUs (activation_checkpointing: f" in said
    assert ": 49.0 GiB" in said
    assert "activation_checkpointing: full: " not in said  # 94 GiB


def test_what_costs_least_comes_first():
    said = refusal(ALONE, 4, "none", 110)
    first, second, _ = said.partition("what fits: ")[2].split("; or ")
    assert first == "activation_checkpointing: full: 94.0 GiB"
    assert second == "per_device_train_batch_size: 1: 100.0 GiB"


def test_under_fsdp_it_takes_more_gpus():
    launch = replace(ALONE, strategy="fsdp2", world_size=2)
    assert "fsdp2.yaml on 8 GPUs" in refusal(launch, 1, "full", 15)


def test_where_nothing_can_hold_it_that_is_said():
    assert "nothing fits it, up to 1024 GPUs" in refusal(ALONE, 1, "full", 0.5)


def test_a_prediction_may_be_wrong_and_a_rule_of_thumb_refuses_nothing():
    plan = (ALONE, WORK, "full")
    near = MemoryEstimate(1, 1, 85 * GIB, 0, 0, 0, 0, 0, counted=True)
    refuse_too_large(near, 80 * GIB, 1.1, plan, estimate)
    refuse_too_large(replace(near, weights=900 * GIB, counted=False), 80 * GIB, 1.1, plan, estimate)
