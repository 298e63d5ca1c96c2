"""The strategy of a run: its accelerate config, and the environment that it gives the processes.

A launcher imports this module before it knows whether the packages are installed. Third-party
packages are therefore imported inside functions: the launcher reports a missing one.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from utils.config.assumed import assumed_gpus
from utils.config.declarations import Given, SettingValues
from utils.config.errors import ConfigurationError
from utils.config.launch_settings import block, block_variables, launch_faults
from utils.config.precision import PRECISION_VARIABLE

CONFIG = "ACCELERATE_CONFIG"
SUBMITTING = "STOKER_SUBMITTING"  # set where slurm/submit.sh started the dry run
AUTO = "auto"
FOLDER = Path("accelerate_configs")
NAMES = ("single_gpu", "multi_gpu", "fsdp2", "zero1", "zero2", "zero3", "cpu")
ONE_PROCESS = ("NO", False, "MULTI_CPU")  # YAML reads an unquoted NO as false
SHARDING = ("FSDP", "DEEPSPEED")
_ROOT = Path(__file__).parents[2]
_OFFLOADS = ("offload_optimizer_device", "offload_param_device", "fsdp_offload_params")


@dataclass(frozen=True)
class StrategyConfig:
    """The accelerate config of a launch: its path from the repository's root, its contents.

    chosen_by: the setting or variable that named the config, for messages.
    """

    path: Path
    chosen_by: str
    content: Mapping[str, Any]

    @property
    def kind(self) -> Any:
        """Return the distributed_type of the config."""
        return self.content.get("distributed_type")

    @property
    def shards(self) -> bool:
        """Return whether the strategy needs several processes: it shards and does not offload."""
        own = block(self.content, "fsdp_config") | block(self.content, "deepspeed_config")
        offloads = any(own.get(name) not in (None, False, "none") for name in _OFFLOADS)
        return self.kind in SHARDING and not offloads and "deepspeed_config_file" not in own


def choose_config(
    environment: Mapping[str, str], strategy: Given, processes: int, *, on_cpu: bool
) -> StrategyConfig:
    """Return the accelerate config for a launch of `processes` processes.

    The variable ACCELERATE_CONFIG wins over the strategy. auto depends on the number of processes.
    A single process gets single_gpu.yaml for a strategy that needs several processes. Raises
    ConfigurationError.
    """
    shown = f"strategy {strategy.value} ({strategy.source})"
    alone = FOLDER / "single_gpu.yaml"
    if path := environment.get(CONFIG):
        said = f"{CONFIG}={path}"
        over = f", which overrules {shown}" if strategy.value != AUTO else ""
        return read_config(Path(path), said + over)
    if strategy.value == AUTO:
        several = FOLDER / ("cpu.yaml" if on_cpu else "multi_gpu.yaml")
        return read_config(alone if processes == 1 else several, "the number of processes")
    if fault := strategy_fault(strategy.value):
        raise ConfigurationError(f"{shown}: {fault}")
    config = read_config(strategy_path(strategy.value), shown)
    if processes == 1 and (config.shards or strategy.value == "multi_gpu"):
        return read_config(alone, f"{shown}, which has no effect on one process")
    return config


def strategy_path(strategy: str) -> Path:
    """Return the file of a strategy: a name of accelerate_configs/, or a path."""
    return FOLDER / f"{strategy}.yaml" if strategy in NAMES else Path(strategy)


def strategy_fault(strategy: str) -> str:
    """Return the fault of a strategy's name or path; empty: no fault."""
    if strategy == AUTO or strategy in NAMES or (_ROOT / strategy).is_file():
        return ""
    near = get_close_matches(strategy.lower(), (AUTO, *NAMES), n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"no such strategy or file: {hint}take one of {', '.join((AUTO, *NAMES))}, or a path"


def read_config(path: Path, chosen_by: str) -> StrategyConfig:
    """Read an accelerate config, a path from the repository's root. Raises ConfigurationError."""
    import yaml

    known = (*ONE_PROCESS, *SHARDING, "MULTI_GPU")
    try:
        content = yaml.safe_load((_ROOT / path).read_text(encoding="utf-8"))
        if (kind := content.get("distributed_type", "missing")) not in known:
            raise ValueError(f"distributed_type {kind} is not supported")
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise ConfigurationError(
            f"{chosen_by}: no accelerate config for Stoker ({error}): name a file of "
            "accelerate_configs/, or one that `accelerate config` wrote, from the repository's "
            "root."
        ) from error
    if faults := list(launch_faults(strategy_variables(content))):
        raise ConfigurationError([f"{chosen_by} ({path}): {fault}" for fault in faults])
    return StrategyConfig(path, chosen_by, content)


def strategy_variables(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables with which `accelerate launch` passes on the strategy of a config."""
    variables = {PRECISION_VARIABLE: str(config.get("mixed_precision") or "no").lower()}
    variables |= block_variables(config)
    if config["distributed_type"] == "FSDP":
        own = block(config, "fsdp_config")
        checkpointing = str(own.get("fsdp_activation_checkpointing") or False).lower()
        variables |= {"ACCELERATE_USE_FSDP": "true", "FSDP_ACTIVATION_CHECKPOINTING": checkpointing}
        variables["FSDP_VERSION"] = str(own.get("fsdp_version") or 1)
    elif config["distributed_type"] == "DEEPSPEED":
        own = block(config, "deepspeed_config")
        variables["ACCELERATE_USE_DEEPSPEED"] = "true"
        if own.get("deepspeed_config_file"):
            variables["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(own["deepspeed_config_file"])
        else:
            variables["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(own.get("zero_stage", 2))
    return variables


def describe_launch(values: SettingValues) -> None:
    """Give a dry run the environment of the launch that it plans: processes and strategy.

    The number of processes comes from `assume` or WORLD_SIZE (set by slurm/submit.sh). Without
    `assume`, a dry run under `accelerate launch` keeps its environment.
    """
    environment = values.environment
    if not values["dry_run"]:
        return
    if values["assume"]:
        try:
            world_size = assumed_gpus(values["assume"]).world_size
        except ValueError:  # check_strategy reports it
            return
        environment = {**environment, "WORLD_SIZE": str(world_size)}
    elif "WORLD_SIZE" not in environment or is_launched(environment):
        return
    values.environment = environment
    strategy = Given(values["strategy"], values.source("strategy"))
    on_cpu = not values["assume"] and values.on_cpu
    try:
        config = choose_config(environment, strategy, values.world_size, on_cpu=on_cpu)
    except ConfigurationError:  # check_strategy reports it
        return
    variables = strategy_variables(config.content)
    described = {name: value for name, value in variables.items() if value != "no"}
    values.environment = {**environment, **described}


def is_launched(environment: Mapping[str, str]) -> bool:
    """Return whether `accelerate launch` started this process."""
    said = (PRECISION_VARIABLE, "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")
    return any(name in environment for name in said)


def check_strategy(values: SettingValues) -> Iterator[str]:
    """Refuse unusable strategies, unknown GPUs, and assume or suggest without a dry run."""
    decides = values["dry_run"] and not is_launched(values.environment)
    environment = values.environment if decides else {}
    try:
        given = Given(values["strategy"], values.source("strategy"))
        choose_config(environment, given, processes=2, on_cpu=False)
    except ConfigurationError as error:
        yield from error.problems
    for name in ("assume", "suggest"):
        if values[name] and not values["dry_run"]:
            yield f"{values.shown(name)} is for a dry run: add --dry_run, or leave it out"
        elif values[name] and name == "assume" and SUBMITTING in os.environ:
            yield f"{values.shown(name)}: the job says which GPUs it has; leave it out"
    if values["assume"]:
        try:
            assumed_gpus(values["assume"])
        except ValueError as error:
            yield f"{values.shown('assume')}: {error}"
        for name in ("use_cpu", "strategy"):
            if values[name] in (True, "cpu"):
                yield f"{values.shown('assume')} does not go with {values.shown(name)}"
