"""Says what compiling costs, and that nothing is compiled again once all shapes were met."""

import logging
import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from utils.kernels.compilation import compiled_graphs

logger = logging.getLogger(__name__)


class CompilationWatch(TrainerCallback):
    """Rank 0 says how long the first step took, and each rank warns of a later compilation.

    Evaluations have shapes of their own, and their first one compiles too.
    """

    def __init__(self) -> None:
        self.graphs: int | None = None  # None: the first step of this start is not done
        self.graphs_before = 0
        self.began_at = 0.0

    @override
    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note when the first step begins, and what was compiled before it."""
        if self.graphs is None:
            self.began_at = time.perf_counter()
            self.graphs_before = compiled_graphs()

    @override
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compare with the graphs that there were before this step."""
        graphs = compiled_graphs()
        if self.graphs is None:
            seconds = time.perf_counter() - self.began_at
            made = graphs - self.graphs_before
            logger.info("compile: %d graphs; the first step took %.1f s", made, seconds)
        elif graphs > self.graphs:
            logger.warning(
                "step %d compiled %d graphs more, though its shapes are those of the steps before: "
                "TORCH_LOGS=recompiles says why, and with --compile false nothing waits for it",
                state.global_step,
                graphs - self.graphs,
            )
        self.graphs = graphs

    @override
    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the graphs of the evaluation for known."""
        if self.graphs is not None:
            self.graphs = compiled_graphs()
