"""Settings of accelerate that are refused or overruled, because training would be wrong.

`accelerate launch` passes its config file and its flags to the processes in environment variables.
One table of variables therefore serves for files, flags and the environment.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from utils.config.declarations import SettingValues, is_true
from utils.config.precision import PRECISION_VARIABLE

# Blocks of an accelerate config. Their keys may have this prefix or not.
PREFIXES = {"parallelism_config": "parallelism_config_", "dynamo_config": "dynamo_",
            "fsdp_config": "fsdp_", "deepspeed_config": ""}  # fmt: skip
BY_RECIPE = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "global_batch_size decides",
    "ACCELERATE_GRADIENT_CLIPPING": "max_grad_norm decides",
}
_DATA_PARALLEL = ("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "PARALLELISM_CONFIG_DP_SHARD_SIZE")
_OTHERS = "remove it: fsdp2 splits a model over all GPUs; toolkits with it: docs/parallelism.md"


def block(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a block of an accelerate config. All keys get the prefix; null values are left out."""
    prefix = PREFIXES[name]
    keys = (content.get(name) or {}).items()
    return {prefix + key.removeprefix(prefix): value for key, value in keys if value is not None}


def block_variables(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that `accelerate launch` sets for the settings checked here."""
    sizes = block(content, "parallelism_config")
    variables = {key.upper(): str(value) for key, value in sizes.items()}
    if content.get("parallelism_config"):
        variables["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    compiled = {"dynamo_backend": content.get("dynamo_backend"), **block(content, "dynamo_config")}
    if compiled["dynamo_backend"]:
        variables["ACCELERATE_DYNAMO_BACKEND"] = str(compiled["dynamo_backend"]).upper()
    if ignored := block(content, "fsdp_config").get("fsdp_ignored_modules"):
        variables["FSDP_IGNORED_MODULES"] = str(ignored)
    return variables


def _several(value: str) -> bool:
    with suppress(ValueError):
        return float(value) > 1
    return value.lower() != "none"


# A variable, a test for wrong values, and the reason, which completes "NAME VALUE: ...".
REFUSED: tuple[tuple[str, Callable[[str], bool], str], ...] = (
    ("PARALLELISM_CONFIG_TP_SIZE", _several,
     "tensor parallelism is not supported, ranks of a group would read different data and the loss "
     f"would be wrong; {_OTHERS}"),
    ("PARALLELISM_CONFIG_CP_SIZE", _several,
     "context parallelism is not supported, packed documents would attend to each other; "
     f"{_OTHERS}, and activation_checkpointing: full for long sequences"),
    ("PARALLELISM_CONFIG_SP_SIZE", _several,
     "sequence parallelism is not supported, the loss would be a mean per micro-batch; "
     f"{_OTHERS}, and activation_checkpointing: full for long sequences"),
    (PRECISION_VARIABLE, lambda value: value.lower() == "fp8",
     "fp8 is not supported: write \"no\" there, and bf16: true in the recipe"),
    ("ACCELERATE_DYNAMO_BACKEND", lambda value: value.lower() not in ("no", "none", ""),
     "it compiles the whole model, with a dense attention mask on packed sequences: remove it; "
     "compile: true in the recipe compiles layer by layer"),
    ("ACCELERATE_USE_MEGATRON_LM", lambda value: value.lower() == "true",
     "Megatron-LM trains a model of its own, not the one that Trainer has: use fsdp2"),
    ("FSDP_IGNORED_MODULES", lambda value: value.lower() not in ("none", ""),
     "gradients of these modules would not be summed over the ranks: remove it"),
)  # fmt: skip


def launch_faults(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each wrong variable of a launch."""
    for name, is_wrong, why in REFUSED:
        if name in variables and is_wrong(variables[name]):
            key = name.removeprefix("ACCELERATE_").lower()
            yield f"{key} {variables[name]}: {why}"
    if not is_true("ACCELERATE_USE_PARALLELISM_CONFIG", variables):
        return
    fsdp2 = is_true("ACCELERATE_USE_FSDP", variables) and variables.get("FSDP_VERSION") == "2"
    for name in _DATA_PARALLEL:
        if not fsdp2 and _several(variables.get(name, "1")):
            yield (
                f"{name.lower()} {variables[name]} needs FSDP2 and would do nothing: write "
                "distributed_type: FSDP with fsdp_version: 2, or remove parallelism_config"
            )


def check_launch_settings(values: SettingValues) -> Iterator[str]:
    """Refuse launch settings that make training wrong, from a file, a flag or a variable."""
    environment = values.environment
    faults = [*launch_faults(environment)]
    yield from (f"the accelerate config or command: {fault}" for fault in faults)
    processes = values.world_size
    needed = "ACCELERATE_USE_PARALLELISM_CONFIG", "ACCELERATE_USE_FSDP"
    if all(is_true(name, environment) for name in needed) and not faults:
        sizes = [environment.get(name, "1") for name in _DATA_PARALLEL]
        with suppress(ValueError):  # accelerate reports it
            if math.prod(map(int, sizes)) != processes or int(sizes[1]) < 2:
                yield (
                    f"the accelerate config: dp_replicate_size {sizes[0]} x dp_shard_size "
                    f"{sizes[1]} are not the {processes} processes of this launch, with at least 2 "
                    "to shard over: correct them, or remove parallelism_config"
                )
    file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if is_true("ACCELERATE_USE_DEEPSPEED", environment) and file != "none":
        yield from _deepspeed_file_faults(file, values, processes)


def let_recipe_decide(values: SettingValues) -> None:
    """Set DeepSpeed's values to "auto" if the recipe decides them. Trainer fills them in.

    `accelerate config` writes numbers there. Trainer would refuse the numbers, but only after the
    model is loaded.
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
    """Yield a line for each value of a DeepSpeed file that contradicts the recipe."""
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield f"the DeepSpeed file {file} cannot be read ({error}): correct deepspeed_config_file"
        return
    total, micro = values["global_batch_size"], values["per_device_train_batch_size"]
    expected = {
        "train_batch_size": total, "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": total // (micro * processes),
        "gradient_clipping": values["max_grad_norm"],
        "bf16.enabled": values["bf16"], "fp16.enabled": values["fp16"],
    }  # fmt: skip
    for key, ours in expected.items():
        section, _, name = key.rpartition(".")
        written = (content.get(section, {}) if section else content).get(name, "auto")
        if written not in ("auto", ours):
            yield f'{file}: {key} {written}, but the recipe says {ours}: write "auto" there'
    if "gradient_clipping" not in content and values["max_grad_norm"]:
        yield f'{file} has no gradient_clipping, so max_grad_norm would do nothing: add "auto"'
    for key in ("optimizer", "scheduler"):
        if key in content:
            yield f"{file}: {key} would replace that of the recipe: remove it from the file"
    parallel = {"sequence_parallel_size": content.get("sequence_parallel_size", 1)}
    parallel["autotp_size"] = content.get("tensor_parallel", {}).get("autotp_size", 1)
    for key, size in parallel.items():
        if _several(str(size)):
            yield f"{file}: {key} {size} is not supported; {_OTHERS}"
