"""Conversion of a ZeRO checkpoint for another number of ranks, with DeepSpeed's own converter."""

import contextlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from utils.checkpoints.discovery import RESHARDED
from utils.checkpoints.files import read_manifest
from utils.config.declarations import counted_ranks
from utils.config.errors import StorageError
from utils.host.collectives import gathered, on_rank_0
from utils.host.machine import host_name

logger = logging.getLogger(__name__)

REPOSITORY = Path(__file__).resolve().parents[2]
# The converter unpickles files, so it gets this process's guard against unsafe pickles.
CONVERTER = """
from utils.checkpoints.pickles import guard_loading
guard_loading("zero")
from deepspeed.checkpoint import ds_to_universal
ds_to_universal.main(ds_to_universal.parse_arguments())
"""
# Numbers of the converter's processes. An extracting process needs memory for one rank's complete
# file, a merging process for one parameter.
EXTRACTING, MERGING = 4, 8


@contextlib.contextmanager
def loadable_checkpoint(trainer: Trainer, checkpoint: str | None) -> Iterator[str | None]:
    """Yield a path from which the current number of ranks can load `checkpoint`.

    If another number of ranks wrote `checkpoint` under ZeRO, `checkpoint` is converted into a
    temporary directory. Otherwise the result is `checkpoint` itself. None gives None. All ranks
    must call this. Raises StorageError on all ranks if the conversion fails.
    """
    current_ranks = ranks = trainer.args.world_size
    if checkpoint is not None and trainer.is_deepspeed_enabled:
        ranks = read_manifest(Path(checkpoint)).world_size
    if checkpoint is None or ranks == current_ranks:
        yield checkpoint
        return
    scratch = Path(checkpoint).with_name(RESHARDED + Path(checkpoint).name)
    on_rank_0(lambda: _convert(Path(checkpoint), scratch, ranks, current_ranks))
    plugin: Any = trainer.accelerator.state.deepspeed_plugin
    config = plugin.deepspeed_config
    config["checkpoint"] = {**config.get("checkpoint", {}), "load_universal": True}
    engine: Any = trainer.model_wrapped
    if hasattr(engine, "_config"):  # it is already DeepSpeed's engine
        engine._config.load_universal_checkpoint = True
    yield str(scratch)
    engine = trainer.model_wrapped
    if engine.zero_optimization_stage() == 3:
        repair_stage_3(engine.optimizer.optimizer, scratch)
    config["checkpoint"]["load_universal"] = engine._config.load_universal_checkpoint = False
    gathered(None)  # wait for ranks that still read the directory
    on_rank_0(lambda: shutil.rmtree(scratch))


def repair_stage_3(optimizer: Any, universal: Path) -> None:
    """Correct two errors of DeepSpeed 0.19 after loading a universal checkpoint under ZeRO-3.

    `_load_universal_checkpoint_stage3` gives all parameter groups the settings of the first group,
    so that all parameters get weight decay. All parameters also share one step counter, which then
    grows once per parameter.

    optimizer: torch's optimizer inside DeepSpeed's optimizer. universal: the directory of the
    universal checkpoint.
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
    origin = counted_ranks(ranks)
    logger.info(f"{checkpoint} is of {origin}, not {world_size}: converting its ZeRO state")
    shutil.rmtree(scratch, ignore_errors=True)  # left over if an earlier process was killed
    scratch.mkdir()
    (state_folder,) = checkpoint.glob("global_step*")
    shutil.copy(checkpoint / "scheduler.pt", scratch)  # the same for all ranks
    command = [
        sys.executable, "-c", CONVERTER,
        "--input_folder", str(state_folder.resolve()),
        "--output_folder", str(scratch.resolve() / state_folder.name),
        "--num_extract_workers", str(min(EXTRACTING, ranks)),
        "--num_merge_workers", str(min(MERGING, os.cpu_count() or 1)),
        "--inject_missing_state",
    ]  # fmt: skip
    launcher = ("RANK", "LOCAL_RANK")
    variables = {name: value for name, value in os.environ.items() if name not in launcher}
    result = subprocess.run(
        command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=False
    )
    if result.returncode:
        ending = "\n".join((result.stdout + result.stderr).strip().splitlines()[-5:])
        raise StorageError(
            f"{host_name()}: the ZeRO state of {checkpoint} could not be converted for "
            f"{world_size} ranks: {ending}. {ranks} ranks resume from it as it is; other numbers "
            f"need as much free space again in {checkpoint.parent}."
        )
