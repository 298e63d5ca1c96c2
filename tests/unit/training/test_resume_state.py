"""Random states continue exactly, or are new ones that depend on seed, step and rank alone.

Whole runs are in tests/exactness/test_world_sizes.py and test_resume_equality.py.
"""

import logging
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from utils.checkpoints.files import Manifest, write_manifest
from utils.training.resume_state import (
    derive_random_states,
    load_random_states,
    rank_share,
    save_random_states,
)


def arguments(rank: int = 0, world_size: int = 1, device: str = "cpu") -> SimpleNamespace:
    return SimpleNamespace(
        process_index=rank, world_size=world_size, seed=42, device=torch.device(device)
    )


def draws() -> tuple:
    """The next numbers of every generator."""
    numbers = np.random.random(700).tolist()
    return random.random(), random.gauss(0, 1), numbers, torch.rand(700).tolist()


@pytest.fixture(autouse=True)
def _restore():
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.fixture
def commit(tmp_path):
    def write(world_size: int):
        manifest = Manifest("run", world_size, "ddp", 8, step=3, samples=24, tokens=9)
        write_manifest(tmp_path, manifest)
        return tmp_path

    return write


def test_saved_states_continue_exactly_on_as_many_ranks(commit, caplog):
    checkpoint = commit(2)
    derive_random_states(1, 2, 3)
    draws()
    random.gauss(0, 1)  # leaves a second number behind, which is part of the state
    np.random.normal()
    save_random_states(checkpoint, arguments(1, 2))
    expected = draws(), np.random.normal()
    derive_random_states(7, 7, 7)
    torch.serialization.clear_safe_globals()  # plain values: numpy's classes are not needed
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
    checkpoint = commit(4)
    for rank in range(4):
        save_random_states(checkpoint, arguments(rank, 4))  # a file of rank 1, but not for this one
    saved, drawn = draws(), {}
    for rank, step in [(0, 3), (1, 3), (1, 4)]:
        with caplog.at_level(logging.INFO):
            load_random_states(checkpoint, arguments(rank, 2), step)
        drawn[rank, step] = draws()
    assert "the checkpoint is of 4 ranks, now there are 2: random states" in caplog.text
    torch.rand(5)
    load_random_states(checkpoint, arguments(1, 2), 3)
    assert draws() == drawn[1, 3], "the same resume twice"
    for where in [(43, 3, 1), (42, 1, 3)]:
        derive_random_states(*where)
        drawn[where] = draws()
    every = [saved, *drawn.values()]
    for kind in zip(*every, strict=True):
        assert len({str(numbers) for numbers in kind}) == len(every)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a device's own generator needs one")
def test_the_devices_states_continue_too(commit):
    checkpoint, args = commit(1), arguments(device="cuda:0")
    save_random_states(checkpoint, args)
    expected = torch.rand(700, device=args.device).tolist()
    load_random_states(checkpoint, args, 3)
    assert torch.rand(700, device=args.device).tolist() == expected


def test_sums_over_ranks_keep_their_mean_on_other_ranks():
    assert [rank_share([1.0, 2.0], rank, 2) for rank in range(2)] == [1.0, 2.0]
    assert [rank_share([1.0, 2.0], rank, 3) for rank in range(3)] == [1.5] * 3
