"""Figures of log lines as arrays, and the points of them that a chart shows."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def number(value: Any) -> float | None:
    """Return what a user's hook or a rank logged as a float; None where it is no number."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return None


def column(lines: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """Return a figure of each line as float64; NaN where a line has none."""
    values = [line.get(key) for line in lines]
    try:
        return np.array(values, dtype=float)
    except (TypeError, ValueError):  # of a user's hook
        return np.array([number(value) for value in values], dtype=float)


def thinned(values: np.ndarray, points: int) -> np.ndarray:
    """Return the indices, in order, of `points` values at most: the extremes of equal parts."""
    if len(values) <= points:
        return np.arange(len(values))
    size = -(-len(values) * 2 // points)
    parts = np.full((-(-len(values) // size), size), np.nan)
    parts.flat[: len(values)] = values
    first, missing = np.arange(len(parts)) * size, np.isnan(parts)
    lowest = first + np.where(missing, np.inf, parts).argmin(axis=1)
    highest = first + np.where(missing, -np.inf, parts).argmax(axis=1)
    return np.unique(np.concatenate([[0, len(values) - 1], lowest, highest]))
