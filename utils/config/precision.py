"""Defaults of bf16 and activation_checkpointing, which depend on the machine.

config.yaml stores the chosen values. A resumed run keeps them on any machine, so that its
results stay the same.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from utils.config.declarations import SettingValue, SettingValues, is_true, shown
from utils.config.launch_settings import PRECISION_VARIABLE
from utils.config.recipes import load_file
from utils.config.strategy import assumed_gpus

BY_LAUNCH = "the accelerate config says so"
FAST_CPU = "this CPU computes bf16 fast"
FAST_GPU = "the default on GPUs from compute capability 8.0"
# Sources of choices that depend on the machine. A resumed run keeps its first choice instead.
BY_MACHINE = ("default", FAST_CPU, FAST_GPU)
RECOMPUTED = "activation_checkpointing"
CHOSEN = ("bf16", RECOMPUTED)


def settle_precision(values: SettingValues) -> None:
    """Choose `bf16` and `activation_checkpointing` if they are null; add log lines.

    If the settings overrule the precision of the accelerate config, a log line says so. For bf16 on
    a CPU, `use_cpu` becomes true, because TrainingArguments demands it.
    """
    by_launch = values.environment.get(PRECISION_VARIABLE, "no")
    settles_device = values["bf16"] is None or is_true("ACCELERATE_USE_CPU", values.environment)
    if values["bf16"] is None:
        choice = _default_bf16(values, by_launch)
        _choose(values, "bf16", choice)
        if choice == SettingValue(False, BY_LAUNCH):
            values.given["fp16"] = SettingValue(True, BY_LAUNCH)
    if values[RECOMPUTED] is None and not values.get("activation_offloading"):
        on_gpu = trains_on_fast_gpu(values)
        _choose(
            values,
            RECOMPUTED,
            SettingValue("auto", FAST_GPU) if on_gpu else SettingValue(None, "default"),
        )
    chosen = [name for name in CHOSEN if values.source(name) == FAST_GPU]
    if chosen:
        off = "off: " + ", ".join(
            f"--{name} {'false' if name == 'bf16' else 'none'}" for name in chosen
        )
        if not values["assume"] and gpu_capability() is None:
            off += "; this machine has no GPU, a dry run of training on its CPU has --use_cpu true"
        choices = ", ".join(f"{name} {shown(values[name])}" for name in chosen)
        values.notes.append(f"{choices}: {FAST_GPU} ({off})")
    if values["bf16"] and settles_device and _computes_on_cpu(values) and not values["use_cpu"]:
        values.given["use_cpu"] = SettingValue(True, "bf16 on a CPU")  # or Trainer refuses bf16
    if by_launch in ("bf16", "fp16") and not values[by_launch]:
        name = values.shown("fp16" if values["fp16"] else "bf16")
        written = f"mixed_precision {by_launch} of the accelerate config"
        values.notes.append(f"{written} has no effect: {name}")


def _choose(values: SettingValues, name: str, choice: SettingValue) -> None:
    """Set the setting `name` to `choice`.

    Exception: a resumed run keeps its value if the choice depends on the machine (BY_MACHINE).
    """
    before = settings_of_run(values)
    old = before.get(name) if name == RECOMPUTED else bool(before.get(name))
    if before and choice.source in BY_MACHINE and old != choice.value:
        values.given[name] = SettingValue(old, "as this run began")
        values.notes.append(f"{values.shown(name)}; a new run here has {shown(choice.value)}")
    else:
        values.given[name] = choice


def settings_of_run(values: SettingValues) -> dict[str, Any]:
    """Return {name: value} of the settings that a resumed run recorded, or {} for a new run."""
    places = [Path(str(values["output_dir"]))]
    named = values["resume_from_checkpoint"]
    if isinstance(named, str):
        places += [Path(named), Path(named, "run"), Path(named).parent]
    for place in places:
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            text = (place / "provenance.json").read_text(encoding="utf-8")
            starts = json.loads(text)["starts"]
            entries = load_file(place / "config.yaml").items()
            settings = {name: value for name, (value, _) in entries if starts}
            for start in starts:
                settings |= start.get("changed") or {}
            return settings
    return {}


def _default_bf16(values: SettingValues, by_launch: str) -> SettingValue:
    """Return the value of `bf16` if the user did not set it. The result's source is the reason.

    by_launch: mixed_precision of the accelerate config, "no", "bf16" or "fp16"
    """
    if values["fp16"]:
        return SettingValue(False, values.shown("fp16"))
    if by_launch == "bf16" or (by_launch == "fp16" and not values.rank("fp16")):
        return SettingValue(by_launch == "bf16", BY_LAUNCH)
    with suppress(OSError, ValueError, LookupError, TypeError):  # no file, or without this key
        file = Path(values.environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"])
        written = json.loads(file.read_text(encoding="utf-8"))["bf16"]["enabled"]
        if isinstance(written, bool):  # else "auto"
            return SettingValue(written, "the DeepSpeed file says so")
    on_gpu = trains_on_fast_gpu(values)
    # PEFT keeps adapters in float32. Without mixed precision they would multiply in float32.
    adapters = on_gpu and values["use_peft"] and values["dtype"] in ("auto", "bfloat16")
    if values["dtype"] not in (None, "float32") and not adapters:
        return SettingValue(False, values.shown("dtype"))
    if on_gpu or (_computes_on_cpu(values) and has_fast_bf16()):
        return SettingValue(True, FAST_GPU if on_gpu else FAST_CPU)
    return SettingValue(False, "default")


def trains_on_fast_gpu(values: SettingValues) -> bool:
    """Return whether the run trains on GPUs with fast bf16.

    In a dry run on a machine without a GPU, assume such GPUs unless the settings choose the CPU.
    """
    if values["assume"]:
        with suppress(ValueError):  # check_strategy reports it
            return assumed_gpus(values["assume"]).bf16
        return False
    if _computes_on_cpu(values):
        return False
    if (capability := gpu_capability()) is not None:
        return capability >= (8, 0)
    return bool(values["dry_run"]) and not torch.accelerator.is_available()


def gpu_capability() -> tuple[int, int] | None:
    """Return the lowest compute capability of the visible GPUs, as (8, 0); None without a GPU."""
    if not torch.cuda.is_available():
        return None
    return min(map(torch.cuda.get_device_capability, range(torch.cuda.device_count())))


def _computes_on_cpu(values: SettingValues) -> bool:
    """Return whether the run trains on a CPU. In a dry run without a GPU, the settings decide."""
    sharding = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"
    if any(is_true(name, values.environment) for name in sharding):
        return False  # sharding needs GPUs, and is refused without them
    if values.on_cpu:
        return True
    if torch.accelerator.is_available():
        return False
    if values["dry_run"]:
        return bool(values["strategy"] == "cpu")
    return values.world_size == 1


def has_fast_bf16() -> bool:
    """Return whether this CPU multiplies bf16 matrices several times as fast as float32 ones."""
    return has_amx() or torch.cpu._is_avx512_bf16_supported()


def has_amx() -> bool:
    """Return whether this CPU has AMX (bf16 matrix instructions) and the system enables them."""
    return bool(torch.cpu._is_amx_tile_supported())
