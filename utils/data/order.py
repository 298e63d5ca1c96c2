"""Shuffle without a list of indices: a keyed permutation evaluated at single positions.

An alternating Feistel network is a bijection on [0, 2^bits) whatever its round function; walking
along its cycles until the value is below n restricts it to a bijection on [0, n). Since
2^bits < 2n, fewer than two evaluations are needed on average. State: a key. (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", 2002, method "cycle walking".)
"""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np
from torch.utils.data import Sampler

from utils.config.errors import ConfigurationError

# Small domains mix slowly: with 24 rounds all orders of 5 or 6 rows are equally likely as far as a
# chi-squared test of 48,000 draws can tell, with 8 some come twice as often as others.
ROUNDS = 8
ROUNDS_BELOW_16_BITS = 24
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def permute(positions: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Return where each position in [0, size) goes under the permutation of its key.

    positions: int64 (n,); keys: uint64 (n,), positions of one key share one permutation.
    """
    assert positions.max(initial=0) < size, "a walk from outside may never come inside"
    bits = (size - 1).bit_length()
    values = _feistel(positions.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(values >= size)
    while outside.size:
        values[outside] = _feistel(values[outside], bits, keys[outside])
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def derive_keys(seed: int, stream: int | np.ndarray, epochs: np.ndarray) -> np.ndarray:
    """Return a key (uint64) for each (seed, stream, epoch); `stream` and `epochs` int64."""
    start = np.full(len(epochs), seed % (1 << 64), dtype=np.uint64)
    keyed = mix(mix(start) + np.asarray(stream).astype(np.uint64))
    return mix(keyed + epochs.astype(np.uint64))


def mix(values: np.ndarray) -> np.ndarray:
    """Return the splitmix64 output function of each uint64 (Steele, Lea, Flood, 2014)."""
    values = values + GOLDEN
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _feistel(values: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """Permute [0, 2^bits): each round changes one half by a keyed hash of the other."""
    low_bits = np.uint64(bits - bits // 2)
    low_mask = np.uint64((1 << int(low_bits)) - 1)
    high_mask = np.uint64((1 << (bits // 2)) - 1)
    high, low = values >> low_bits, values & low_mask
    for _ in range((ROUNDS_BELOW_16_BITS if bits < 16 else ROUNDS) // 2):
        keys = mix(keys)
        high = high ^ (mix(keys ^ low) & high_mask)
        keys = mix(keys)
        low = low ^ (mix(keys ^ high) & low_mask)
    return (high << low_bits) | low


# Which source gives the n-th sample when training datasets are weighted.

BLOCK = 1024
# Key streams of sources count up from 0; the mixing of blocks has its own.
KEY_STREAM = -1
KEPT_BLOCKS = 8


class Interleaving:
    """The source of every sample of an endless stream, by `weights` (relative shares) and seed."""

    def __init__(self, weights: Sequence[float], seed: int):
        wrong = [weight for weight in weights if not (math.isfinite(weight) and weight > 0)]
        if wrong:
            raise ConfigurationError(
                f"weight {wrong[0]} of a training dataset: weights are positive numbers; leave a "
                "dataset out to give it no weight."
            )
        self.weights = [Fraction(weight) for weight in weights]  # exact: no drift in long runs
        self.seed = seed
        self._layouts: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def samples_before(self, sample: int) -> list[int]:
        """Return how many of the first `sample` samples each source gives."""
        counts = []
        remaining, weight = sample, sum(self.weights)
        for own in self.weights[:-1]:
            counts.append(math.floor(remaining * own / weight + Fraction(1, 2)))
            remaining, weight = remaining - counts[-1], weight - own
        return [*counts, remaining]

    def samples_drawn(self, sample: int) -> list[int]:
        """Return how many of the first `sample` samples each source has given, mixed as they are.

        Differs from `samples_before` inside a block alone.
        """
        block, place = divmod(sample, BLOCK)
        sources, _ = self._layout(block)
        inside = np.bincount(sources[:place], minlength=len(self.weights)).tolist()
        whole = self.samples_before(block * BLOCK)
        return [before + own for before, own in zip(whole, inside, strict=True)]

    def shares(self) -> list[float]:
        """Return the share of the samples that each source gives in the long run."""
        total = sum(self.weights)
        return [float(weight / total) for weight in self.weights]

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return of each sample its source, and how many samples of that source come before it."""
        sources, ordinals = np.empty_like(samples), np.empty_like(samples)
        blocks, places = np.divmod(samples, BLOCK)
        for block in np.unique(blocks).tolist():
            inside = blocks == block
            block_sources, block_ordinals = self._layout(block)
            sources[inside] = block_sources[places[inside]]
            ordinals[inside] = block_ordinals[places[inside]]
        return sources, ordinals

    def _layout(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return `locate` of all samples of a block; the last few blocks are kept."""
        if block not in self._layouts:
            if len(self._layouts) >= KEPT_BLOCKS:
                self._layouts.clear()
            self._layouts[block] = self._laid_out(block)
        return self._layouts[block]

    def _laid_out(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        before = np.array(self.samples_before(block * BLOCK), dtype=np.int64)
        counts = np.array(self.samples_before((block + 1) * BLOCK), dtype=np.int64) - before
        keys = derive_keys(self.seed, KEY_STREAM, np.full(BLOCK, block))
        shuffled = permute(np.arange(BLOCK), BLOCK, keys)
        sources = np.repeat(np.arange(len(counts)), counts)[shuffled]
        # A source's places in the block take its next samples in the order of the places.
        by_source = np.argsort(sources, kind="stable")
        ordinals = np.empty(BLOCK, dtype=np.int64)
        ordinals[by_source] = np.arange(BLOCK) - np.repeat(np.cumsum(counts) - counts, counts)
        return sources, ordinals + before[sources]


# Which rows each step and rank trains on: a pure function of the seed and the step.

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
