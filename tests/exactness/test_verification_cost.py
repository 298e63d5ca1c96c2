"""Proof 6: what the digests of a 1 GB checkpoint cost, beside the save that they are part of."""

import os
import shutil
import statistics
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from utils.checkpoints.files import file_problems, flush, flush_and_record, list_files

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

PARAMETERS = 83_000_000  # 12 bytes each: float32 weights and the two states of AdamW
REPEATS = 7


def write(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write as Trainer does: weights with safetensors, the optimizer with torch.save."""
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    states = {
        name: {"exp_avg": value, "exp_avg_sq": value.clone()} for name, value in tensors.items()
    }
    torch.save(states, directory / "optimizer.pt")


def timed(action) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def test_hashing_costs_less_than_a_twentieth_of_the_save(tmp_path, figures):
    tensors = {f"layer{index}": torch.randn(PARAMETERS // 20) for index in range(20)}
    flushed: list[float] = []
    recorded: list[float] = []
    verified: list[float] = []
    directory = tmp_path / "checkpoint-1"

    def flush_only() -> None:
        for name in list_files(directory):
            flush(directory / name)
        flush(directory)

    def flush_and_hash() -> None:
        records = flush_and_record(directory, list_files(directory))
        verified.append(timed(lambda: file_problems(directory, records)))

    for _ in range(REPEATS):
        for finish, times in ((flush_only, flushed), (flush_and_hash, recorded)):
            os.sync()
            times.append(timed(lambda: write(directory, tensors)) + timed(finish))
            if finish is flush_and_hash:
                times[-1] -= verified[-1]
            size = sum((directory / name).stat().st_size for name in list_files(directory))
            shutil.rmtree(directory)
    save_s, with_digests_s = statistics.median(flushed), statistics.median(recorded)
    share = with_digests_s / save_s - 1
    figures("verification_cost").update(
        checkpoint_gb=round(size / 1e9, 3),
        save_s=round(save_s, 2),
        save_with_digests_s=round(with_digests_s, 2),
        digests_share_of_save=round(share, 4),
        verification_at_start_s=round(statistics.median(verified), 2),
        repeats=REPEATS,
        spread_of_saves_s=[round(min(flushed), 2), round(max(flushed), 2)],
    )
    assert share < 0.05
