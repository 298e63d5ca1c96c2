"""Facts and state of the GPU from nvidia-smi, which takes no memory on the device."""

import contextlib
import shutil
import subprocess
from typing import Any

FACTS = ("name", "memory.total", "driver_version", "clocks.max.sm", "power.limit")
STATE = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
# Renamed in driver 535; a bit mask of why clocks are lower than they could be.
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
# Set when nothing runs, or the user set the clocks: no sign of a slow run.
HARMLESS = 0x1 | 0x2
# TFLOP/s of dense bf16 products: NVIDIA's data sheets of the SXM cards, without their sparsity.
DENSE_BF16 = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12}


def gpu_facts() -> dict[str, Any]:
    """Return name, memory in MiB, driver, highest clock in MHz and power limit in W, or {}."""
    return _query(FACTS)


def gpu_state() -> dict[str, Any]:
    """Return clocks in MHz, power in W, temperature in C and why clocks are low, or {}."""
    state = _query(STATE)
    for name in REASONS if state else ():
        if found := _query((name,)):
            reasons = int(str(found[name]), 16)
            return state | {"throttled": bool(reasons & ~HARMLESS), "reasons": hex(reasons)}
    return state


def data_sheet_peak(gpu: str | None) -> float | None:
    """Return the dense bf16 FLOP/s of a GPU's data sheet; None for one that is not known here."""
    return DENSE_BF16.get(gpu or "")


def _query(names: tuple[str, ...]) -> dict[str, Any]:
    if shutil.which("nvidia-smi") is None:
        return {}
    done = subprocess.run(
        [
            "nvidia-smi",
            f"--query-gpu={','.join(names)}",
            "--format=csv,noheader,nounits",
            "-i",
            "0",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    values = [value.strip() for value in done.stdout.strip().split(",")]
    if done.returncode != 0 or len(values) != len(names):
        return {}
    return dict(zip(names, map(_number, values), strict=True))


def _number(text: str) -> float | str:
    with contextlib.suppress(ValueError):
        return float(text)
    return text


def device() -> str:
    """Return where torch computes: the GPU if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
