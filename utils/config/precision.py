"""The choice of mixed precision if nobody set it, and the environment that libraries see.

If the settings leave bf16 open, the accelerate config decides. Without a config, bf16 is on if the
run trains on a CPU that multiplies bf16 fast, and off otherwise.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from utils.config.declarations import Given, SettingValues, is_true

FAST_BF16 = "this CPU computes bf16 fast"
BY_LAUNCH = "the accelerate config says so"
NODE_UNKNOWN = "bf16 where a CPU with AMX or AVX512-BF16 trains"  # a dry run may be elsewhere
# accelerate/utils/environment.py takes these variables of MPI launchers and srun for a launch.
MPI_VARIABLES = ("PMI_", "MPI_LOCAL", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_")
PRECISION_VARIABLE = "ACCELERATE_MIXED_PRECISION"
# torchrun's variables for a process. accelerate connects to the other processes if it sees them.
LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)


def settle_precision(values: SettingValues) -> None:
    """Choose `bf16` if it is open. Add a note if settings overrule the accelerate config.

    config.yaml stores the choice, so that a run that moves to another CPU computes the same. bf16
    on a CPU also sets `use_cpu`, which TrainingArguments demands.
    """
    by_launch = values.environment.get(PRECISION_VARIABLE, "no")
    if values["bf16"] is None:
        bf16, why = _open_precision(values, by_launch)
        values.given["bf16"] = Given(bf16, why)
        if why == BY_LAUNCH and not bf16:
            values.given["fp16"] = Given(True, why)
        if bf16 and _computes_on_cpu(values):
            values.given["use_cpu"] = Given(True, values.source("use_cpu"))
    elif (
        values["bf16"]
        and is_true("ACCELERATE_USE_CPU", values.environment)
        and _computes_on_cpu(values)
    ):
        values.given["use_cpu"] = Given(True, "ACCELERATE_USE_CPU")  # or Trainer refuses bf16
    if by_launch in ("bf16", "fp16") and not values[by_launch]:
        shown = values.shown("fp16" if values["fp16"] else "bf16")
        values.notes.append(
            f"mixed_precision {by_launch} of the accelerate config has no effect: {shown}"
        )


def _open_precision(values: SettingValues, by_launch: str) -> tuple[bool, str]:
    """Return the value for `bf16: null` in this launch, and the reason."""
    if values["fp16"]:
        return False, values.shown("fp16")
    if by_launch == "bf16" or (by_launch == "fp16" and not values.rank("fp16")):
        return by_launch == "bf16", BY_LAUNCH
    if values["dtype"] not in (None, "float32"):
        return False, values.shown("dtype")
    if not _computes_on_cpu(values):
        unknown = values["dry_run"] and not values["assume"]
        return False, NODE_UNKNOWN if unknown else "default"
    return has_fast_bf16(), FAST_BF16 if has_fast_bf16() else "default"


def _computes_on_cpu(values: SettingValues) -> bool:
    """Return True if the run is known to train on a CPU. On a login node this is not known."""
    import torch

    sharding = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"
    if any(is_true(name, values.environment) for name in sharding):
        return False  # sharding needs GPUs, and is refused without them
    if values.on_cpu:
        return True
    if values["dry_run"] or torch.accelerator.is_available():
        return False
    return values.world_size == 1


def has_fast_bf16() -> bool:
    """Return whether this CPU multiplies bf16 matrices several times as fast as float32 ones."""
    import torch

    return has_amx() or torch.cpu._is_avx512_bf16_supported()


def has_amx() -> bool:
    """Return whether this CPU has AMX, which multiplies tiles in bf16, and the system allows it."""
    import torch

    return bool(torch.cpu._is_amx_tile_supported())


@contextmanager
def launch_for_libraries(values: SettingValues) -> Iterator[None]:
    """Put the launch's variables into os.environ for TrainingArguments, and restore it afterwards.

    The precision of the accelerate config is left out, because it would overrule `bf16: false`. A
    dry run also leaves out the launcher's variables: with WORLD_SIZE=8 accelerate would wait for
    processes that do not exist.
    """
    hidden = {PRECISION_VARIABLE}
    if values["dry_run"]:
        hidden |= {*LAUNCHER_VARIABLES}
        hidden |= {name for name in values.environment if name.startswith(MPI_VARIABLES)}
    shown = {n: v for n, v in values.environment.items() if n not in hidden}
    different = {name for name, value in shown.items() if os.environ.get(name) != value}
    names = hidden | different
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    os.environ.update({name: shown[name] for name in different})
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)
