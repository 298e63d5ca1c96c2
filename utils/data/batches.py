"""A micro-batch: as the loader makes it, small, and as the model takes it, on its device."""

from typing import Any

import numpy as np
import torch

from utils.data.statistics import IGNORED_LABEL

# What PackedDataset assembles of B rows of T tokens. input_ids: (B, T) int32. bears_loss: (B, T)
# bool, false for the first token of each segment. cu_seq_lens: the starts of all segments in the
# flattened (B * T) tokens, the padded tail of a row being one, and then B * T, int32: as many as
# there are, for flash kernels go through each, empty ones too. loss_positions: which of the
# flattened tokens predict one that bears loss, int64. row_tokens: how many tokens of each row come
# before its padding, int64 (B,).
Batch = dict[str, torch.Tensor]


def model_inputs(batch: Batch, device: torch.device | str) -> dict[str, Any]:
    """Return a micro-batch as the model takes it, made on its device out of what is moved there.

    From pinned memory nobody waits for the copies. input_ids, labels, position_ids: (B, T) int64.
    Labels are unshifted: -100 where a token bears no loss. Positions count from 0 in each segment.
    cu_seq_lens_q and _k: `cu_seq_lens`. max_length_q and _k: at least the longest segment.
    loss_positions and row_tokens as they are, if they are given.
    """
    moved = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
    input_ids = moved["input_ids"].long()
    starts, places = moved["cu_seq_lens"][:-1], input_ids.numel()
    segment_starts = starts.repeat_interleave(moved["cu_seq_lens"].diff(), output_size=places)
    positions = torch.arange(places, device=device) - segment_starts
    longest = longest_segment(batch["cu_seq_lens"], input_ids.shape[1])
    inputs: dict[str, Any] = {
        "input_ids": input_ids,
        "labels": torch.where(moved["bears_loss"], input_ids, IGNORED_LABEL),
        "position_ids": positions.view_as(input_ids),
        "cu_seq_lens_q": moved["cu_seq_lens"],
        "cu_seq_lens_k": moved["cu_seq_lens"],
        "max_length_q": longest,
        "max_length_k": longest,
    }
    as_they_are = ("loss_positions", "row_tokens")
    return inputs | {name: moved[name] for name in as_they_are if name in moved}


def longest_segment(cu_seq_lens: torch.Tensor, row_length: int) -> int:
    """Return a power of two that no segment is longer than, or the row's length if it is less.

    Flash kernels start work for as many tokens of each segment, and most segments are short. Few
    bounds, for a kernel may plan anew for each. The boundaries are on the host: nobody waits.
    """
    longest = int(np.diff(cu_seq_lens.numpy()).max())
    return min(1 << (longest - 1).bit_length(), row_length)
