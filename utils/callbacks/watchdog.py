"""Ends a run in which nothing moves any more, and says which rank stands where."""

from transformers import TrainerCallback


class HangWatch(TrainerCallback):
    """Ends the process with exit code 76 when no step ended for ``timeout_s`` (0: never)."""

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
