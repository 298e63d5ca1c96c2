"""Figures of log lines as arrays, and the choice of points that a chart shows."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def number(value: Any) -> float | None:
    """Return a logged value as a float; None for other types, which a user's hook may log."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return None


def column(lines: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """Return a figure of each line as float64; NaN if a line lacks the figure."""
    values = [line.get(key) for line in lines]
    try:
        return np.array(values, dtype=float)
    except (TypeError, ValueError):  # a user's hook logged something else
        return np.array([number(value) for value in values], dtype=float)


def thinned(values: np.ndarray, points: int) -> np.ndarray:
    """Return ascending indices of about `points` values: the lowest and highest of equal parts."""
    if len(values) <= points:
        return np.arange(len(values))
    size = -(-len(values) * 2 // points)
    parts = np.full((-(-len(values) // size), size), np.nan)
    parts.flat[: len(values)] = values
    first, missing = np.arange(len(parts)) * size, np.isnan(parts)
    lowest = first + np.where(missing, np.inf, parts).argmin(axis=1)
    highest = first + np.where(missing, -np.inf, parts).argmax(axis=1)
    return np.unique(np.concatenate([[0, len(values) - 1], lowest, highest]))
