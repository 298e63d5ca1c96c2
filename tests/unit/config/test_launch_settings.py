"""Settings of accelerate that would make training wrong: in a file, as flags, as variables."""

import json
import os
import re

import pytest
import tiny
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from command_lines import BASE

from utils.config.errors import ConfigurationError
from utils.config.launch_settings import (
    group_sizes,
    launch_environment,
    launch_faults,
    strategy_variables,
)
from utils.config.settings import parse_pretraining
from utils.config.strategy import read_config

pytestmark = pytest.mark.usefixtures("started_alone")
FSDP2 = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
DDP = {"distributed_type": "MULTI_GPU"}
HSDP = {"dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2}

WRONG = {
    "tp": (FSDP2 | {"parallelism_config": {"parallelism_config_tp_size": 2}}, "tensor parallel"),
    "cp": (FSDP2 | {"parallelism_config": {"parallelism_config_cp_size": 2}}, "context parall"),
    "sp": ({"distributed_type": "DEEPSPEED", "parallelism_config": {"sp_size": 8}}, "sequence p"),
    "hsdp of ddp": (DDP | {"parallelism_config": HSDP}, "dp_shard_size 2 needs FSDP2"),
    "hsdp of fsdp1": ({"distributed_type": "FSDP", "parallelism_config": HSDP}, "needs FSDP2"),
    "fp8": (DDP | {"mixed_precision": "fp8"}, "write \"no\" there, and fp8: true"),
    "dynamo, older": (DDP | {"dynamo_backend": "inductor"}, "dynamo_backend INDUCTOR: it comp"),
    "ignored": (FSDP2 | {"fsdp_config": {"version": 2, "ignored_modules": "lm_head"}}, "summed"),
    "recomputation": (FSDP2 | {"fsdp_config": {"version": 2, "activation_checkpointing": True}},
                      "leave it to the recipe: activation_checkpointing: full"),
}  # fmt: skip
RIGHT = (
    FSDP2 | {"parallelism_config": {**HSDP, "tp_size": 1, "cp_size": "1", "sp_size": None}},
    DDP | {"dynamo_config": {"dynamo_backend": "NO"}, "mixed_precision": "bf16"},
    DDP | {"parallelism_config": {}, "fsdp_config": None},
)


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_would_train_wrongly_is_refused_before_the_start(name, tmp_path, monkeypatch):
    content, said = WRONG[name]
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigurationError, match=said) as caught:
        read_config(path, "a test")
    assert all(f"a test ({path}): " in problem for problem in caught.value.problems)
    dry = ["--dry_run", "--assume", "4x80GB"]
    argv = [*tiny.flags(**BASE | {"use_cpu": None}), *dry]
    with pytest.raises(ConfigurationError, match=said):
        parse_pretraining([*argv, "--strategy", str(path)], "")
    monkeypatch.setenv("ACCELERATE_CONFIG", str(path))
    with pytest.raises(ConfigurationError, match=said):
        parse_pretraining(argv, "")


@pytest.mark.parametrize("content", RIGHT)
def test_a_file_that_trains_right_is_read(content, tmp_path):
    path = tmp_path / "right.yaml"
    path.write_text(yaml.safe_dump(content))
    assert read_config(path, "a test").content == content


def launched(*options: str) -> dict[str, str]:
    """Return the environment that `accelerate launch` sets for these options."""
    args = launch_command_parser().parse_args([*options, "--main_process_port", "0", "x.py"])
    return prepare_multi_gpu_env(_validate_launch_command(args)[0])


FSDP_FLAGS = "--use_fsdp --fsdp_version 2 --num_processes 2 --num_machines 1 --mixed_precision no"


