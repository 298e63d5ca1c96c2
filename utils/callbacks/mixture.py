"""Logs what each of several training datasets has given to the run so far."""

import logging
from typing import Any

import numpy as np
from transformers import TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from utils.callbacks.metrics import MetricCallback
from utils.data.loader import TrainLoader

logger = logging.getLogger(__name__)


class MixtureShares(MetricCallback):
    """The sources of a mixture, in figures that count from step 0 over all starts of the run.

    tokens_seen/NAME   real tokens of the source, padding excluded
    tokens_share/NAME  its share of all of them
    epochs/NAME        how often its rows were gone through; a source that runs out is repeated

    NAME is the short one of utils/data/consumed.py. Silent with one dataset. The weights of
    `train_data` are shares of the sequences: those of tokens differ as far as the sources fill
    their sequences differently, which is said at the start.
    """

    def __init__(self) -> None:
        self.step = 0

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the loader over; say what was asked for."""
        self.loader: TrainLoader = kwargs["train_dataloader"]
        self.step = state.global_step
        if self._is_mixture:
            logger.info("mixture: %s", self._asked())

    @property
    def _is_mixture(self) -> bool:
        return len(self.loader.consumed.names) > 1

    @override
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note the step."""
        self.step = state.global_step

    def metrics(self) -> dict[str, float]:
        """Return the figures of all sources; every rank counts the global batches itself."""
        if not self._is_mixture:
            return {}
        consumed = self.loader.consumed
        consumed.count(self.step)
        counts = consumed.by_source
        figures: dict[str, float] = {}
        shares = counts / max(int(counts.sum()), 1)
        sampler = self.loader.batch_sampler
        epochs = sampler.order.epochs_before(self.step * sampler.global_batch_size)
        for name, tokens, share, epoch in zip(consumed.names, counts, shares, epochs, strict=True):
            figures[f"tokens_seen/{name}"] = int(tokens)
            figures[f"tokens_share/{name}"] = float(share)
            figures[f"epochs/{name}"] = epoch
        return figures

    def _asked(self) -> str:
        dataset, order = self.loader.dataset, self.loader.batch_sampler.order
        sequences = order.shares()
        per_row = np.array([plan.tokens / plan.rows for plan in dataset.plans])
        tokens = sequences * per_row / (sequences * per_row).sum()
        return ", ".join(
            f"{name} {own:.1%} of the sequences (of the tokens {of_tokens:.1%})"
            for name, own, of_tokens in zip(
                self.loader.consumed.names, sequences, tokens, strict=True
            )
        )
