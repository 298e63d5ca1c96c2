"""Mixed precision that nobody decided on: bf16 where a CPU with AMX computes, float32 elsewhere."""

from collections.abc import Mapping
from typing import Any

from accelerate.utils.environment import str_to_bool

from utils.config.reading.settings import SettingValues

AMX = "this CPU has AMX"
NODE_UNKNOWN = "bf16 where a CPU with AMX trains"  # a dry run may be on another machine
SHARDED = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")


def settled_precision(
    values: SettingValues, environment: Mapping[str, str]
) -> dict[str, tuple[Any, str]]:
    """Return `bf16`, and with it `use_cpu`, where the settings leave it open; each with why.

    The answer is kept in config.yaml, so that a run keeps its numbers: on a CPU without AMX it is
    another run, which is refused. That file is a recipe too, and bf16 on a CPU has to be asked for.
    """
    if values["bf16"] is not None:
        return {}
    weights = values.get("dtype")
    if values["fp16"] or weights not in (None, "float32"):
        return {"bf16": (False, values.shown("fp16" if values["fp16"] else "dtype"))}
    if environment.get("ACCELERATE_MIXED_PRECISION", "no") != "no":
        return {"bf16": (False, "the accelerate config decides")}
    if not computes_on_cpu(values, environment):
        return {"bf16": (False, NODE_UNKNOWN if values.get("dry_run") else "default")}
    if not has_amx():
        return {"bf16": (False, "this CPU has no AMX")}
    return {"bf16": (True, AMX), "use_cpu": (True, values.sources["use_cpu"])}


def computes_on_cpu(values: SettingValues, environment: Mapping[str, str]) -> bool:
    """Whether the run is known to train on a CPU; a dry run on a login node does not know.

    Several processes do so only if they are told to (utils/cluster/launch.py refuses them else).
    """
    import torch

    if any(str_to_bool(environment.get(name, "0")) for name in SHARDED):
        return False  # that needs GPUs, and is refused without
    if values["use_cpu"] or str_to_bool(environment.get("ACCELERATE_USE_CPU", "0")):
        return True
    if values.get("dry_run") or torch.accelerator.is_available():
        return False
    return int(environment.get("WORLD_SIZE", "1")) == 1


def has_amx() -> bool:
    """Whether this CPU multiplies bf16 matrices in tiles, and the system lets it."""
    import torch

    return bool(torch.cpu._is_amx_tile_supported())
