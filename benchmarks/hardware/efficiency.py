"""The efficiency of a baseline: model FLOPs, their share of the peak and of the roofline."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cells.kinds import TrainingCell
from benchmarks.hardware.device import data_sheet_peak
from benchmarks.hardware.flops import effective_length, model_size
from benchmarks.hardware.roofline import Peaks, StepWork, tokens_per_second
from benchmarks.recording.job import Outcome
from benchmarks.recording.precision import PRECISIONS
from benchmarks.workloads.workload import SEED, document_lengths


@dataclass(frozen=True)
class Device:
    """A device: its name, the FLOP/s of its data sheet, and its probed peaks."""

    name: str | None = None
    data_sheet: float | None = None
    probed: Peaks | None = None


def known_device(hardware: dict[str, Any], probes: Path) -> Device:
    """Put together what nvidia-smi said and what the probes of just this device reached."""
    name = hardware.get("gpu")
    peaks = None
    if name and probes.exists():
        result = json.loads(probes.read_text())
        if result["hardware"].get("gpu") == name:
            found = result["probes"]
            peaks = Peaks(
                found["matmul"]["flops_per_second"], found["bandwidth"]["bytes_per_second"]
            )
    return Device(name, data_sheet_peak(name), peaks)


def efficiency(cell: TrainingCell, outcomes: Sequence[Outcome], device: Device) -> dict[str, Any]:
    """Return the medians over the repeats; None for what this device's probes have to say first.

    MFU is that of bf16, in the full-attention convention of flops.py and, as `causal`, with half
    of attention.
    """
    size = model_size(cell.workload.model, cell.lora_rank)
    lengths = document_lengths(cell.workload, np.random.default_rng(SEED)).tolist()
    seen = effective_length(lengths)
    timed = cell.steps - cell.warmup_steps
    speed = statistics.median(one.tokens_per_second for one in outcomes)
    step_s = np.concatenate([one.step_s[cell.warmup_steps - 1 :] for one in outcomes])
    tokens = round(statistics.median(one.window_tokens for one in outcomes) / timed)
    flops = size.flops(seen)
    causal_flops = flops - size.attention_flops(seen) / 2
    bound: dict[str, float] = {}
    if device.probed:
        work = StepWork(tokens, seen, PRECISIONS[cell.precision].trained_bytes)
        bound = tokens_per_second(size, work, device.probed)
    return {
        "loss_tokens_per_second": statistics.median(
            one.window_loss_tokens / one.window_s for one in outcomes
        ),
        "step_median_s": float(np.median(step_s)),
        "step_p99_s": float(np.percentile(step_s, 99)),
        "effective_length": seen,
        "model_flops_per_token": flops,
        "mfu": _share(speed * flops, device.data_sheet),
        "causal_mfu": _share(speed * causal_flops, device.data_sheet),
        "mfu_of_probed_peak": _share(
            speed * flops, device.probed.matmul if device.probed else None
        ),
        "roofline_tokens_per_second": bound,
        "roofline_share": _share(speed, max(bound.values(), default=None)),
    }


def _share(value: float, whole: float | None) -> float | None:
    return round(value / whole, 4) if whole else None
