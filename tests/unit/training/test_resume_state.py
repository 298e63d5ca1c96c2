"""Random states continue exactly, or are derived from seed, step and rank only.

Whole runs are in tests/exactness/test_world_sizes.py and test_resume_equality.py.
"""

import logging
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from utils.checkpoints.files import Manifest, write_manifest
from utils.training.resume_state import load_random_states, rank_share, save_random_states


def arguments(rank=0, world_size=1, device="cpu", seed=42) -> SimpleNamespace:
    device = torch.device(device)
    return SimpleNamespace(process_index=rank, world_size=world_size, seed=seed, device=device)


def draws() -> tuple:
    """Return the next numbers of every generator."""
    numbers = np.random.random(700).tolist()
    return random.random(), random.gauss(0, 1), numbers, torch.rand(700).tolist()


@pytest.fixture
def commit(tmp_path):
    def write(world_size: int):
        manifest = Manifest("run", world_size, "ddp", 8, step=3, samples=24, tokens=9)
        write_manifest(tmp_path, manifest)
        return tmp_path

    return write


def test_saved_states_continue_exactly_on_as_many_ranks(commit, caplog):
    checkpoint = commit(2)
    draws()
    random.gauss(0, 1)  # stores a second number, which is part of the state
    np.random.normal()
    save_random_states(checkpoint, arguments(1, 2))
    expected = draws(), np.random.normal()
    torch.serialization.clear_safe_globals()  # the file has plain values, no classes of numpy
    with caplog.at_level(logging.INFO):
        load_random_states(checkpoint, arguments(1, 2), 3)
    assert (draws(), np.random.normal()) == expected
    assert not caplog.records
    assert [path.name for path in checkpoint.glob("rng*")] == ["rng_state_1.pth"]
    with pytest.raises(FileNotFoundError, match=r"rng_state_0\.pth"):
        load_random_states(checkpoint, arguments(0, 2), 3)
    save_random_states(checkpoint, arguments())
    assert (checkpoint / "rng_state.pth").is_file()


def test_other_ranks_get_new_states_of_their_own(commit, caplog):
    checkpoint, drawn = commit(4), [draws()]
    for rank in range(4):
        save_random_states(checkpoint, arguments(rank, 4))  # a file of rank 1, but not of this rank
    for rank, step, seed in [(0, 3, 42), (1, 3, 42), (1, 4, 42), (1, 3, 43), (1, 1, 42)]:
        with caplog.at_level(logging.INFO):
            load_random_states(checkpoint, arguments(rank, 2, seed=seed), step)
        drawn.append(draws())
    assert "the checkpoint is of 4 ranks, now there are 2: random states" in caplog.text
    for kind in zip(*drawn, strict=True):
        assert len({str(numbers) for numbers in kind}) == len(drawn)
    load_random_states(checkpoint, arguments(1, 2), 3)
    assert draws() == drawn[2], "the same resume twice"
    for ranks, sums in ((2, [1.0, 2.0]), (3, [1.5] * 3)):  # the mean of unlogged losses stays
        assert [rank_share([1.0, 2.0], arguments(rank, ranks)) for rank in range(ranks)] == sums


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a device's own generator needs one")
def test_the_devices_states_continue_too(commit):
    checkpoint, args = commit(1), arguments(device="cuda:0")
    save_random_states(checkpoint, args)
    expected = torch.rand(700, device=args.device).tolist()
    load_random_states(checkpoint, args, 3)
    assert torch.rand(700, device=args.device).tolist() == expected
