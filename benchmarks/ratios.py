"""Medians and ratios of interleaved repeats, with the interval that they leave open."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 10_000


class Ratio(NamedTuple):
    """How often faster: the median over the repeats and a 95 % interval (bootstrap)."""

    median: float
    low: float
    high: float


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return ours / theirs from repeats that ran side by side, pair by pair.

    What slows the machine for a while slows both of a pair. The interval is that of the median of
    resampled pairs; of n repeats it can be no narrower than their middle ones.
    """
    assert len(ours) == len(theirs) > 0
    ratios = np.array(ours) / np.array(theirs)
    random = np.random.default_rng(0)
    drawn = random.choice(ratios, size=(RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return Ratio(statistics.median(ratios), float(low), float(high))
