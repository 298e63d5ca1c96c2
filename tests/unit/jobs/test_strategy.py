"""What the dry run is told of a strategy is what accelerate's launcher sets for it."""

from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from utils.config.errors import ConfigurationError
from utils.launch.accelerate_command import choose_strategy, strategy_of
from utils.launch.processes import requested_strategy

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


def launched(path: Path) -> dict[str, str]:
    """The variables that `accelerate launch` gives the processes of this config."""
    from accelerate.commands.launch import _validate_launch_command

    args = launch_command_parser().parse_args(
        ["--config_file", str(path), "--num_processes", "2", "--main_process_port", "0", "x.py"]
    )
    args, _, _ = _validate_launch_command(args)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ""  # as launch_command does
        return prepare_deepspeed_cmd_env(args)[1]
    return prepare_multi_gpu_env(args)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_variables_are_accelerates_own(path):
    if path.stem == "single_gpu":
        assert choose_strategy({"ACCELERATE_CONFIG": str(path)}, 1, 1, 1).name == "single"
        return
    strategy = strategy_of(str(path), yaml.safe_load(path.read_text()), 2)
    real = launched(path)
    for name, value in strategy.variables.items():
        assert real[name] == value, name
    # The other way round: what decides the strategy is among them.
    assert requested_strategy(real, 2) == requested_strategy(strategy.variables, 2)
    assert requested_strategy(strategy.variables, 2) == strategy.name


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}, "fsdp2"),
        ({"distributed_type": "FSDP"}, "fsdp1"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}, "zero3"),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "d"}},
            "zero_file",
        ),
        ({"distributed_type": "MULTI_GPU"}, "ddp"),
        ({"distributed_type": False}, "single"),
    ],
)
def test_names(config, name):
    strategy = strategy_of("a.yaml", config, 1 if name == "single" else 2)
    assert strategy.name == name
    if name != "single":
        assert requested_strategy(strategy.variables, 2) == name


def test_mixed_precision_is_told():
    strategy = strategy_of("a", {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16"}, 2)
    assert strategy.variables["ACCELERATE_MIXED_PRECISION"] == "bf16"


def test_defaults_follow_the_number_of_processes(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert choose_strategy({}, 1, 1, 1).file == "accelerate_configs/single_gpu.yaml"
    assert choose_strategy({}, 2, 4, 4).file == "accelerate_configs/multi_gpu.yaml"
    assert choose_strategy({}, 2, 1, None).file == "accelerate_configs/cpu.yaml"


def test_configs_that_cannot_be_used(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    single = {"ACCELERATE_CONFIG": "accelerate_configs/single_gpu.yaml"}
    with pytest.raises(ConfigurationError, match="starts one process, but the job has 8"):
        choose_strategy(single, 2, 4, 4)
    with pytest.raises(ConfigurationError, match=r"absent\.yaml: No such file"):
        choose_strategy({"ACCELERATE_CONFIG": "absent.yaml"}, 1, 2, 2)
    with pytest.raises(ConfigurationError, match="TPU is none that Stoker trains with"):
        strategy_of("a.yaml", {"distributed_type": "TPU"}, 2)


def test_cpu_yaml_means_the_cpu_in_the_dry_run_too():
    path = ROOT / "accelerate_configs/cpu.yaml"
    strategy = choose_strategy({"ACCELERATE_CONFIG": str(path)}, 1, 2, None)
    assert strategy.variables["ACCELERATE_USE_CPU"] == "true"
    gpus = choose_strategy({"ACCELERATE_CONFIG": str(path.with_name("fsdp2.yaml"))}, 1, 2, 2)
    assert "ACCELERATE_USE_CPU" not in gpus.variables
