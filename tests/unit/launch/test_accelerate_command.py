import signal
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from launching import ROOT

from utils.config.errors import ConfigurationError
from utils.launch.accelerate_command import (
    choose_config,
    launch_arguments,
    read_config,
    strategy_variables,
)
from utils.launch.processes import requested_strategy
from utils.launch.slurm import Allocation

CONFIGS = sorted(ROOT.glob("accelerate_configs/*.yaml"))
ONE = Allocation(("n1",), 0, 1, 1, "127.0.0.1", 20000)
FOUR = Allocation(("n1",), 0, 4, 4, "127.0.0.1", 20000)
SECOND = Allocation(("n1", "n2"), 1, 4, 4, "n1", 20000)
CPUS = Allocation(("n1",), 0, 2, None, "127.0.0.1", 20000)


def test_the_default_strategy_follows_from_the_processes():
    names = {ONE: "single_gpu", FOUR: "multi_gpu", SECOND: "multi_gpu", CPUS: "cpu"}
    for allocation, name in names.items():
        path = choose_config({}, allocation)
        assert path == Path(f"accelerate_configs/{name}.yaml")
        assert read_config(ROOT / path, allocation)
    assert choose_config({"ACCELERATE_CONFIG": "a b.yaml"}, ONE) == Path("a b.yaml")


def test_a_config_that_cannot_start_the_processes_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    for text, problem in [
        (None, r"No such file.*accelerate_configs/"),
        ("a: [", r"is no accelerate config for"),
        ("- 1", r"is no accelerate config for"),
        ("distributed_type: TPU", r"distributed_type TPU is not supported"),
        (
            "distributed_type: NO",
            r"NO starts one process, but .* has 8 \(2 node.* of 4\): use",
        ),
    ]:
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigurationError, match=f"ACCELERATE_CONFIG={path}.*{problem}"):
            read_config(path, SECOND)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigurationError, match="pip install deepspeed"):
        read_config(ROOT / "accelerate_configs/zero2.yaml", FOUR)


def parsed(name: str, allocation: Allocation, *command: str):
    path = ROOT / f"accelerate_configs/{name}.yaml"
    return launch_arguments(path, read_config(path, allocation), allocation, command)


def test_several_nodes_meet_at_the_first_and_leave_stop_signals_to_the_launcher(monkeypatch):
    """Under nohup the end of the terminal ends nothing."""
    for hangup, handled in ((signal.SIG_DFL, "SIGINT,SIGHUP"), (signal.SIG_IGN, "SIGINT")):
        monkeypatch.setattr(signal, "getsignal", {signal.SIGHUP: hangup}.get)
        args = parsed("zero2", SECOND, "x.py")
        assert (args.signals_to_handle, args.shutdown_timeout) == (handled, 5)
    assert (args.num_processes, args.num_machines, args.machine_rank) == (8, 2, 1)
    assert (args.main_process_ip, args.main_process_port) == ("n1", 20000)
    assert (args.rdzv_backend, args.rdzv_conf) == ("c10d", "is_host=0,join_timeout=120")
    assert args.deepspeed_multinode_launcher == "standard"


def test_arguments_reach_the_script_as_they_are_and_a_cpu_stays_one():
    """${local_rank} and $$ mean something to torchrun, but nothing to a single process."""
    from torch.distributed.elastic.utils.api import macros

    words = ["--flag", "--", "-x", "", "two words", "$$", "${local_rank}", "$(id)", "--cpu", "\n"]
    args = parsed("multi_gpu", FOUR, "x.py", *words)
    assert macros.substitute(args.training_script_args, "0") == words
    args = parsed("single_gpu", replace(ONE, gpus=None), "x.py", *words)
    assert args.training_script_args == words
    assert args.cpu
    assert not parsed("cpu", CPUS, "x.py").cpu  # it would start one


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
def test_every_shipped_config_starts_and_its_variables_are_accelerates_own(path):
    for allocation in (ONE, FOUR, SECOND):
        if path.stem != "single_gpu" or allocation is ONE:
            config = read_config(path, allocation)
            assert launch_arguments(path, config, allocation, ["x.py"])
    variables = strategy_variables(yaml.safe_load(path.read_text()))
    if path.stem == "single_gpu":
        assert requested_strategy(variables, 1) == "single"
        return
    real = launched(path)
    for name, value in variables.items():
        assert real[name] == value, name
    # The other way round: what decides the strategy is among them.
    assert requested_strategy(real, 2) == requested_strategy(variables, 2)


def test_a_strategy_of_the_users_own_config_has_a_name():
    deepspeed = {"distributed_type": "DEEPSPEED"}
    for config, name in [
        ({"distributed_type": "FSDP"}, "fsdp1"),
        (deepspeed | {"deepspeed_config": {"zero_stage": 3}}, "zero3"),
        (deepspeed | {"deepspeed_config": {"deepspeed_config_file": "d"}}, "zero_file"),
    ]:
        assert requested_strategy(strategy_variables(config), 2) == name
    off = {"ACCELERATE_USE_FSDP": "false", "ACCELERATE_USE_DEEPSPEED": "false"}
    assert [requested_strategy(off, processes) for processes in (1, 2)] == ["single", "ddp"]
