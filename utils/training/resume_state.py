"""The random states of a rank: kept with each checkpoint, or derived where there are none for it.

A rank's states go on exactly where it has some. On another number of ranks there is no exact
going on (dropout masks belong to micro-batches, and these are cut differently), so that all ranks
get new states, each by (seed, step, rank): the same resume gives the same bits twice, and no two
ranks or starts draw the same numbers.
"""

import contextlib
import logging
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Trainer
from typing_extensions import override

from utils.checkpoints.discovery import RESHARDED
from utils.checkpoints.files import readable
from utils.checkpoints.manifest import read_manifest
from utils.config.errors import StorageError
from utils.support.collectives import gathered, on_rank_0
from utils.support.host import host_name

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


# Lets DeepSpeed go on from a ZeRO checkpoint of another number of ranks.

logger = logging.getLogger(__name__)

REPOSITORY = Path(__file__).resolve().parents[2]
# The converter unpickles, so it runs under the same guard as this process.
CONVERTER = """
guard_loading("zero")
from deepspeed.checkpoint import ds_to_universal
ds_to_universal.main(ds_to_universal.parse_arguments())
"""
# The converter's processes: each holds a rank's whole file in memory (merging: a parameter's).
EXTRACTING, MERGING = 4, 8
# Of one rank, beside the parts of the weights and of the optimizer's state.
SHARED_FILES = ("scheduler.pt",)


@contextlib.contextmanager
def universal_checkpoint(checkpoint: Path, world_size: int) -> Iterator[Path | None]:
    """Give a directory that DeepSpeed loads as a universal checkpoint on `world_size` ranks.

    None where the checkpoint is of as many ranks. Collective over ranks; the directory is gone
    afterwards. Raises StorageError on all ranks.
    """
    ranks = read_manifest(checkpoint).world_size
    if ranks == world_size:
        yield None
        return
    scratch = checkpoint.with_name(RESHARDED + checkpoint.name)
    on_rank_0(lambda: _convert(checkpoint, scratch, ranks, world_size))
    yield scratch
    gathered(None)  # rank 0 may be done while others still read it
    on_rank_0(lambda: shutil.rmtree(scratch))


def repair_stage_3(optimizer: Any, universal: Path) -> None:
    """Put right what DeepSpeed 0.19 loads wrongly of a universal checkpoint under ZeRO-3.

    `_load_universal_checkpoint_stage3` gives all groups of parameters the settings of the first one
    (so that weight decay falls on what has none), and all of them one tensor to count their steps
    in, which is then counted up once for each. `optimizer` is torch's own, inside DeepSpeed's.
    """
    (state,) = universal.glob("global_step*/zero/optimizer_state.pt")
    loaded = torch.load(state, map_location="cpu", weights_only=True)
    groups = loaded["optimizer_state_dict"]["param_groups"]
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})
    for values in optimizer.state.values():
        if isinstance(values["step"], torch.Tensor):
            values["step"] = values["step"].clone()


def _convert(checkpoint: Path, scratch: Path, ranks: int, world_size: int) -> None:
    size = readable(read_manifest(checkpoint).size_bytes)
    logger.info(
        "%s is of %d ranks, now there are %d: its ZeRO state (%s) is put together in %s",
        checkpoint,
        ranks,
        world_size,
        size,
        scratch,
    )
    begun = time.monotonic()
    shutil.rmtree(scratch, ignore_errors=True)  # of a start that was killed here
    scratch.mkdir()
    (steps,) = checkpoint.glob("global_step*")
    for name in SHARED_FILES:
        shutil.copy(checkpoint / name, scratch / name)
    command = [
        sys.executable, "-c", CONVERTER,
        "--input_folder", str(steps.resolve()),
        "--output_folder", str(scratch.resolve() / steps.name),
        "--num_extract_workers", str(min(EXTRACTING, ranks)),
        "--num_merge_workers", str(min(MERGING, os.cpu_count() or 1)),
        "--inject_missing_state",
    ]  # fmt: skip
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={name: os.environ[name] for name in os.environ if name not in ("RANK", "LOCAL_RANK")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        last = "\n".join(done.stdout.strip().splitlines()[-5:])
        raise StorageError(
            f"{host_name()}: the ZeRO state of {checkpoint} could not be put together for "
            f"{world_size} ranks: {last}. It goes on with {ranks} ranks as it is; on others it "
            f"needs room for as much again in {checkpoint.parent}."
        )
    logger.info("%s is ready (%.1f s)", scratch, time.monotonic() - begun)


# Training that goes on from a checkpoint of another number of ranks.


class ElasticTrainerMixin(Trainer):
    """Keeps exact random states on as many ranks, derives them on more or fewer; reshards ZeRO.

    Put before a Trainer class. Samples and accumulation follow from the settings
    (utils/data/order.py, utils/config/arguments.py), DDP and FSDP2 load on any number of ranks by
    themselves. The hooks' contract is held by tests/integration/test_hooks.py.
    """

    @override
    def _save_rng_state(self, output_dir: str) -> None:
        """Save this rank's random states, of its own device alone."""
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        save_states(Path(output_dir) / self._random_states_file(), self.args.device)

    @override
    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Go on with the random states of this rank, or with new ones of its own."""
        if checkpoint is None:
            return
        ranks, step = read_manifest(Path(checkpoint)).world_size, self.state.global_step
        if ranks == self.args.world_size:
            load_states(Path(checkpoint) / self._random_states_file(), self.args.device)
            return
        derive_states(self.args.seed, step, self.args.process_index)
        logger.info(
            "the checkpoint is of %d ranks, now there are %d: random states (dropout) are new, by "
            "seed %d, step %d and rank; samples and global batches stay what they are",
            ranks,
            self.args.world_size,
            self.args.seed,
            step,
        )

    def _random_states_file(self) -> str:
        return file_name(self.args.process_index, self.args.world_size)

    @override
    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        """Prepare model and optimizer and load the checkpoint; under ZeRO resharded if need be."""
        if not self.is_deepspeed_enabled or resume_from_checkpoint is None:
            return super()._prepare_for_training(
                max_steps, train_dataloader, resume_from_checkpoint
            )
        config = self.accelerator.state.deepspeed_plugin.deepspeed_config
        with universal_checkpoint(Path(resume_from_checkpoint), self.args.world_size) as other:
            if other is None:
                return super()._prepare_for_training(
                    max_steps, train_dataloader, resume_from_checkpoint
                )
            config["checkpoint"] = {**config.get("checkpoint", {}), "load_universal": True}
            prepared = super()._prepare_for_training(max_steps, train_dataloader, str(other))
            engine: Any = self.model_wrapped
            if engine.zero_optimization_stage() == 3:
                repair_stage_3(engine.optimizer.optimizer, other)
            config["checkpoint"]["load_universal"] = False
            engine._config.load_universal_checkpoint = False
            return prepared

    @override
    def _load_best_model(self) -> None:
        """Load it, under ZeRO resharded if other ranks saved it."""
        best = self.state.best_model_checkpoint
        if not self.is_deepspeed_enabled or best is None:
            super()._load_best_model()
            return
        with universal_checkpoint(Path(best), self.args.world_size) as other:
            if other is not None:
                self.state.best_model_checkpoint = str(other)
                engine: Any = self.model_wrapped
                engine._config.load_universal_checkpoint = True
            super()._load_best_model()
        self.state.best_model_checkpoint = best
