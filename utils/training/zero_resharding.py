"""Lets DeepSpeed go on from a ZeRO checkpoint of another number of ranks.

DeepSpeed itself refuses: each rank's file holds the part of the optimizer's state that this number
of ranks gives it. Its own converter (deepspeed/checkpoint/ds_to_universal.py) puts the parts
together to one file per parameter and state ("universal checkpoint"), of which any number of ranks
load their part. That is done when it is needed, into a scratch directory beside the checkpoint,
which stays as it is.
"""

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from utils.checkpoints.directory import RESHARDED
from utils.checkpoints.manifest import read_manifest
from utils.checkpoints.sizes import readable
from utils.cluster.decisions import gathered, on_rank_0
from utils.cluster.host import host_name
from utils.config.errors import StorageError

logger = logging.getLogger(__name__)

REPOSITORY = Path(__file__).resolve().parents[2]
# The converter unpickles, so it runs under the same guard as this process.
CONVERTER = """
from utils.training.safe_loading import guard_loading
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
