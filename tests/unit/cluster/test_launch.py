from types import SimpleNamespace

import pytest

from utils.cluster.launch import (
    LaunchFacts,
    actual_strategy,
    asks_for_cpu,
    check_launch,
    check_strategy,
    launch_problem,
    requested_strategy,
    strategy_problem,
)
from utils.config.errors import ConfigurationError, ExitCode, UnfitClusterError

DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}
ON_CPU = {"ACCELERATE_USE_CPU": "True", "ACCELERATE_MIXED_PRECISION": "no"}


@pytest.mark.parametrize(
    ("environment", "processes", "visible_gpus", "message"),
    [
        ({"WORLD_SIZE": "2"}, 1, 0, r"n1: .*started 2 processes, .* connected 1.*--use_cpu"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, 1, 1, r"srun started 4 copies.*--ntasks-per-node=1"),
        (ON_CPU | {"MASTER_ADDR": "127.0.0.1"}, 1, 0, r"starts only one.*cpu\.yaml"),
        ({}, 1, 4, r"4 GPUs are visible.*CUDA_VISIBLE_DEVICES=0.*--num_processes 4"),
    ],
)
def test_a_launch_that_went_wrong_is_explained(
    environment, processes, visible_gpus, message, monkeypatch
):
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    problem = launch_problem(environment, processes, visible_gpus)
    assert problem.exit_code == ExitCode.REFUSED
    with pytest.raises(ConfigurationError, match=message):
        raise problem


def test_devices_that_were_allocated_and_are_not_seen_are_the_clusters_fault(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    problem = launch_problem({"WORLD_SIZE": "2", "SLURM_STEP_GPUS": "0,1"}, 1, 0)
    assert problem.exit_code == ExitCode.UNFIT
    with pytest.raises(UnfitClusterError, match=r"SLURM_STEP_GPUS=0,1\), but torch sees none.* n2"):
        raise problem


@pytest.mark.parametrize(
    ("environment", "processes", "visible_gpus"),
    [
        ({}, 1, 0),
        ({}, 1, 1),
        (ON_CPU, 1, 0),
        ({"MASTER_ADDR": "n1"}, 1, 1),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}, 1, 1),
        ({"WORLD_SIZE": "8", "SLURM_STEP_NUM_TASKS": "2"}, 8, 4),
        ({"WORLD_SIZE": "1"}, 1, 4),
    ],
)
def test_a_sound_launch_has_no_problem(environment, processes, visible_gpus):
    assert launch_problem(environment, processes, visible_gpus) is None


@pytest.mark.parametrize(
    ("environment", "processes", "strategy"),
    [
        ({}, 1, "single"),
        ({}, 4, "ddp"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, 4, "fsdp2"),
        ({"ACCELERATE_USE_FSDP": "true"}, 1, "fsdp1"),
        (DEEPSPEED | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, 4, "zero3"),
        (DEEPSPEED, 4, "zero2"),
        (DEEPSPEED | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}, 4, "zero_file"),
        ({"ACCELERATE_USE_FSDP": "false", "ACCELERATE_USE_DEEPSPEED": "false"}, 2, "ddp"),
    ],
)
def test_the_requested_strategy_is_read_from_what_the_launcher_sets(
    environment, processes, strategy
):
    assert requested_strategy(environment, processes) == strategy


@pytest.mark.parametrize(
    ("requested", "actual", "device", "message"),
    [
        ("fsdp2", "ddp", "cpu", "asked for fsdp2, but accelerate runs ddp.*need GPUs"),
        ("zero3", "ddp", "cpu", "asked for zero3, but accelerate runs ddp"),
        ("fsdp2", "fsdp1", "cuda", "asked for fsdp2, but accelerate runs fsdp1.*--fsdp"),
        ("zero2", "zero3", "cuda", "asked for zero2, but accelerate runs zero3"),
        ("ddp", "fsdp2", "cuda", "asked for ddp, but accelerate runs fsdp2"),
        ("single", "zero2", "cuda", "asked for single, but accelerate runs zero2"),
    ],
)
def test_another_strategy_than_asked_for_is_explained(requested, actual, device, message):
    with pytest.raises(ConfigurationError, match=message):
        raise ConfigurationError(strategy_problem(requested, actual, device))


@pytest.mark.parametrize(
    ("requested", "actual"),
    [("single", "single"), ("ddp", "ddp"), ("single", "ddp"), ("fsdp2", "fsdp2"),
     ("zero_file", "zero3")],
)  # fmt: skip
def test_the_strategy_asked_for_is_no_problem(requested, actual):
    assert strategy_problem(requested, actual, "cuda") is None


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [("NO", "single"), ("MULTI_GPU", "ddp"), ("MULTI_CPU", "ddp"), ("FSDP", "fsdp2"),
     ("DEEPSPEED", "zero3")],
)  # fmt: skip
def test_the_actual_strategy_is_read_from_accelerates_state(kind, strategy):
    from accelerate.utils import DistributedType

    state = SimpleNamespace(
        distributed_type=DistributedType(kind),
        fsdp_plugin=SimpleNamespace(fsdp_version=2),
        deepspeed_plugin=SimpleNamespace(zero_stage=3),
    )
    assert actual_strategy(state) == strategy


def test_one_plain_process_passes_both_checks():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    Accelerator(cpu=True)
    facts = check_launch()
    assert (facts.rank, facts.world_size) == (0, 1)
    assert (facts.strategy, facts.device, len(facts.hosts)) == ("single", "cpu", 1)
    check_strategy(facts)


def test_a_refused_launch_raises(monkeypatch):
    from accelerate import PartialState
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="started 2 processes"):
        check_launch()


def test_a_refused_strategy_raises():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    Accelerator(cpu=True)
    facts = LaunchFacts(0, 1, strategy="fsdp2", hosts=("n1",), device="cpu")
    with pytest.raises(ConfigurationError, match="asked for fsdp2"):
        check_strategy(facts)


@pytest.mark.parametrize("word", ["1", "True", "yes", "on", "Y", "t", "0", "false", "no", "off"])
def test_the_cpu_is_asked_for_in_accelerates_words(word):
    from accelerate.utils.environment import str_to_bool

    assert asks_for_cpu({"ACCELERATE_USE_CPU": word}) == bool(str_to_bool(word))


def test_nothing_said_is_not_the_cpu():
    assert not asks_for_cpu({})
