"""The random states of a rank: kept with each checkpoint, or derived where there are none for it.

A rank's states go on exactly where it has some. On another number of ranks there is no exact
going on (dropout masks belong to micro-batches, and these are cut differently), so that all ranks
get new states, each by (seed, step, rank): the same resume gives the same bits twice, and no two
ranks or starts draw the same numbers.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

States = dict[str, Any]


def file_name(rank: int, world_size: int) -> str:
    """Return Trainer's name for the file of a rank's states."""
    return "rng_state.pth" if world_size == 1 else f"rng_state_{rank}.pth"


def save_states(path: Path, device: torch.device) -> None:
    """Write the states of this process, of plain numbers and tensors alone.

    Of the devices just the rank's own: Trainer writes those of all that its node has, by their
    number there, which tells nothing on nodes of another shape.
    """
    kind, words, *rest = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(words, dtype=np.int64)), *rest),
        "cpu": torch.get_rng_state(),
    }
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    torch.save(states, path)


def load_states(path: Path, device: torch.device) -> None:
    """Put the states that `save_states` wrote back; runs no code of the file."""
    states = torch.load(path, map_location="cpu", weights_only=True)
    kind, words, *rest = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((kind, words.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states["device"], device)


def derive_states(seed: int, step: int, rank: int) -> None:
    """Seed every generator of this process by the run's seed, the step and the rank."""
    words = np.random.SeedSequence([seed, step, rank]).generate_state(4, np.uint32).tolist()
    random.seed(words[0])
    np.random.seed(words[1])
    torch.manual_seed(words[2] << 32 | words[3])  # of all devices, too
