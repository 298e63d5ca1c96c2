"""Finds the workload's documents in a baseline's first batch, in any layout."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workloads.workload import PAD_TOKEN_ID
from utils.data.arrow_columns import ListColumn, open_columns


def pieces(inputs: Mapping[str, Any]) -> list[np.ndarray]:
    """Return the token ids of each document of a batch, int32, without padding.

    A row holds one document, or several that begin where `position_ids` are 0 (TRL), or where
    `cu_seq_lens` says so, counted through all rows (Stoker).
    """
    tokens = inputs["input_ids"].cpu().numpy().astype(np.int32)
    begins = np.zeros(tokens.shape, dtype=bool)
    begins[:, 0] = True
    if "cu_seq_lens" in inputs:
        begins.reshape(-1)[inputs["cu_seq_lens"].cpu().numpy()[:-1]] = True
    elif "position_ids" in inputs:
        begins |= inputs["position_ids"].cpu().numpy().reshape(tokens.shape) == 0
    parts = np.split(tokens.reshape(-1), np.flatnonzero(begins)[1:])
    bare = [part[part != PAD_TOKEN_ID] for part in parts]
    return [part for part in bare if len(part)]


def document_numbers(parts: Sequence[np.ndarray], documents: Path) -> list[int]:
    """Return which documents these are; raises ValueError for what is no whole document."""
    if not parts:
        return []
    saved = open_columns(documents)["input_ids"]
    lengths = np.diff(saved.offsets)
    return [_number(part, saved, lengths) for part in parts]


def _number(part: np.ndarray, saved: ListColumn, lengths: np.ndarray) -> int:
    alike = np.flatnonzero(lengths == len(part))
    found = saved.pieces(saved.bounds(alike, np.zeros_like(alike), lengths[alike]))
    for number, tokens in zip(alike.tolist(), found, strict=True):
        if np.array_equal(tokens, part):
            return number
    raise ValueError("a document of the first batch is none of the workload's")
