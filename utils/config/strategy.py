"""The strategy of a run, its accelerate config, and the GPUs that a dry run assumes.

The launcher imports this module before it checks for missing packages. Therefore only functions
import third-party packages.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from utils.config.declarations import SettingValue, SettingValues
from utils.config.errors import ConfigurationError
from utils.config.launch_settings import (
    PRECISION_VARIABLE,
    block,
    launch_faults,
    strategy_variables,
)

CONFIG_VARIABLE = "ACCELERATE_CONFIG"
SUBMITTING = "STOKER_SUBMITTING"  # set if slurm/submit.sh started the dry run
AUTO = "auto"
CONFIGS_FOLDER = Path("accelerate_configs")
NAMES = ("single_gpu", "multi_gpu", "fsdp2", "hsdp", "zero1", "zero2", "zero3", "cpu")
# Names of the strategies in other toolkits.
FOREIGN = {
    "ddp": "multi_gpu", "dp": "multi_gpu", "single": "single_gpu", "deepspeed": "zero2",
    "hybrid_shard": "hsdp",
}  # fmt: skip
ONE_PROCESS = ("NO", False, "MULTI_CPU")  # YAML reads an unquoted NO as false
SHARDING_LIBRARIES = ("FSDP", "DEEPSPEED")
_ROOT = Path(__file__).parents[2]
# About the share of nominal memory that torch sees on a GPU that is not in gpus.yaml.
VISIBLE_SHARE = 0.95
_OFFLOADS = ("offload_optimizer_device", "offload_param_device", "fsdp_offload_params")
_GPUS_PATTERN = re.compile(r"(?:(\d+)x)?(\d+)x(?:(\w[\w ]*)-)?(\d+)GB", re.IGNORECASE)


@dataclass(frozen=True)
class StrategyConfig:
    """The accelerate config of a launch. `path` is relative to the repository's root.

    chosen_by: the setting or variable that named this config, as text for messages
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
        """Return whether the config shards states, offloads nothing and names no DeepSpeed file."""
        own = block(self.content, "fsdp_config") | block(self.content, "deepspeed_config")
        offloads = any(own.get(name) not in (None, False, "none") for name in _OFFLOADS)
        return (
            self.kind in SHARDING_LIBRARIES and not offloads and "deepspeed_config_file" not in own
        )


