"""A micro-batch: as the loader makes it, small, and as the model takes it, on its device."""

from typing import Any

import torch

from utils.data.statistics import IGNORED_LABEL

# What PackedDataset assembles of B rows of T tokens. input_ids: (B, T) int32. bears_loss: (B, T)
# bool, false for the first token of each segment. cu_seq_lens: the starts of all segments in the
# flattened (B * T) tokens, the padded tail of a row being one, and then B * T, int32: as many as
# there are, for flash kernels go through each, empty ones too. loss_positions: which of the
# flattened tokens predict one that bears loss, int64.
Batch = dict[str, torch.Tensor]


def model_inputs(batch: Batch, device: torch.device | str) -> dict[str, Any]:
    """Return a micro-batch as the model takes it, made on its device out of what is moved there.

    From pinned memory nobody waits for the copies. input_ids, labels, position_ids: (B, T) int64.
    Labels are unshifted: -100 where a token bears no loss. Positions count from 0 in each segment.
    cu_seq_lens_q and _k: `cu_seq_lens`. max_length_q and _k: T, a bound that does not change.
    loss_positions as they are, if they are given.
    """
    moved = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
    input_ids = moved["input_ids"].long()
    starts, places = moved["cu_seq_lens"][:-1], input_ids.numel()
    segment_starts = starts.repeat_interleave(moved["cu_seq_lens"].diff(), output_size=places)
    positions = torch.arange(places, device=device) - segment_starts
    inputs: dict[str, Any] = {
        "input_ids": input_ids,
        "labels": torch.where(moved["bears_loss"], input_ids, IGNORED_LABEL),
        "position_ids": positions.view_as(input_ids),
        "cu_seq_lens_q": moved["cu_seq_lens"],
        "cu_seq_lens_k": moved["cu_seq_lens"],
        "max_length_q": input_ids.shape[1],
        "max_length_k": input_ids.shape[1],
    }
    if "loss_positions" in moved:
        inputs["loss_positions"] = moved["loss_positions"]
    return inputs
