"""Each accelerate config, as shipped, trains two CPU processes like one process alone."""

import json

import pytest
import yaml
from launching import CONFIGS, run_processes, run_two_processes

SCRIPT = "tests/integration/tiny_trainer.py"
MULTI_PROCESS = {
    "multi_gpu": "ddp", "cpu": "ddp", "fsdp2": "fsdp2",
    "zero1": "zero1", "zero2": "zero2", "zero3": "zero3",
}  # fmt: skip
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def test_every_config_is_known_here():
    assert sorted([*MULTI_PROCESS, "single_gpu"]) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_config_has_only_keys_that_accelerate_reads(name):
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    content = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    # Unknown keys at the top are refused by accelerate itself ...
    config = ClusterConfig.from_yaml_file(CONFIGS / f"{name}.yaml")
    assert config.num_machines == 1
    # ... those of a nested block become attributes of the launcher's arguments, silently.
    arguments = {action.dest for action in launch_command_parser()._actions}
    for block in ("fsdp_config", "deepspeed_config"):
        nested = content.get(block, {})
        prefix = "fsdp_" if block == "fsdp_config" else ""
        unknown = {key for key in nested if key not in arguments and prefix + key not in arguments}
        assert not unknown
    # These two count on the command line only, so here they would be settings that do nothing.
    assert not {"rdzv_backend", "same_network"} & set(content)


@pytest.mark.parametrize("name", NAMES)
def test_precision_is_left_to_the_recipe(name):
    assert yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["mixed_precision"] == "no"


@pytest.mark.parametrize("name", NAMES)
def test_a_config_says_when_to_use_it_and_how(name):
    text = (CONFIGS / f"{name}.yaml").read_text()
    assert text.startswith("# ")
    assert f"accelerate launch --config_file accelerate_configs/{name}.yaml" in text


def result(done):
    """What rank 0 of tiny_trainer.py printed."""
    assert done.returncode == 0, done.stdout[-4000:]
    (line,) = [text for text in done.stdout.splitlines() if text.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Losses of the same training in one process, with the simple launcher."""
    folder = tmp_path_factory.mktemp("one")
    args = ["--output_dir", str(folder), "--micro_batch_size", "4"]
    done = run_processes(
        "single_gpu", SCRIPT, args, processes=1, cpu_environment=False,
        env={"ACCELERATE_USE_CPU": "true"},
    )  # fmt: skip
    outcome = result(done)
    assert (outcome["strategy"], outcome["world_size"]) == ("single", 1)
    assert len(outcome["losses"]) == 4
    return outcome["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MULTI_PROCESS))
def test_two_processes_train_like_one(name, one_process, tmp_path):
    done = run_two_processes(
        name, SCRIPT, ["--output_dir", str(tmp_path), "--micro_batch_size", "2"]
    )
    outcome = result(done)
    assert (outcome["strategy"], outcome["world_size"]) == (MULTI_PROCESS[name], 2)
    assert outcome["losses"] == pytest.approx(one_process, abs=1e-5)


@pytest.mark.slow
def test_a_sharded_checkpoint_resumes_on_one_and_on_two_processes(tmp_path):
    """What fsdp2.yaml's choice of SHARDED_STATE_DICT promises."""
    args = ["--output_dir", str(tmp_path), "--steps", "4", "--micro_batch_size"]
    uninterrupted = result(run_two_processes("fsdp2", SCRIPT, [*args, "2", "--save_steps", "2"]))
    checkpoint = tmp_path / "checkpoint-2"
    assert (checkpoint / "pytorch_model_fsdp_0").is_dir()
    for processes in (1, 2):
        given = [*args, str(4 // processes), "--resume", str(checkpoint)]
        resumed = result(run_processes("fsdp2", SCRIPT, given, processes=processes))
        assert resumed["world_size"] == processes
        assert resumed["losses"] == pytest.approx(uninterrupted["losses"], abs=1e-5)
