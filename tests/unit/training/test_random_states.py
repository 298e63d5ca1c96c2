"""Random states go on exactly, or are new ones that depend on seed, step and rank alone."""

import random

import numpy as np
import pytest
import torch

from utils.training.resume_state import derive_states, file_name, load_states, save_states

CPU = torch.device("cpu")


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


def test_saved_states_go_on_exactly(tmp_path):
    path = tmp_path / file_name(0, 1)
    derive_states(1, 2, 3)
    draws()
    random.gauss(0, 1)  # leaves a second number behind, which is part of the state
    np.random.normal()
    save_states(path, CPU)
    expected = draws(), np.random.normal()
    derive_states(7, 7, 7)
    load_states(path, CPU)
    assert (draws(), np.random.normal()) == expected


def test_derived_states_depend_on_seed_step_and_rank_alone():
    drawn = {}
    for where in [(1, 2, 3), (1, 2, 4), (1, 3, 3), (2, 2, 3), (1, 3, 2)]:
        derive_states(*where)
        drawn[where] = draws()
    for one in drawn:
        for other in drawn:
            if one != other:
                pairs = zip(drawn[one], drawn[other], strict=True)
                assert all(ours != theirs for ours, theirs in pairs), (one, other)
    torch.rand(5)
    derive_states(1, 2, 3)
    assert draws() == drawn[1, 2, 3]


def test_the_file_holds_plain_values_alone(tmp_path):
    """So that it loads without numpy's classes being allowed."""
    save_states(tmp_path / "states.pth", CPU)
    torch.serialization.clear_safe_globals()
    states = torch.load(tmp_path / "states.pth", weights_only=True)
    assert set(states) == {"python", "numpy", "cpu"}


def test_files_are_named_as_trainer_names_them():
    assert file_name(0, 1) == "rng_state.pth"
    assert file_name(3, 4) == "rng_state_3.pth"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a device's own generator needs one")
def test_the_devices_states_go_on_too(tmp_path):
    device = torch.device("cuda", 0)
    save_states(tmp_path / "states.pth", device)
    expected = torch.rand(700, device=device).tolist()
    load_states(tmp_path / "states.pth", device)
    assert torch.rand(700, device=device).tolist() == expected
