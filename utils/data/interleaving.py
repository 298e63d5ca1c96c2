"""Which source gives the n-th sample when training datasets are weighted.

The stream is made of blocks of BLOCK samples. `samples_before(n)` says how many of the first n
samples come from each source: of source 0 round(n w0 / (w0 + w1 + ...)), of source 1 its part of
the rest, and so on. Each count grows by 0 or 1 with n, so block b, which holds
samples_before((b + 1) BLOCK) - samples_before(b BLOCK) of each source, never needs a negative
number, and shares are exact in the long run. Inside a block a keyed permutation mixes the sources.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from utils.config.errors import ConfigurationError
from utils.data.permutation import derive_keys, permute

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