def test_what_a_launch_sets_is_refused_by_its_processes(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    wrong = "--use_parallelism_config --parallelism_config_tp_size 2 --dynamo_backend inductor"
    variables = launched(*FSDP_FLAGS.split(), *wrong.split())
    assert not list(launch_faults(launched(*FSDP_FLAGS.split())))
    for name, value in variables.items():
        if os.environ.get(name) != value and name.startswith(("ACCELERATE", "PARALL", "FSDP")):
            monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError) as caught:
        parse_pretraining(tiny.flags(**BASE | {"dry_run": "true"}), "")
    begin = "the accelerate config or command: .*"
    for problem, said in zip(caught.value.problems, ("tp_size 2: tensor", "INDUCTOR"), strict=True):
        assert re.match(begin + said, problem)


def test_the_variables_of_a_file_are_accelerates_own(tmp_path, monkeypatch):
    monkeypatch.setattr("utils.config.strategy.launch_faults", lambda _: ())
    (path := tmp_path / "a.yaml").write_text(yaml.safe_dump({
        "distributed_type": "FSDP", "num_processes": 8, "dynamo_config": {"backend": "inductor"},
        "fsdp_config": {"version": 2, "fsdp_ignored_modules": "x"},
        "parallelism_config": {f"parallelism_config_{each}_size": 2 for each in
                               ("dp_replicate", "dp_shard", "tp")},
    }))  # fmt: skip
    real = launched("--config_file", str(path))
    ours = strategy_variables(read_config(path, "a test").content)
    assert ours == {name: real[name] for name in ours}
    assert ours.keys() >= {"FSDP_VERSION", "PARALLELISM_CONFIG_TP_SIZE", "FSDP_IGNORED_MODULES"}


def test_sizes_that_are_not_the_processes_of_the_launch_are_refused(monkeypatch):
    for sizes, right in (((1, 4), True), ((2, 2), True), ((4, 1), False), ((2, 4), False)):
        for name, value in {
            "WORLD_SIZE": "4", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2",
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(sizes[0]),
            "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(sizes[1]),
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        argv = tiny.flags(**BASE | {"dry_run": "true", "use_cpu": None})
        if right:
            assert parse_pretraining(argv, "")
        else:
            with pytest.raises(ConfigurationError, match="are not the 4 processes of this launch"):
                parse_pretraining(argv, "")


HYBRID = {
    "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "4", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
}  # fmt: skip


@pytest.fixture
def hybrid(monkeypatch):
    """Return a function that reads settings in a launch by hsdp.yaml, with changed variables."""

    def read(changes: dict[str, str | None] | None = None, **settings):
        for name, value in (HYBRID | (changes or {})).items():
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        given = {"dry_run": "true", "use_cpu": None, "global_batch_size": 48} | settings
        return parse_pretraining(tiny.flags(**BASE | given), "").values

    return read


def test_sizes_that_the_config_leaves_open_follow_from_the_setting_or_the_node(hybrid):
    for shards, expected in ((None, (4, 4)), (2, (8, 2)), (8, (2, 8)), (16, (1, 16))):
        sizes = group_sizes(hybrid(dp_shard=shards).environment)
        assert tuple(map(int, sizes.values())) == expected
    assert os.environ.keys().isdisjoint(sizes), "the process stays as it is"
    given = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "8", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}
    assert group_sizes(hybrid(given).environment) == given, "sizes of a config stay"


@pytest.mark.parametrize(
    ("changes", "shards", "said"),
    [
        ({}, 3, "HSDP: dp_replicate_size 5 x dp_shard_size 3 are not the 16 processes of this "
         "launch.* set dp_shard to 2 or 4 or 8 or 16, and"),
        ({}, 32, "0 x dp_shard_size 32 are not the 16 processes"),
        ({}, 1, "dp_shard 1 .*: it must be at least 2"),
        ({"LOCAL_WORLD_SIZE": "1"}, None, "at least 2 to shard over: set dp_shard to 2 or 4 or 8"),
        ({"WORLD_SIZE": "1"}, None, "HSDP needs at least 2 processes: .*single_gpu.yaml"),
        ({"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "4", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4"}, 8,
         "dp_shard 8 .* contradicts dp_shard_size 4 of the accelerate config"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": None}, 4, "dp_shard 4 .* has no effect, because this"
         " launch does not use HSDP: set strategy: hsdp"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": None, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4"}, None,
         "dp_shard_size 4 has no effect without ACCELERATE_USE_PARALLELISM_CONFIG=true"),
    ],
)  # fmt: skip
def test_groups_that_cannot_be_are_refused_before_the_mesh_is_made(hybrid, changes, shards, said):
    with pytest.raises(ConfigurationError, match=said):
        hybrid(changes, dp_shard=shards)


