"""What the launch decides of a run: mixed precision that nobody set, what libraries may see of it.

bf16 that the settings leave open is the accelerate config's; else it is on where a CPU multiplies
it fast, and off elsewhere.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from utils.config.declarations import Given, SettingValues

AMX, AVX512_BF16 = "this CPU has AMX", "this CPU has AVX512-BF16"
FAST_BF16 = (AMX, AVX512_BF16)
BY_LAUNCH = "the accelerate config says so"
NODE_UNKNOWN = "bf16 where a CPU with AMX or AVX512-BF16 trains"  # a dry run may be elsewhere
MIXED_PRECISION = "ACCELERATE_MIXED_PRECISION"
# What torchrun tells a process of the others; accelerate connects to them as soon as it sees it.
LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)


def with_precision(values: SettingValues) -> SettingValues:
    """Return the values with `bf16` settled, and a note where they overrule the accelerate config.

    config.yaml keeps the answer, so that a run keeps its numbers: on another CPU it is another run,
    which is refused. That file is a recipe too, and bf16 on a CPU has to be asked for: `use_cpu`
    goes with it.
    """
    by_launch = os.environ.get(MIXED_PRECISION, "no")
    if values["bf16"] is None:
        values = values.replaced(_open_precision(values, by_launch))
    if by_launch == "no" or values["fp16" if by_launch == "fp16" else "bf16"]:
        return values
    shown = values.shown("fp16" if values["fp16"] else "bf16")
    return values.replaced(
        {}, [f"mixed_precision {by_launch} of the accelerate config has no effect: {shown}"]
    )


def _open_precision(values: SettingValues, by_launch: str) -> dict[str, Given]:
    on_cpu = {"use_cpu": Given(True, values.source("use_cpu"))} if _computes_on_cpu(values) else {}
    fp16_is_refused = by_launch == "fp16" and values.rank("fp16") > 0
    if by_launch in ("bf16", "fp16") and not values["fp16"] and not fp16_is_refused:
        taken = {name: Given(name == by_launch, BY_LAUNCH) for name in ("bf16", "fp16")}
        return taken | (on_cpu if by_launch == "bf16" else {})
    for name in ("fp16", "dtype"):
        if values[name] not in (None, False, "float32"):
            return {"bf16": Given(False, values.shown(name))}
    if not on_cpu:
        return {"bf16": Given(False, NODE_UNKNOWN if values["dry_run"] else "default")}
    why = fast_bf16()
    if why is None:
        return {"bf16": Given(False, "this CPU has neither AMX nor AVX512-BF16")}
    return {"bf16": Given(True, why), **on_cpu}


def _computes_on_cpu(values: SettingValues) -> bool:
    """Whether the run is known to train on a CPU; a dry run on a login node does not know.

    Several processes do so only if they are told to (utils/launch/processes.py refuses them else).
    """
    import torch

    if _is_true("ACCELERATE_USE_FSDP") or _is_true("ACCELERATE_USE_DEEPSPEED"):
        return False  # that needs GPUs, and is refused without
    if values["use_cpu"] or _is_true("ACCELERATE_USE_CPU"):
        return True
    if values["dry_run"] or torch.accelerator.is_available():
        return False
    return int(os.environ.get("WORLD_SIZE", "1")) == 1


def _is_true(variable: str) -> bool:
    from accelerate.utils.environment import str_to_bool

    return bool(str_to_bool(os.environ.get(variable, "0")))


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


@contextmanager
def without_launch(is_dry_run: bool) -> Iterator[None]:
    """Hide from TrainingArguments the accelerate config's precision; in a dry run the launch too.

    They would take that precision wherever neither bf16 nor fp16 is true, although `bf16: false`
    was given; and a dry run with WORLD_SIZE=8 stands for processes of which none is there.
    """
    names = (MIXED_PRECISION, *(LAUNCHER_VARIABLES if is_dry_run else ()))
    hidden = {name: os.environ.pop(name, None) for name in names}
    try:
        yield
    finally:
        for name, value in hidden.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
