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

    A slow phase of the machine affects both runs of a pair. The interval is that of the median of
    resampled pairs; with few repeats it spans at least the middle ones.
    """
    assert len(ours) == len(theirs) > 0
    ratios = np.array(ours) / np.array(theirs)
    return Ratio(statistics.median(ratios), *median_interval(ratios))


def median_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the median (bootstrap); the value itself of one repeat."""
    random = np.random.default_rng(0)
    drawn = random.choice(np.asarray(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)
