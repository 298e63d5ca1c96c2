"""The order of training: a pure function from seed and step to the sequences of each rank.

A sample is one draw of a sequence. Samples are numbered from 0 without end. With G sequences in a
global batch, step k trains on the samples [kG, (k + 1)G), on any number of ranks. There is no
state, so a run resumes at any step without iterating over earlier steps.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
from torch.utils.data import Sampler

# Rounds of `_feistel`. Small ranges need more rounds. With 24 rounds, a chi-squared test of 48,000
# draws finds all orders of 5 or 6 items equally likely; with 8, some are twice as frequent.
ROUNDS = 8
ROUNDS_BELOW_16_BITS = 24
GOLDEN = np.uint64(0x9E3779B97F4A7C15)

BLOCK = 1024  # samples per block; weighted sources are mixed inside a block
BLOCK_KEYS = -1  # `stream` of derive_keys for blocks; sources use the streams 0, 1, ...
EVAL_KEYS = -2  # `stream` of derive_keys for evaluations
CACHED_BLOCKS = 8

PADDING_SEQUENCE = -1
# Samples computed in one call, because a call for 1 sample takes as long as one for 500.
SAMPLES_AT_ONCE = 2048


def permute(positions: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Return the image of each position under a pseudo-random permutation of [0, size).

    positions: int64 (n,). keys: uint64 (n,); keys[i] selects the permutation for positions[i].

    An alternating Feistel network is a bijection on [0, 2^bits) for every round function. Applying
    the network again until the value is below `size` gives a bijection on [0, size). This takes
    fewer than two evaluations on average, because 2^bits < 2 size. (Black and Rogaway, "Ciphers
    with Arbitrary Finite Domains", 2002, method "cycle walking".)
    """
    bits = (size - 1).bit_length()
    values = _feistel(positions.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(values >= size)
    while outside.size:
        values[outside] = _feistel(values[outside], bits, keys[outside])
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def derive_keys(seed: int, stream: int, epochs: np.ndarray) -> np.ndarray:
    """Return for each epoch the uint64 key of its permutation, computed from seed and stream.

    stream: the index of a source, BLOCK_KEYS (permutations that mix the samples of a block), or
    EVAL_KEYS (the permutation that chooses the sequences of evaluations)
    """
    start = np.full(len(epochs), seed % (1 << 64), dtype=np.uint64)
    keyed = mix(mix(start) + np.asarray(stream).astype(np.uint64))
    return mix(keyed + epochs.astype(np.uint64))


def mix(values: np.ndarray) -> np.ndarray:
    """Return a uint64 hash of each value: splitmix64's output function (Steele et al., 2014)."""
    values = values + GOLDEN
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _feistel(values: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """Return the image of each value under a permutation of [0, 2^bits).

    Each round XORs one half of a value's bits with a keyed hash of the other half.
    """
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


class SampleOrder:
    """The endless shuffled stream of sequences from one or several sources.

    Without weights, all sequences of all sources form one list of N sequences. Sample s is item
    P(s mod N) of the list, and P is the permutation for (seed, epoch s div N).

    `weights` are relative shares of samples, one per source. Every 1024 samples form a block. The
    weights decide how many samples of a block each source gives (`samples_before`). A permutation
    mixes the block's samples. The k-th sample of a source with n sequences is sequence P(k mod n)
    of the source, and P is the permutation for (seed, source, epoch k div n).
    """

    def __init__(
        self,
        per_source: Sequence[int],
        seed: int,
        weights: Sequence[float] | None = None,
        shuffled: bool = True,
    ):
        """`per_source`: the number of sequences of each source. `shuffled`: False keeps order."""
        self.shuffled = shuffled
        self.per_source = np.array(per_source, dtype=np.int64)
        self.first_of_source = np.cumsum(self.per_source) - self.per_source
        self.total = int(self.per_source.sum())
        self.seed = seed
        # Fractions are exact: the shares do not drift in long runs.
        self.weights = None if weights is None else [Fraction(weight) for weight in weights]
        self._layout = lru_cache(CACHED_BLOCKS)(self._compute_layout)

    def sequences(self, samples: np.ndarray) -> np.ndarray:
        """Return the sequence number of each sample, int64 (samples,).

        Sequences are numbered from 0, over all sources in order.
        """
        if self.weights is None:
            return self._sequences_at(samples, self.total, source=0)
        blocks, indices = np.divmod(samples, BLOCK)
        wanted, which = np.unique(blocks, return_inverse=True)
        layouts = np.stack([self._layout(block) for block in wanted.tolist()])
        sources, ordinals = layouts[which, :, indices].T
        found = np.empty_like(samples)
        for source in np.unique(sources).tolist():
            own = sources == source
            found[own] = self._sequences_at(ordinals[own], int(self.per_source[source]), source)
        return found + self.first_of_source[sources]

    def shares(self) -> np.ndarray:
        """Return the share of samples from each source, float64 (sources,)."""
        if self.weights is None:
            return self.per_source / self.total
        return np.array([float(weight / sum(self.weights)) for weight in self.weights])

    def epochs_before(self, sample: int) -> list[float]:
        """Return for each source its number of epochs in the first `sample` samples, as floats."""
        if self.weights is None:
            return [sample / self.total] * len(self.per_source)
        block, inside = divmod(sample, BLOCK)
        drawn = np.bincount(self._layout(block)[0, :inside], minlength=len(self.per_source))
        return ((drawn + self.samples_before(block * BLOCK)) / self.per_source).tolist()

    def samples_before(self, sample: int) -> list[int]:
        """Return for each source its number of samples among the first `sample` samples.

        `sample` must be a multiple of the block size. Source 0 gives round(n w0 / (w0 + w1 + ...))
        of n samples, source 1 gives its share of the rest, and so on. As n grows by 1, each count
        grows by 0 or 1, so shares do not drift.
        """
        counts = []
        remaining, weight = sample, sum(self.weights or ())
        for own in (self.weights or ())[:-1]:
            counts.append(math.floor(remaining * own / weight + Fraction(1, 2)))
            remaining, weight = remaining - counts[-1], weight - own
        return [*counts, remaining]

    def _compute_layout(self, block: int) -> np.ndarray:
        """Return for each sample of a block its source, and its number among the source's samples.

        The result is int64 (2, 1024).
        """
        before = np.array(self.samples_before(block * BLOCK), dtype=np.int64)
        counts = np.array(self.samples_before((block + 1) * BLOCK), dtype=np.int64) - before
        keys = derive_keys(self.seed, BLOCK_KEYS, np.full(BLOCK, block))
        shuffled = permute(np.arange(BLOCK), BLOCK, keys)
        sources = np.repeat(np.arange(len(counts)), counts)[shuffled]
        # In a block, each source continues with its next samples, in order.
        by_source = np.argsort(sources, kind="stable")
        ordinals = np.empty(BLOCK, dtype=np.int64)
        ordinals[by_source] = np.arange(BLOCK) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.stack([sources, ordinals + before[sources]])

    def _sequences_at(self, ordinals: np.ndarray, count: int, source: int) -> np.ndarray:
        epochs, positions = np.divmod(ordinals, count)
        if not self.shuffled:
            return positions
        return permute(positions, count, derive_keys(self.seed, source, epochs))


class GlobalBatchSampler(Sampler[list[int]]):
    """A sampler of one rank's training micro-batches. A micro-batch is a list of sequence numbers.

    sizes: the size of the global batch, or {first step: size}, such as {0: 64, 2000: 128}
    start_step: the optimizer step with which the next iteration begins

    Steps are counted from 0. With W ranks and B sequences per micro-batch, micro-batch a of a step
    on rank r has the samples [aWB + rB, aWB + rB + B) of the global batch.
    """

    def __init__(
        self,
        order: SampleOrder,
        sizes: int | Mapping[int, int],
        micro_batch_size: int,
        rank: int,
        world_size: int,
        total_steps: int,
    ):
        self.order, self.sizes = order, {0: sizes} if isinstance(sizes, int) else dict(sizes)
        self.micro_batch_size = micro_batch_size
        self.rank, self.world_size = rank, world_size
        self.total_steps = total_steps
        self.start_step = 0

    def __len__(self) -> int:
        """Return this rank's number of micro-batches in the whole run, also after a resume."""
        at_once = self.micro_batch_size * self.world_size
        return self.samples_before(self.total_steps) // at_once

    def __iter__(self) -> Iterator[list[int]]:
        step = self.start_step
        while step < self.total_steps:
            size = self.size_at(step)
            indices = np.arange(size).reshape(-1, self.world_size, self.micro_batch_size)
            own = indices[:, self.rank].reshape(-1)
            at_once = max(1, SAMPLES_AT_ONCE // len(own))
            stop = min(step + at_once, self.total_steps, *(s for s in self.sizes if s > step))
            first = self.samples_before(step) + np.arange(stop - step) * size
            sequences = self.order.sequences((first[:, None] + own).reshape(-1))
            yield from sequences.reshape(-1, self.micro_batch_size).tolist()
            step = stop

    @property
    def grows(self) -> bool:
        """True if the size of the global batch grows during the run."""
        return len(self.sizes) > 1

    @property
    def accumulation_steps(self) -> int:
        """Trainer's accumulation steps. 1 if the batch grows: then training_step accumulates."""
        return 1 if self.grows else self.accumulation_at(0)

    def size_at(self, step: int) -> int:
        """Return the global batch size of a step, in sequences. Steps are counted from 0."""
        return next(size for first, size in reversed(self.sizes.items()) if first <= step)

    def accumulation_at(self, step: int) -> int:
        """Return the number of micro-batches per rank in a step. Steps are counted from 0."""
        return self.size_at(step) // (self.micro_batch_size * self.world_size)

    def samples_before(self, step: int) -> int:
        """Return the number of samples in the first `step` steps."""
        stops = [*list(self.sizes)[1:], step]
        phases = zip(self.sizes.items(), stops, strict=True)
        return sum(max(min(stop, step) - first, 0) * size for (first, size), stop in phases)

    @property
    def full_size_steps(self) -> float:
        """The steps that the run's samples would need at the last (largest) batch size."""
        return self.samples_before(self.total_steps) / max(self.sizes.values())

    def sequences_of_step(self, step: int) -> np.ndarray:
        """Return the sequence numbers of a step's global batch, int64. Steps are counted from 0."""
        first = self.samples_before(step)
        return self.order.sequences(np.arange(first, first + self.size_at(step)))

    def epoch_at(self, step: int) -> float:
        """Return the epochs in the first `step` steps: samples / number of all sequences."""
        return self.samples_before(step) / self.order.total


def steps_for(samples: float, sizes: Mapping[int, int]) -> int:
    """Return the least number of steps that train on `samples` samples.

    sizes: {first step: batch size}
    """
    first, size = 0, sizes[0]
    for stop, larger in list(sizes.items())[1:]:
        if samples <= (stop - first) * size:
            break
        samples -= (stop - first) * size
        first, size = stop, larger
    return first + math.ceil(samples / size)


def eval_batches(
    sequences: int, micro_batch_size: int, rank: int, world_size: int, at_most: int | None = None
) -> list[list[int]]:
    """Return the evaluation micro-batches of one rank, as lists of sequence numbers.

    Each sequence is in one micro-batch of one rank. Every rank gets the same number of
    micro-batches, because the ranks reduce after each micro-batch. -1 (PADDING_SEQUENCE) fills the
    last micro-batches.

    at_most: the number of sequences to choose. None means all sequences. The choice is random,
    because the first sequences have only long documents (packing sorts by length). It is the same
    for every seed and number of ranks.
    """
    numbers = np.arange(sequences)
    if at_most is not None and at_most < sequences:
        numbers = numbers[:at_most]
        keys = derive_keys(0, EVAL_KEYS, np.zeros(at_most, dtype=np.int64))
        numbers = np.sort(permute(numbers, sequences, keys))
    together = micro_batch_size * world_size
    filled = np.full(-(-len(numbers) // together) * together, PADDING_SEQUENCE)
    filled[: len(numbers)] = numbers
    return filled.reshape(-1, world_size, micro_batch_size)[:, rank].tolist()
