"""Values that a resumed run needs beyond the files that Trainer reads, and random states.

On the same number of ranks, each rank continues its random states exactly. Another number of ranks
cuts the batch into other micro-batches, so dropout masks cannot continue exactly. All ranks then
get new states by (seed, step, rank): a repeated resume gives the same bits, and no two ranks or
starts draw the same numbers.
"""

import logging
import random
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import TrainingArguments

from utils.checkpoints.files import read_manifest

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """A collaborator of the trainer with values that a resumed run needs."""

    def state(self) -> dict[str, Any]:
        """Return JSON values for the next checkpoint by unique names; collective over ranks."""

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore from the values of all collaborators. They are empty at a run's first start."""


def rank_share(sums: list[float], args: TrainingArguments) -> float:
    """Return this rank's sum, or the mean of all sums if the number of ranks has changed."""
    same = len(sums) == args.world_size
    return sums[args.process_index] if same else sum(sums) / len(sums)


def save_random_states(directory: Path, args: TrainingArguments) -> None:
    """Save this rank's RNG states as plain numbers and tensors, under Trainer's file name.

    Only the state of the rank's own device is saved. Trainer saves the states of all devices of the
    node by device number, which is wrong on a node with other devices.
    """
    kind, words, *rest = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(words, dtype=np.int64)), *rest),
        "cpu": torch.get_rng_state(),
    }
    if args.device.type != "cpu":
        states["device"] = torch.get_device_module(args.device).get_rng_state(args.device)
    directory.mkdir(parents=True, exist_ok=True)
    torch.save(states, directory / _file_name(args))


def load_random_states(checkpoint: Path, args: TrainingArguments, step: int) -> None:
    """Restore this rank's RNG states, or derive new states if the number of ranks has changed."""
    ranks = read_manifest(checkpoint).world_size
    if ranks != args.world_size:
        _derive_random_states(args.seed, step, args.process_index)
        logger.info(
            "the checkpoint is of %d ranks, now there are %d: random states (dropout) are new, by "
            "seed %d, step %d and rank; samples and global batches stay the same",
            ranks, args.world_size, args.seed, step,
        )  # fmt: skip
        return
    path = checkpoint / _file_name(args)
    states = torch.load(path, map_location="cpu", weights_only=True)
    kind, words, *rest = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((kind, words.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["cpu"])
    if args.device.type != "cpu":
        torch.get_device_module(args.device).set_rng_state(states["device"], args.device)


def _derive_random_states(seed: int, step: int, rank: int) -> None:
    words = np.random.SeedSequence([seed, step, rank]).generate_state(4, np.uint32).tolist()
    random.seed(words[0])
    np.random.seed(words[1])
    torch.manual_seed(words[2] << 32 | words[3])  # seeds all devices


def _file_name(args: TrainingArguments) -> str:
    return "rng_state.pth" if args.world_size == 1 else f"rng_state_{args.process_index}.pth"
