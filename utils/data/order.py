"""Which rows each step and rank trains on: a pure function of the seed and the step.

Samples are numbered 0, 1, 2, ... without end; a global batch is a run of consecutive samples.
Nothing is stored or advanced, so a run resumes at any step at once and sees the same samples in
the same global batches for every world size.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler

from utils.config.errors import ConfigurationError
from utils.data.interleaving import Interleaving
from utils.data.permutation import derive_keys, permute

PADDING_ROW = -1
# Rows are located for several steps together: a call costs as much for 1 sample as for 500.
SAMPLES_AT_ONCE = 2048


class SampleOrder:
    """The endless shuffled stream of rows from one or several sources.

    Without weights all rows of all sources form one list of N rows: sample s is the row at place
    P(s mod N) of it, P the keyed permutation of (seed, epoch s div N). With weights (relative
    shares of samples, one per source) `Interleaving` says which source gives sample s; the k-th
    sample of a source with n rows is its row P(k mod n), P of (seed, source, epoch k div n).
    """

    def __init__(
        self, rows_per_source: Sequence[int], seed: int, weights: Sequence[float] | None = None
    ):
        assert len(rows_per_source), "no sources"
        assert min(rows_per_source) > 0, "a source without rows"
        if weights is not None and len(weights) != len(rows_per_source):
            raise ConfigurationError(
                f"{len(weights)} weights for {len(rows_per_source)} training datasets; give one "
                "to each or to none."
            )
        self.rows_per_source = np.array(rows_per_source, dtype=np.int64)
        self.first_rows = np.cumsum(self.rows_per_source) - self.rows_per_source
        self.total_rows = int(self.rows_per_source.sum())
        self.seed = seed
        self.interleaving = None if weights is None else Interleaving(weights, seed)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (source, row) of each sample, int64 arrays of the shape (samples,)."""
        if self.interleaving is None:
            rows = self._shuffled(samples, self.total_rows, source=0)
            sources = np.searchsorted(self.first_rows, rows, side="right") - 1
            return sources, rows - self.first_rows[sources]
        sources, ordinals = self.interleaving.locate(samples)
        rows = np.empty_like(samples)
        for source in np.unique(sources).tolist():
            own = sources == source
            rows[own] = self._shuffled(ordinals[own], int(self.rows_per_source[source]), source)
        return sources, rows

    def global_rows(self, samples: np.ndarray) -> np.ndarray:
        """Return each sample's row counted through all sources one after the other (int64)."""
        sources, rows = self.locate(samples)
        return rows + self.first_rows[sources]

    def shares(self) -> np.ndarray:
        """Return the share of the samples that each source gives, float64 (sources,)."""
        if self.interleaving is None:
            return self.rows_per_source / self.total_rows
        return np.array(self.interleaving.shares())

    def epochs_before(self, sample: int) -> list[float]:
        """Return how often each source's rows were gone through in the first `sample` samples.

        Without weights they are gone through together.
        """
        if self.interleaving is None:
            return [sample / self.total_rows] * len(self.rows_per_source)
        drawn = self.interleaving.samples_drawn(sample)
        return (np.array(drawn) / self.rows_per_source).tolist()

    def _shuffled(self, ordinals: np.ndarray, rows: int, source: int) -> np.ndarray:
        epochs, places = np.divmod(ordinals, rows)
        return permute(places, rows, derive_keys(self.seed, source, epochs))


class GlobalBatchSampler(Sampler[list[int]]):
    """The training micro-batches of one rank, as lists of global row numbers.

    Global batch k (of G rows) is samples [kG, (k + 1)G) for every world size W. In it, micro-step
    a of rank r takes the B samples from a(WB) + rB on.
    """

    def __init__(
        self,
        order: SampleOrder,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        total_steps: int,
    ):
        assert 0 <= rank < world_size
        assert global_batch_size % (micro_batch_size * world_size) == 0, "checked with the settings"
        self.order = order
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.total_steps = total_steps
        self.accumulation_steps = global_batch_size // (micro_batch_size * world_size)
        self.start_step = 0
        places = np.arange(global_batch_size).reshape(-1, world_size, micro_batch_size)
        self._own_places = places[:, rank].reshape(-1)

    def __len__(self) -> int:
        """Count the micro-batches of the whole run, wherever iteration starts."""
        return self.total_steps * self.accumulation_steps

    def __iter__(self) -> Iterator[list[int]]:
        at_once = max(1, SAMPLES_AT_ONCE // len(self._own_places))
        for first in range(self.start_step, self.total_steps, at_once):
            steps = np.arange(first, min(first + at_once, self.total_steps))
            samples = steps[:, None] * self.global_batch_size + self._own_places
            rows = self.order.global_rows(samples.reshape(-1))
            yield from rows.reshape(-1, self.micro_batch_size).tolist()

    def resume_at(self, step: int) -> None:
        """Let the next iteration start with the first micro-batch of optimizer step `step`."""
        assert 0 <= step <= self.total_steps
        self.start_step = step

    def rows_of_step(self, step: int) -> np.ndarray:
        """Return the global rows of the whole global batch of a step, over all ranks (int64)."""
        first = step * self.global_batch_size
        return self.order.global_rows(np.arange(first, first + self.global_batch_size))

    def epoch_at(self, step: int) -> float:
        """Return the samples drawn before step `step`, counted in numbers of all rows."""
        return step * self.global_batch_size / self.order.total_rows


class EvalBatchSampler(Sampler[list[int]]):
    """The evaluation micro-batches of one rank: every row once, in order, over all ranks.

    All ranks get equally many micro-batches, since they reduce together; places beyond the last
    row hold PADDING_ROW.
    """

    def __init__(self, rows: int, micro_batch_size: int, rank: int, world_size: int):
        assert 0 <= rank < world_size
        self.rows = rows
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        return -(-self.rows // (self.micro_batch_size * self.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        for index in range(len(self)):
            first = (index * self.world_size + self.rank) * self.micro_batch_size
            rows = np.arange(first, first + self.micro_batch_size)
            yield np.where(rows < self.rows, rows, PADDING_ROW).tolist()
