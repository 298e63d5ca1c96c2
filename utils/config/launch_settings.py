"""Settings of accelerate that are refused or overruled.

`accelerate launch` passes its config file and flags to the processes as environment variables, so
one table of variables covers files, flags and the environment.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from utils.config.declarations import SettingValues, is_true
from utils.config.rules import reset_setting

# Prefixes of variables of MPI launchers and srun. If one is set, accelerate assumes a launch of
# several processes (accelerate/utils/environment.py).
MPI_VARIABLES = ("PMI_", "MPI_LOCAL", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_")
PRECISION_VARIABLE = "ACCELERATE_MIXED_PRECISION"
# torchrun's variables for a process, by which accelerate connects to the other processes.
LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
# Blocks of an accelerate config, and the optional prefix of the keys in a block.
PREFIXES = {"parallelism_config": "parallelism_config_", "dynamo_config": "dynamo_",
            "fsdp_config": "fsdp_", "deepspeed_config": ""}  # fmt: skip
BY_RECIPE = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "global_batch_size decides",
    "ACCELERATE_GRADIENT_CLIPPING": "max_grad_norm decides",
}
# HSDP's group sizes: the number of copies of the states, and the ranks that share one copy.
REPLICAS, SHARDS = "PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "PARALLELISM_CONFIG_DP_SHARD_SIZE"
_HSDP_SIZES = (REPLICAS, SHARDS)
_USE_PARALLEL = "ACCELERATE_USE_PARALLELISM_CONFIG"
# {setting on accumulation or exchange of gradients: libraries that ignore the setting}.
IGNORED_BY = {"ddp_comm_hook": ("FSDP", "DEEPSPEED"), "batch_warmup": ("DEEPSPEED",)}
_USE_DDP = "use strategy: multi_gpu, or leave it out"
_USE_FSDP2 = "remove it: fsdp2 splits a model over all GPUs; toolkits with it: docs/parallelism.md"


def block(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return {key: value} of a block such as fsdp_config in an accelerate config, without nulls.

    All keys get the prefix of the block, such as fsdp_ (see PREFIXES).
    """
    prefix = PREFIXES[name]
    keys = (content.get(name) or {}).items()
    return {prefix + key.removeprefix(prefix): value for key, value in keys if value is not None}


