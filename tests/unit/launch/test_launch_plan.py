"""The launcher's plan: processes, accelerate's config, the arguments of `accelerate launch`."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from launching import ROOT

from utils.config.declarations import SettingValue
from utils.config.errors import ConfigurationError
from utils.config.launch_settings import strategy_variables
from utils.config.strategy import AUTO, NAMES, choose_config, read_config
from utils.launch.node import (
    check_config,
    given_strategy,
    ignored_settings,
    launch_arguments,
    plan_launch,
)
from utils.launch.processes import requested_strategy
from utils.launch.slurm import Allocation

CONFIGS = sorted(ROOT.glob("accelerate_configs/*.yaml"))
ONE = Allocation(("n1",), 0, 1, 1, "127.0.0.1", 20000)
FOUR = Allocation(("n1",), 0, 4, 4, "127.0.0.1", 20000)
SECOND = Allocation(("n1", "n2"), 1, 4, 4, "n1", 20000)
CPUS = Allocation(("n1",), 0, 2, None, "127.0.0.1", 20000)


def chosen(strategy: str, allocation: Allocation, **environment: str):
    given, on_cpu = SettingValue(strategy, "a.yaml:3"), allocation.gpus is None
    return choose_config(environment, given, allocation.world_size, on_cpu=on_cpu)


def test_a_launch_follows_from_the_arguments_and_the_environment():
    allocation, config = plan_launch(["--strategy", "fsdp2", "--seed", "2"], {}, 4)
    assert (allocation.processes, config.path.name) == (4, "fsdp2.yaml")
    on_cpus = {"ACCELERATE_USE_CPU": "true", "STOKER_PROCESSES_PER_NODE": "2"}
    allocation, config = plan_launch([], on_cpus, 4)
    assert (allocation.processes, allocation.gpus, config.path.name) == (2, None, "cpu.yaml")
    single = {"ACCELERATE_CONFIG": str(ROOT / "accelerate_configs/single_gpu.yaml")}
    with pytest.raises(ConfigurationError, match="starts one process, but the job has 4"):
        plan_launch([], single, 4)


@pytest.mark.parametrize(
    ("allocation", "name"),
    [(ONE, "single_gpu"), (FOUR, "multi_gpu"), (SECOND, "multi_gpu"), (CPUS, "cpu")],
)
def test_the_default_strategy_follows_from_the_processes(allocation, name):
    config = chosen(AUTO, allocation)
    check_config(config, allocation)
    assert config.path == Path(f"accelerate_configs/{name}.yaml")
    assert config.chosen_by == "the number of processes"


def test_the_settings_name_a_strategy_and_the_environment_wins_over_it():
    config = chosen("fsdp2", FOUR)
    assert config.path == Path("accelerate_configs/fsdp2.yaml")
    assert config.chosen_by == "strategy fsdp2 (a.yaml:3)"
    zero2 = str(ROOT / "accelerate_configs/zero2.yaml")
    config = chosen("fsdp2", FOUR, ACCELERATE_CONFIG=zero2)
    assert (str(config.path), config.kind) == (zero2, "DEEPSPEED")
    assert config.chosen_by == (
        f"ACCELERATE_CONFIG={zero2}, which overrules strategy fsdp2 (a.yaml:3)"
    )
    assert chosen(zero2, FOUR).kind == "DEEPSPEED"
    for wrong, hint in (("fsdp", "did you mean fsdp2"), ("no/file.yaml", "take one of auto, si")):
        with pytest.raises(ConfigurationError, match=f"{wrong} .a.yaml:3.: no such .*{hint}"):
            chosen(wrong, FOUR)


def test_one_process_has_nothing_to_share_but_may_offload(tmp_path):
    for name in ("multi_gpu", "fsdp2", "hsdp", "zero1", "zero2", "zero3"):
        config = chosen(name, ONE)
        assert config.path == Path("accelerate_configs/single_gpu.yaml")
        assert config.chosen_by.endswith("which has no effect on one process")
    text = (ROOT / "accelerate_configs/zero3.yaml").read_text()
    own = tmp_path / "offload.yaml"
    own.write_text(text.replace("offload_optimizer_device: none", "offload_optimizer_device: cpu"))
    assert chosen(str(own), ONE).path == own
    own.write_text(text)
    assert chosen(str(own), ONE).path.name == "single_gpu.yaml", "it shards, and does not offload"
    own.write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: d}\n")
    assert chosen(str(own), ONE).path == own


def test_the_launcher_reads_the_strategy_of_the_scripts_arguments(tmp_path):
    (tmp_path / "base.yaml").write_text("strategy: zero1\nseed: 1\n")
    recipe, later = tmp_path / "a.yaml", tmp_path / "b.yaml"
    recipe.write_text("extends: base.yaml\n")
    later.write_text("seed: 3\nstrategy: zero2\n")
    found = given_strategy(["--config", str(recipe), "--seed", "2"])
    assert (found.value, found.source) == ("zero1", f"{tmp_path}/base.yaml:1")
    assert given_strategy(["--config", str(recipe), str(later)]).source == f"{later}:2"
    for flag in (["--strategy", "fsdp2"], ["--strategy=fsdp2"]):
        assert given_strategy([*flag, "--config", str(recipe)]).value == "fsdp2"
    recipe.write_text("strategy: [no name]\n")  # the script reports the error
    for words in ([], ["--config", str(recipe)], ["--config", "no/file"], ["--config"], ["x"]):
        assert given_strategy(words).value == AUTO


def test_the_launchers_start_does_not_wait_for_torch():
    code = "import sys, utils.config.strategy; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_a_config_that_cannot_start_the_processes_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    for text, problem in [
        (None, r"No such file.*accelerate_configs/"),
        ("a: [", r"no accelerate config for"),
        ("- 1", r"no accelerate config for"),
        ("distributed_type: TPU", r"distributed_type TPU is not supported"),
        ("distributed_type: NO", r"NO starts one process, but .* has 8 \(2 node.* of 4\): use"),
    ]:
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigurationError, match=f"ACCELERATE_CONFIG={path}.*{problem}"):
            check_config(chosen(AUTO, SECOND, ACCELERATE_CONFIG=str(path)), SECOND)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigurationError, match="pip install deepspeed"):
        check_config(chosen("zero2", FOUR), FOUR)


def parsed(name: str, allocation: Allocation, *command: str):
    path = ROOT / f"accelerate_configs/{name}.yaml"
    return launch_arguments(read_config(path, "a test"), allocation, command)


def test_several_nodes_meet_at_the_first_and_leave_stop_signals_to_the_launcher(monkeypatch):
    """SIGHUP, the signal of a closed terminal, is not handled under nohup."""
    for hangup, handled in ((signal.SIG_DFL, "SIGQUIT,SIGHUP"), (signal.SIG_IGN, "SIGQUIT")):
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
    assert not parsed("cpu", CPUS, "x.py").cpu  # --cpu would start only one process


def launched(path: Path) -> dict[str, str]:
    """Return the variables that `accelerate launch` sets for this config."""
    from accelerate.commands.launch import _validate_launch_command

    args = launch_command_parser().parse_args(
        ["--config_file", str(path), "--num_processes", "2", "--main_process_port", "0", "x.py"]
    )
    args, _, _ = _validate_launch_command(args)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ""  # like launch_command
        return prepare_deepspeed_cmd_env(args)[1]
    return prepare_multi_gpu_env(args)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_starts_and_its_variables_are_accelerates_own(path):
    for allocation in (ONE, FOUR, SECOND):
        if path.stem != "single_gpu" or allocation is ONE:
            config = read_config(path, "a test")
            check_config(config, allocation)
            assert launch_arguments(config, allocation, ["x.py"])
    assert path.stem in NAMES
    variables = strategy_variables(yaml.safe_load(path.read_text()))
    if path.stem == "single_gpu":
        assert requested_strategy(variables, 1) == "single"
        return
    real = launched(path)
    for name, value in variables.items():
        assert real[name] == value, name
    # `variables` contain all of the real ones that decide the strategy.
    assert requested_strategy(real, 2) == requested_strategy(variables, 2)


def test_settings_of_a_file_that_do_nothing_are_named(tmp_path):
    (path := tmp_path / "a.yaml").write_text(yaml.safe_dump({
        "distributed_type": "FSDP", "downcast_bf16": "yes", "fp8_config": {"backend": "TE"},
        "fsdp_config": {"version": 2, "fsdp_backward_prefetch_policy": "BACKWARD_PRE"},
    }))  # fmt: skip
    assert ignored_settings(read_config(path, "a test")) == [
        "downcast_bf16", "fp8_config", "fsdp_config: fsdp_backward_prefetch_policy",
    ]  # fmt: skip
    for shipped in CONFIGS:
        assert not ignored_settings(read_config(shipped, "a test"))


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
