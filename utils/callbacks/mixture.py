"""Logs what each of several training datasets has given to the run so far."""

import logging
from collections.abc import Sequence
from pathlib import Path
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

    NAME is made of the dataset's path, see `source_names`. Silent with one dataset. The weights of
    `train_data` are shares of the sequences: those of tokens differ as far as the sources fill
    their sequences differently, which is said at the start.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.tokens = np.zeros(0, dtype=np.int64)
        self.step = self.counted_step = 0

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the counts over from an earlier start's log history; say what was asked for."""
        self.loader: TrainLoader = kwargs["train_dataloader"]
        self.names = source_names([dataset.path for dataset in self.loader.dataset.datasets])
        self.tokens = np.zeros(len(self.names), dtype=np.int64)
        self.step, self.counted_step = state.global_step, 0
        if not self._is_mixture:
            return
        keys = [f"tokens_seen/{name}" for name in self.names]
        for line in state.log_history:
            if keys[0] in line and line["step"] <= state.global_step:
                self.counted_step = int(line["step"])
                self.tokens = np.array([line[key] for key in keys], dtype=np.int64)
        self._count()
        logger.info("mixture: %s", self._asked())

    @property
    def _is_mixture(self) -> bool:
        return len(self.names) > 1

    @override
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note the step."""
        self.step = state.global_step

    def _count(self) -> None:
        """Add the tokens of the steps done since the last count."""
        for step in range(self.counted_step, self.step):
            self.tokens += self.loader.tokens_by_source(step)
        self.counted_step = self.step

    def metrics(self) -> dict[str, float]:
        """Return the figures of all sources; every rank counts the global batches itself."""
        if not self._is_mixture:
            return {}
        self._count()
        figures: dict[str, float] = {}
        shares = self.tokens / max(int(self.tokens.sum()), 1)
        sampler = self.loader.batch_sampler
        epochs = sampler.order.epochs_before(self.step * sampler.global_batch_size)
        for name, tokens, share, epoch in zip(self.names, self.tokens, shares, epochs, strict=True):
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
            for name, own, of_tokens in zip(self.names, sequences, tokens, strict=True)
        )


def source_names(paths: Sequence[Path]) -> list[str]:
    """Name datasets by the shortest ends of their paths that differ, less what all end with.

    >>> source_names([Path("/data/web/train"), Path("/data/code/train")])
    ['web', 'code']
    >>> source_names([Path("/a/web"), Path("/b/web"), Path("/b/code")])
    ['a/web', 'b/web', 'b/code']
    """
    parts = [path.parts for path in paths]
    length = 1
    while len({part[-length:] for part in parts}) < len(set(parts)):
        length += 1
    ends = [part[-length:] for part in parts]
    while len({end[-1:] for end in ends}) == 1 and min(map(len, ends)) > 1:
        ends = [end[:-1] for end in ends]
    return ["/".join(end) for end in ends]