def strategy_variables(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables that `accelerate launch` would set for a config.

    Only the variables that name the strategy or are checked in this module are returned.
    """
    sharded, deepspeed = block(config, "fsdp_config"), block(config, "deepspeed_config")
    variables = {PRECISION_VARIABLE: str(config.get("mixed_precision") or "no").lower()}
    sizes = block(config, "parallelism_config")
    variables |= {key.upper(): str(value) for key, value in sizes.items()}
    if config.get("parallelism_config"):
        variables[_USE_PARALLEL] = "true"
    compiler = block(config, "dynamo_config").get("dynamo_backend", config.get("dynamo_backend"))
    if compiler:
        variables["ACCELERATE_DYNAMO_BACKEND"] = str(compiler).upper()
    if ignored := sharded.get("fsdp_ignored_modules"):
        variables["FSDP_IGNORED_MODULES"] = str(ignored)
    if config["distributed_type"] == "FSDP":
        checkpointing = str(sharded.get("fsdp_activation_checkpointing") or False).lower()
        variables |= {"ACCELERATE_USE_FSDP": "true", "FSDP_ACTIVATION_CHECKPOINTING": checkpointing}
        variables["FSDP_VERSION"] = str(sharded.get("fsdp_version") or 1)
    elif config["distributed_type"] == "DEEPSPEED":
        variables["ACCELERATE_USE_DEEPSPEED"] = "true"
        if deepspeed.get("deepspeed_config_file"):
            variables["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(deepspeed["deepspeed_config_file"])
        else:
            variables["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(deepspeed.get("zero_stage", 2))
    return variables


def _exceeds_one(value: str) -> bool:
    with suppress(ValueError):
        return float(value) > 1
    return value.lower() != "none"


# (variable, test for wrong values, reason); the reason completes "NAME VALUE: ...".
WRONG_VARIABLES: tuple[tuple[str, Callable[[str], bool], str], ...] = (
    ("PARALLELISM_CONFIG_TP_SIZE", _exceeds_one,
     "tensor parallelism is not supported, ranks of a group would read different data and the loss "
     f"would be wrong; {_USE_FSDP2}"),
    ("PARALLELISM_CONFIG_CP_SIZE", _exceeds_one,
     "accelerate's context parallelism lets packed documents attend to each other: remove it, and "
     "set context_parallel in the recipe"),
    ("PARALLELISM_CONFIG_SP_SIZE", _exceeds_one,
     "accelerate's sequence parallelism makes the loss a mean per micro-batch: remove it, and set "
     "context_parallel in the recipe"),
    (PRECISION_VARIABLE, lambda value: value.lower() == "fp8",
     "write \"no\" there, and fp8: true in the recipe"),
    ("ACCELERATE_DYNAMO_BACKEND", lambda value: value.lower() not in ("no", "none", ""),
     "it compiles the whole model, with a dense attention mask on packed sequences: remove it; "
     "compile: true in the recipe compiles layer by layer"),
    ("ACCELERATE_USE_MEGATRON_LM", lambda value: value.lower() == "true",
     "Megatron-LM trains a model of its own, not the one that Trainer has: use fsdp2"),
    ("FSDP_ACTIVATION_CHECKPOINTING", lambda value: value.lower() == "true",
     "leave it to the recipe: activation_checkpointing: full says so for every strategy"),
    ("FSDP_IGNORED_MODULES", lambda value: value.lower() not in ("none", ""),
     "gradients of these modules would not be summed over the ranks: remove it"),
)  # fmt: skip


def launch_faults(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each variable of accelerate that would make training wrong."""
    for name, is_wrong, why in WRONG_VARIABLES:
        if name in variables and is_wrong(variables[name]):
            key = name.removeprefix("ACCELERATE_").lower()
            yield f"{key} {variables[name]}: {why}"
    for name in _HSDP_SIZES:
        if not _exceeds_one(variables.get(name, "1")) or is_hybrid(variables):
            continue
        if not is_true(_USE_PARALLEL, variables):
            yield (
                f"{name.lower()} {variables[name]} has no effect without {_USE_PARALLEL}=true: use "
                "accelerate_configs/hsdp.yaml with the setting dp_shard, or unset the variable"
            )
        else:
            yield (
                f"{name.lower()} {variables[name]} needs FSDP2 and would do nothing: write "
                "distributed_type: FSDP with fsdp_version: 2, or remove parallelism_config"
            )


def is_hybrid(variables: Mapping[str, str]) -> bool:
    """Return whether the variables ask for HSDP: FSDP2 with copies of the sharded states."""
    fsdp2 = is_true("ACCELERATE_USE_FSDP", variables) and variables.get("FSDP_VERSION") == "2"
    return fsdp2 and is_true(_USE_PARALLEL, variables)


def group_sizes(variables: Mapping[str, str]) -> dict[str, str]:
    """Return HSDP's group sizes as text, {REPLICAS: ..., SHARDS: ...}, or {} without HSDP."""
    return {name: variables.get(name, "1") for name in _HSDP_SIZES if is_hybrid(variables)}


def derive_group_sizes(values: SettingValues) -> None:
    """Set HSDP's group sizes in `environment` unless accelerate's config sets them.

    HSDP shards each copy of the states over `dp_shard` ranks (default: the ranks of a node). If
    accelerate's config sets both sizes to 1, they count as not set. If a flag or a later recipe
    chooses a `strategy` without HSDP, the `dp_shard` of a recipe is reset.
    """
    environment, shards = values.environment, values["dp_shard"]
    if set(group_sizes(environment).values()) == {"1"}:  # HSDP, and no sizes are set
        shards = shards or int(environment.get("LOCAL_WORLD_SIZE", values.world_size))
        sizes = {REPLICAS: str(values.world_size // shards), SHARDS: str(shards)}
        values.environment = {**environment, **sizes}
    elif not is_hybrid(environment) and 0 < values.rank("dp_shard") < values.rank("strategy"):
        reset_setting(values, "dp_shard", "strategy")
    elif shards and values.world_size == 1:
        values.notes.append(f"{values.shown('dp_shard')} has no effect on one process")


def _hsdp_faults(values: SettingValues) -> Iterator[str]:
    """Yield an error text if dp_shard or HSDP's group sizes do not fit the launch or each other."""
    processes, given = values.world_size, values["dp_shard"]
    if not is_hybrid(values.environment):
        if given is not None and processes > 1:
            yield (
                f"{values.shown('dp_shard')} has no effect, because this launch does not use HSDP: "
                "set strategy: hsdp (accelerate launch --config_file accelerate_configs/hsdp.yaml),"
                " or leave it out"
            )
        return
    if processes == 1:
        yield "HSDP needs at least 2 processes: for one use accelerate_configs/single_gpu.yaml"
        return
    with suppress(ValueError):  # accelerate reports sizes that are no integers
        replicas, shards = map(int, group_sizes(values.environment).values())
        if replicas * shards != processes or shards < 2:
            possible = [str(size) for size in range(2, processes + 1) if processes % size == 0]
            yield (
                f"HSDP: dp_replicate_size {replicas} x dp_shard_size {shards} are not the "
                f"{processes} processes of this launch, with at least 2 to shard over: set dp_shard"
                f" to {' or '.join(possible)}, and no sizes in the accelerate config"
            )
        elif given and given != shards:  # 0 is out of range
            yield (
                f"{values.shown('dp_shard')} contradicts dp_shard_size {shards} of the accelerate "
                "config: remove one of them"
            )


def check_launch_settings(values: SettingValues) -> Iterator[str]:
    """Yield a line for each setting of accelerate or DeepSpeed that would make training wrong."""
    environment, processes = values.environment, values.world_size
    faults = [*launch_faults(environment)]
    yield from (f"the accelerate config or command: {fault}" for fault in faults)
    if not faults:
        yield from _hsdp_faults(values)
    for name, libraries in IGNORED_BY.items():
        used = [each for each in libraries if is_true(f"ACCELERATE_USE_{each}", environment)]
        if values[name] and used:
            yield f"{values.shown(name)}: {used[0]} sums gradients in its own way: {_USE_DDP}"
    file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if is_true("ACCELERATE_USE_DEEPSPEED", environment) and file != "none":
        yield from _deepspeed_file_faults(file, values, processes)


def let_recipe_decide(values: SettingValues) -> None:
    """Set DeepSpeed's accumulation and clipping to "auto", so that the recipe's values are used.

    `accelerate config` writes numbers. Trainer would refuse numbers that differ from the recipe's,
    but only after loading the model.
    """
    if not is_true("ACCELERATE_USE_DEEPSPEED", values.environment):
        return
    decided: dict[str, str] = {}
    for name, why in BY_RECIPE.items():
        if (written := values.environment.get(name, "auto")).lower() not in ("auto", "none"):
            key = name.removeprefix("ACCELERATE_").lower()
            values.notes.append(f"{key} {written} of the accelerate config has no effect: {why}")
            decided[name] = "auto"
    values.environment = {**values.environment, **decided}


def _deepspeed_file_faults(file: str, values: SettingValues, processes: int) -> Iterator[str]:
    """Yield error texts on values of a DeepSpeed file that are wrong or contradict the recipe."""
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield f"the DeepSpeed file {file} cannot be read ({error}): correct deepspeed_config_file"
        return
    total, micro = values["global_batch_size"], values["per_device_train_batch_size"]
    expected = {
        "train_batch_size": total, "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": total and total // (micro * processes),
        "gradient_clipping": values["max_grad_norm"],
        "bf16.enabled": values["bf16"], "fp16.enabled": values["fp16"],
    }  # fmt: skip
    for key, ours in expected.items():
        section, _, name = key.rpartition(".")
        written = (content.get(section, {}) if section else content).get(name, "auto")
        if written != "auto" and ours not in (None, written):
            yield f'{file}: {key} {written}, but the recipe says {ours}: write "auto" there'
    if "gradient_clipping" not in content and values["max_grad_norm"]:
        yield f'{file} has no gradient_clipping, so max_grad_norm would do nothing: add "auto"'
    for key in ("optimizer", "scheduler"):
        if key in content:
            yield f"{file}: {key} would replace that of the recipe: remove it from the file"
    parallel = {"sequence_parallel_size": content.get("sequence_parallel_size", 1)}
    parallel["autotp_size"] = content.get("tensor_parallel", {}).get("autotp_size", 1)
    for key, size in parallel.items():
        if _exceeds_one(str(size)):
            yield f"{file}: {key} {size} is not supported; {_USE_FSDP2}"


@contextmanager
def launch_environment(values: SettingValues) -> Iterator[None]:
    """Set the launch's variables in os.environ while the with block builds TrainingArguments.

    The precision of the accelerate config is removed, because it would overrule `bf16: false`. A
    dry run also removes the launcher's variables. With WORLD_SIZE=8, for example, accelerate would
    wait for processes that do not exist.
    """
    removed = {PRECISION_VARIABLE}
    if values["dry_run"]:
        removed |= {*LAUNCHER_VARIABLES}
        removed |= {name for name in values.environment if name.startswith(MPI_VARIABLES)}
    new: dict[str, str | None] = {**values.environment, **dict.fromkeys(removed)}
    # Touch no other variables: accelerate sets some, and NCCL's threads read them.
    new = {name: value for name, value in new.items() if os.environ.get(name) != value}
    before = {name: os.environ.get(name) for name in new}
    _set_variables(new)
    try:
        yield
    finally:
        _set_variables(before)


def _set_variables(variables: Mapping[str, str | None]) -> None:
    """Set environment variables; None removes a variable."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
