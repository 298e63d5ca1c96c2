"""The mean loss of a run's steps, over all of its starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class RunLoss:
    """Adds up what training logs say; Trainer's own sum begins anew with every start."""

    total: float = 0.0
    steps: int = 0
    through: int = 0  # the last step that is counted

    @classmethod
    def carried(cls, values: Mapping[str, Any], logged: int) -> "RunLoss":
        """Return what a checkpoint carries; of one that carries none, one that begins there.

        logged: the last step that a log counted.
        """
        return cls(**values.get("run_loss", {"through": logged}))

    def count(self, step: int, mean: float) -> None:
        """Count the steps since the last call up to `step`, with their mean loss."""
        steps = step - self.through
        self.total += mean * steps
        self.steps += steps
        self.through = step

    def mean(self) -> float | None:
        """Return the mean over all steps counted; None if there is none."""
        return self.total / self.steps if self.steps else None
