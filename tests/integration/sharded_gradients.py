"""A callback with which a test sees that no rank holds the gradients of all weights."""

from typing import Any

from transformers import TrainerCallback


class GradientsAreSharded(TrainerCallback):
    """Fail unless each micro-batch leaves gradients at the sharded weights, before a step's end."""

    def on_substep_end(self, *_: Any, **kwargs: Any) -> None:
        weights = kwargs["model"].named_parameters()
        held_whole = [name for name, weight in weights if weight.grad is None]
        assert not held_whole, held_whole
        print("gradients are sharded")
