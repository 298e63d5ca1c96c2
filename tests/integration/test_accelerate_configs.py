"""The accelerate configs contain only keys that accelerate reads, and say when to use them."""

import pytest
import yaml
from launching import CONFIGS
from test_strategies import WAYS

NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def test_every_config_is_trained_by_a_test():
    assert sorted([*(name for name, *_ in WAYS), "single_gpu"]) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_config_has_only_keys_that_accelerate_reads(name):
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    text = (CONFIGS / f"{name}.yaml").read_text()
    assert text.startswith("# "), "when to use it"
    assert f"accelerate launch --config_file accelerate_configs/{name}.yaml" in text
    content = yaml.safe_load(text)
    assert content["mixed_precision"] == "no", "precision is left to the recipe"
    # Unknown keys at the top are refused by accelerate itself ...
    assert ClusterConfig.from_yaml_file(CONFIGS / f"{name}.yaml").num_machines == 1
    # ... unknown keys of a nested block silently become attributes of the launcher's arguments.
    arguments = {action.dest for action in launch_command_parser()._actions}
    for block in ("fsdp_config", "deepspeed_config"):
        prefix = "fsdp_" if block == "fsdp_config" else ""
        assert all({key, prefix + key} & arguments for key in content.get(block, {}))
    # These two keys only work on the command line; in a file they would do nothing.
    assert not {"rdzv_backend", "same_network"} & set(content)
