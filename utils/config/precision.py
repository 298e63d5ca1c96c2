"""Mixed precision that nobody decided on: bf16 where a CPU multiplies it fast, else float32."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from accelerate.utils.environment import str_to_bool

from utils.config.declarations import Given, SettingValues

AMX, AVX512_BF16 = "this CPU has AMX", "this CPU has AVX512-BF16"
FAST_BF16 = (AMX, AVX512_BF16)
MIXED_PRECISION = "ACCELERATE_MIXED_PRECISION"
BY_LAUNCH = "the accelerate config says so"
NODE_UNKNOWN = "bf16 where a CPU with AMX or AVX512-BF16 trains"  # a dry run may be elsewhere
SHARDED = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")


def with_precision(values: SettingValues) -> SettingValues:
    """Return the values with the precision that launch or machine decide; the plan logs it.

    Where the settings decide otherwise than the accelerate config, a note says so.
    """
    values = values.replaced(
        {name: Given(*entry) for name, entry in settled_precision(values, os.environ).items()}
    )
    by_launch = os.environ.get(MIXED_PRECISION, "no")
    if by_launch == "no" or values["bf16" if by_launch != "fp16" else "fp16"]:
        return values
    shown = values.shown("fp16" if values["fp16"] else "bf16")
    return values.replaced(
        {}, [f"mixed_precision {by_launch} of the accelerate config has no effect: {shown}"]
    )


@contextmanager
def decided_precision() -> Iterator[None]:
    """Hide the accelerate config's mixed precision while TrainingArguments is built.

    Those would take it wherever neither bf16 nor fp16 is true: an explicit `bf16: false` would
    lose. What the config says was taken into the settings before, where they left it open.
    """
    hidden = os.environ.get(MIXED_PRECISION)
    os.environ[MIXED_PRECISION] = "no"
    try:
        yield
    finally:
        if hidden is None:
            del os.environ[MIXED_PRECISION]
        else:
            os.environ[MIXED_PRECISION] = hidden


def settled_precision(
    values: SettingValues, environment: Mapping[str, str]
) -> dict[str, tuple[Any, str]]:
    """Return `bf16`, and with it `use_cpu`, where the settings leave it open; each with why.

    The answer is kept in config.yaml, so that a run keeps its numbers: on a CPU without such
    products it is another run, which is refused. That file is a recipe too, and bf16 on a CPU has
    to be asked for.
    """
    if values["bf16"] is not None:
        return {}
    by_launch = environment.get(MIXED_PRECISION, "no")
    refused = by_launch == "fp16" and values.rank("fp16") > 0
    if by_launch in ("bf16", "fp16") and not values["fp16"] and not refused:
        taken = {name: (name == by_launch, BY_LAUNCH) for name in ("bf16", "fp16")}
        if by_launch == "bf16" and computes_on_cpu(values, environment):
            taken["use_cpu"] = (True, values.source("use_cpu"))
        return taken
    weights = values.get("dtype")
    if values["fp16"] or weights not in (None, "float32"):
        return {"bf16": (False, values.shown("fp16" if values["fp16"] else "dtype"))}
    if not computes_on_cpu(values, environment):
        return {"bf16": (False, NODE_UNKNOWN if values.get("dry_run") else "default")}
    why = fast_bf16()
    if why is None:
        return {"bf16": (False, "this CPU has neither AMX nor AVX512-BF16")}
    return {"bf16": (True, why), "use_cpu": (True, values.source("use_cpu"))}


def computes_on_cpu(values: SettingValues, environment: Mapping[str, str]) -> bool:
    """Whether the run is known to train on a CPU; a dry run on a login node does not know.

    Several processes do so only if they are told to (utils/launch/processes.py refuses them else).
    """
    import torch

    if any(str_to_bool(environment.get(name, "0")) for name in SHARDED):
        return False  # that needs GPUs, and is refused without
    if values["use_cpu"] or str_to_bool(environment.get("ACCELERATE_USE_CPU", "0")):
        return True
    if values.get("dry_run") or torch.accelerator.is_available():
        return False
    return int(environment.get("WORLD_SIZE", "1")) == 1


def fast_bf16() -> str | None:
    """Say by what this CPU multiplies bf16 several times as fast as float32; None: it does not."""
    import torch

    if has_amx():
        return AMX
    return AVX512_BF16 if torch.cpu._is_avx512_bf16_supported() else None


def has_amx() -> bool:
    """Whether this CPU multiplies bf16 matrices in tiles, and the system lets it."""
    import torch

    return bool(torch.cpu._is_amx_tile_supported())
