"""Random states continue exactly, or are derived from seed, step and rank only.

Whole runs are in tests/exactness/test_world_sizes.py and test_resume_equality.py.
"""

import logging
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from utils.checkpoints.files import Manifest, write_manifest
from utils.training.losses import rank_share
from utils.training.saving import load_random_states, save_random_states


def arguments(rank=0, world_size=1, device="cpu", seed=42) -> SimpleNamespace:
    device = torch.device(device)
    return SimpleNamespace(process_index=rank, world_size=world_size, seed=seed, device=device)


def draws() -> tuple:
    """Return the next numbers of every generator."""
    numbers = np.random.random(700).tolist()
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.normal(),
        numbers,
        torch.rand(700).tolist(),
    )


def commit(directory: Path, world_size: int) -> None:
    manifest = Manifest("run", world_size, "ddp", 8, step=3, samples=24, tokens=9)
    write_manifest(directory, manifest)


def test_states_continue_exactly_on_as_many_ranks_and_are_new_on_others(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    commit(tmp_path, 4)
    draws()  # random.gauss and np.random.normal store a second number, a part of the state
    save_random_states(tmp_path, arguments(1, 4))
    drawn = [draws()]
    torch.serialization.clear_safe_globals()  # the file has plain values, no classes of numpy
    load_random_states(tmp_path, arguments(1, 4), 3)
    assert draws() == drawn[0]
    assert not caplog.records
    with pytest.raises(FileNotFoundError, match=r"rng_state_0\.pth"):
        load_random_states(tmp_path, arguments(0, 4), 3)
    for rank, step, seed in [(0, 3, 42), (1, 3, 42), (1, 4, 42), (1, 3, 43), (1, 1, 42)]:
        load_random_states(tmp_path, arguments(rank, 2, seed=seed), step)
        drawn.append(draws())
    assert "the checkpoint is of 4 ranks, now there are 2: random states" in caplog.text
    for kind in zip(*drawn, strict=True):
        assert len({str(numbers) for numbers in kind}) == len(drawn)
    load_random_states(tmp_path, arguments(1, 2), 3)
    assert draws() == drawn[2], "the same resume twice"
    for ranks, sums in ((2, [1.0, 2.0]), (3, [1.5] * 3)):  # the mean of unlogged losses stays
        assert [rank_share([1.0, 2.0], arguments(rank, ranks)) for rank in range(ranks)] == sums


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a device's own generator needs one")
def test_the_devices_states_continue_too(tmp_path):
    commit(tmp_path, 1)
    args = arguments(device="cuda:0")
    save_random_states(tmp_path, args)
    expected = torch.rand(700, device=args.device).tolist()
    load_random_states(tmp_path, args, 3)
    assert torch.rand(700, device=args.device).tolist() == expected