def test_a_strategy_of_a_stronger_source_overrules_the_shards_of_a_recipe(hybrid, tmp_path):
    (recipe := tmp_path / "a.yaml").write_text("strategy: hsdp\ndp_shard: 4\n")
    ddp = {name: None for name in HYBRID if "SIZE" not in name}
    values = hybrid(ddp, config=recipe, strategy="multi_gpu")
    assert values["dp_shard"] is None
    line = next(note for note in values.notes if note.startswith("dp_shard 4"))
    assert "a.yaml:2) has no effect: strategy multi_gpu" in line


def test_one_process_says_that_it_has_no_shards(hybrid):
    values = hybrid(dict.fromkeys(HYBRID), dp_shard=4)
    assert "dp_shard 4 (--dp_shard) has no effect on one process" in values.notes


def test_the_recipe_decides_over_numbers_for_deepspeed(monkeypatch):
    """`accelerate config` writes these numbers. Trainer would refuse them after loading weights."""
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "auto")
    settings = parse_pretraining(tiny.flags(**BASE | {"dry_run": "true", "use_cpu": None}), "")
    assert os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "4", "the process stays as it is"
    assert settings.values.environment["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "auto"
    with launch_environment(settings.values):
        assert os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "auto"
        monkeypatch.setenv("SET_BY_A_LIBRARY", "1")
    assert os.environ["SET_BY_A_LIBRARY"] == "1"
    assert [note for note in settings.values.notes if "accelerate config" in note] == [
        "gradient_accumulation_steps 4 of the accelerate config has no effect: global_batch_size "
        "decides"
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"gradient_clipping": "auto", "zero_optimization": {"stage": 2}}, []),
        ({"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0, "train_batch_size": 8,
          "bf16": {"enabled": False}}, []),
        ({}, ["no gradient_clipping, so max_grad_norm would do nothing"]),
        ({"gradient_clipping": 0.3}, ["gradient_clipping 0.3, but the recipe says 1.0"]),
        ({"gradient_clipping": "auto", "train_batch_size": 64, "fp16": {"enabled": True},
          "gradient_accumulation_steps": 2},
         ["train_batch_size 64, but the recipe says 8", "accumulation_steps 2, .* says 1",
          "fp16.enabled True, but the recipe says False"]),
        ({"gradient_clipping": "auto", "optimizer": {"type": "AdamW"}, "scheduler": {}},
         ["optimizer would replace that of the recipe", "scheduler would replace"]),
        ({"gradient_clipping": "auto", "tensor_parallel": {"autotp_size": 2},
          "sequence_parallel_size": 2}, ["sequence_parallel_size 2", "autotp_size 2"]),
        ("no JSON", ["cannot be read"]),
    ],
)  # fmt: skip
def test_a_deepspeed_file_leaves_to_the_recipe_what_the_recipe_says(
    content, said, tmp_path, monkeypatch
):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(content) if isinstance(content, dict) else content)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    argv = tiny.flags(**BASE | {"dry_run": "true", "use_cpu": None})
    if not said:
        settings = parse_pretraining(argv, "")
        assert settings.values["bf16"] is ("bf16" not in content), "the file says so"
        return
    with pytest.raises(ConfigurationError) as caught:
        parse_pretraining(argv, "")
    assert len(caught.value.problems) == len(said), caught.value.problems
    for problem, words in zip(caught.value.problems, said, strict=True):
        assert re.search(words, problem), problem