def choose_config(
    environment: Mapping[str, str], strategy: SettingValue, processes: int, *, on_cpu: bool
) -> StrategyConfig:
    """Return the accelerate config for a launch of `processes` processes with a strategy.

    ACCELERATE_CONFIG wins over `strategy`. "auto" depends on the number of processes. A single
    process gets single_gpu.yaml if the strategy needs several processes. Raises ConfigurationError.
    """
    shown = f"strategy {strategy.value} ({strategy.source})"
    single = CONFIGS_FOLDER / "single_gpu.yaml"
    if path := environment.get(CONFIG_VARIABLE):
        said = f"{CONFIG_VARIABLE}={path}"
        over = f", which overrules {shown}" if strategy.value != AUTO else ""
        return read_config(Path(path), said + over)
    if strategy.value == AUTO:
        several = CONFIGS_FOLDER / ("cpu.yaml" if on_cpu else "multi_gpu.yaml")
        return read_config(single if processes == 1 else several, "the number of processes")
    if strategy.value not in NAMES and not (_ROOT / strategy.value).is_file():
        name = strategy.value.lower()
        near = [FOREIGN[name]] if name in FOREIGN else get_close_matches(name, (AUTO, *NAMES), n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigurationError(
            f"{shown}: no such strategy or file: {hint}take one of {', '.join((AUTO, *NAMES))}, or "
            "a path"
        )
    config = read_config(strategy_path(strategy.value), shown)
    if processes == 1 and (config.shards or strategy.value == "multi_gpu"):
        return read_config(single, f"{shown}, which has no effect on one process")
    return config


def strategy_path(strategy: str) -> Path:
    """Return the path of a strategy's file. strategy: a name in accelerate_configs/, or a path."""
    return CONFIGS_FOLDER / f"{strategy}.yaml" if strategy in NAMES else Path(strategy)


def read_config(path: Path, chosen_by: str) -> StrategyConfig:
    """Read an accelerate config at a path in the repository. Raises ConfigurationError."""
    import yaml

    known = (*ONE_PROCESS, *SHARDING_LIBRARIES, "MULTI_GPU")
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


def describe_launch(values: SettingValues) -> None:
    """Add the variables of the planned launch (processes, strategy) to a dry run's `environment`.

    The number of processes comes from `assume`, or from WORLD_SIZE, which slurm/submit.sh sets.
    Without either, the launch is unknown and nothing is added. If `accelerate launch` started this
    process, its variables are already set, and only `assume` replaces them.
    """
    environment = values.environment
    is_known = "WORLD_SIZE" not in environment or is_launched(environment)
    if not values["dry_run"] or (is_known and not values["assume"]):
        return
    # check_strategy reports these errors.
    with suppress(ValueError):
        if values["assume"]:
            gpus = assumed_gpus(values["assume"])
            sizes = {"WORLD_SIZE": str(gpus.world_size), "LOCAL_WORLD_SIZE": str(gpus.per_node)}
            environment = {**environment, **sizes}
        values.environment = environment
        strategy = SettingValue(values["strategy"], values.source("strategy"))
        on_cpu = not values["assume"] and values.on_cpu
        config = choose_config(environment, strategy, values.world_size, on_cpu=on_cpu)
        variables = strategy_variables(config.content)
        described = {name: value for name, value in variables.items() if value != "no"}
        values.environment = {**environment, **described}


def is_launched(environment: Mapping[str, str]) -> bool:
    """Return whether `accelerate launch` started this process."""
    said = (PRECISION_VARIABLE, "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")
    return any(name in environment for name in said)


def check_strategy(values: SettingValues) -> Iterator[str]:
    """Yield error texts on `strategy` and `assume`, and on dry-run settings in a real run."""
    decides = values["dry_run"] and not is_launched(values.environment)
    environment = values.environment if decides else {}
    try:
        given = SettingValue(values["strategy"], values.source("strategy"))
        choose_config(environment, given, processes=2, on_cpu=False)
    except ConfigurationError as error:
        yield from error.problems
    for name in ("assume", "suggest"):
        if values[name] and not values["dry_run"]:
            yield f"{values.shown(name)} is for a dry run: add --dry_run, or leave it out"
    if not values["assume"]:
        return
    shown = values.shown("assume")
    if values["dry_run"] and SUBMITTING in os.environ:
        yield f"{shown}: the job says which GPUs it has; leave it out"
    try:
        assumed_gpus(values["assume"])
    except ValueError as error:
        yield f"{shown}: {error}"
    for name in ("use_cpu", "strategy"):
        if values[name] in (True, "cpu"):
            yield f"{shown} does not go with {values.shown(name)}"


@dataclass(frozen=True)
class AssumedGpus:
    """The GPUs of a run: `nodes` nodes with `per_node` GPUs each.

    flops  peak FLOP/s of a GPU in bf16, if known
    link   bytes/s that a GPU can send to the other GPUs of its node, if known
    bf16   whether a GPU multiplies in bf16
    fp8    False if a GPU is known not to multiply in fp8
    """

    name: str
    nodes: int
    per_node: int
    memory_gib: float
    flops: float | None = None
    link: float | None = None
    bf16: bool = True
    fp8: bool = True

    @property
    def world_size(self) -> int:
        """Return the number of GPUs."""
        return self.nodes * self.per_node

    def __str__(self) -> str:
        nodes = f", {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.world_size} x {self.name}{nodes}"


@cache
def known_gpus() -> dict[str, dict[str, Any]]:
    """Return {GPU name: memory_gib, tflops, link_gb_s, ...} from gpus.yaml."""
    import yaml

    text = Path(__file__).with_name("gpus.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


def assumed_gpus(text: str) -> AssumedGpus:
    """Parse `8xH100-80GB`, `2x8xA100-40GB`, or `8x48GB` for any GPU. Raises ValueError."""
    found = _GPUS_PATTERN.fullmatch(text.strip())
    numbers = [int(each or 1) for each in found.groups()[:2]] if found else [0]
    if found is None or min(numbers) < 1 or int(found[4]) < 1:
        raise ValueError(
            "expected GPUs, or nodes x GPUs, as in 8xH100-80GB, 2x8xA100-40GB, or 8x48GB for any"
        )
    nodes, per_node = numbers
    if found[3] is None:
        return AssumedGpus(f"{found[4]}GB", nodes, per_node, int(found[4]) * VISIBLE_SHARE)
    asked = f"{found[3].replace(' ', '')}-{found[4]}GB"
    known = {name.lower(): name for name in known_gpus()}
    if asked.lower() not in known:
        raise ValueError(
            f"{asked} is not known here: take one of {', '.join(known.values())}, or give its "
            f"memory alone, {text[: found.start(3)]}{found[4]}GB, for a prediction without speed"
        )
    name = known[asked.lower()]
    gpu = known_gpus()[name]
    if "tflops" not in gpu:
        return AssumedGpus(name, nodes, per_node, gpu["memory_gib"], bf16=False, fp8=False)
    flops, link = gpu["tflops"] * 1e12, gpu["link_gb_s"] / 2 * 1e9
    fp8 = gpu.get("fp8", True)
    return AssumedGpus(name, nodes, per_node, gpu["memory_gib"], flops, link, fp8=fp8)
