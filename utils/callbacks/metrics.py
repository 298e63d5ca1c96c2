"""The base of callbacks that add figures to each training log, and their reduction over ranks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override


class MetricCallback(TrainerCallback):
    """A callback with figures for every training log.

    The trainer's `log()` merges `metrics()` of each of them into a training log before any logger
    sees it; all ranks call it together, at the same step. The journal, on rank 0, then asks for
    `details()` and `report()`, which start no communication.
    """

    device: torch.device = torch.device("cpu")

    @override
    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Note the device that the ranks communicate on."""
        self.device = args.device

    def metrics(self) -> dict[str, float]:
        """Return the figures since the last call, units in their names; collective over ranks."""
        return {}

    def carried(self) -> dict[str, Any]:
        """Return JSON for the checkpoint, of what was not logged yet; collective over ranks."""
        return {}

    def details(self) -> dict[str, Any]:
        """Return JSON beside the figures of the last `metrics()`, for the journal alone."""
        return {}

    def report(self) -> str | None:
        """Return one line for people about the last `metrics()`; None when nothing is new."""
        return None


def gather_over_ranks(values: Sequence[float], device: torch.device) -> np.ndarray:
    """Return every rank's values, float64 (ranks, values); all ranks call it with equally many.

    One small all-gather on `device`, so that it works with NCCL and gloo alike; NaN marks a figure
    that a rank does not have. A rank alone asks no device.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return np.array([list(values)], dtype=np.float64)
    own = torch.tensor(list(values), dtype=torch.float64, device=device)
    rows = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(rows, own)
    return torch.stack(rows).cpu().numpy()
