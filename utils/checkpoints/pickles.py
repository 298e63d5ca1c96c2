"""Safe loading of checkpoints, which may come from a stranger.

Pickles may create only objects of known classes. Index files may name only files of the checkpoint.
Trainer calls torch.load with weights_only=True. TORCH_FORCE_WEIGHTS_ONLY_LOAD makes DeepSpeed and
torch.distributed.checkpoint do the same. torch unpickles the file `.metadata` of sharded
checkpoints without any check. So this module checks `.metadata` first.
"""

import io
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.serialization import add_safe_globals, set_crc32_options, skip_data

from utils.checkpoints.files import read_manifest
from utils.config.errors import ConfigurationError
from utils.host.atomic_files import paths_inside

# Suffixes of files that are not pickles. A .distcp shard has pickled parts at offsets that are in
# `.metadata`: `_check_sharded` checks these parts.
HARMLESS_SUFFIXES = frozenset({
    ".json", ".jsonl", ".yaml", ".safetensors", ".jinja", ".txt", ".md", ".model", ".py", ".distcp",
})  # fmt: skip
# Names allowed in .metadata, besides torch's dtypes. These classes only store their arguments.
METADATA_NAMES = re.compile(
    r"builtins\.set|collections\.OrderedDict|pathlib\.(_local\.)?PosixPath|torch\.Size"
    r"|torch\.serialization\._get_layout|torch\.distributed\.checkpoint\.filesystem\._StorageInfo"
    r"|torch\.distributed\.checkpoint\.metadata\.(_MEM_FORMAT_ENCODING|TensorProperties|Metadata"
    r"|MetadataIndex|StorageMeta|(Bytes|Chunk|Tensor)StorageMetadata)"
)


def guard_loading(strategy: str) -> None:
    """Force weights_only=True for torch.load in this process.

    torch.load may still create objects of the classes that occur in checkpoints of the parallel
    strategy `strategy`. Also turn off the CRC-32 sums of torch.save, because they take time and
    torch.load ignores them.
    """
    set_crc32_options(False)
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    allow_known_classes(strategy)


def allow_known_classes(strategy: str) -> None:
    """Let torch.load with weights_only=True create the classes in checkpoints of a strategy."""
    # Not torch's context manager: on exit it also forbids classes that were allowed before.
    rebuild: Any = np.empty(0).__reduce__()[0]
    add_safe_globals([rebuild, np.ndarray, np.dtype, np.dtypes.UInt32DType])
    if strategy.startswith("zero"):
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        add_safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address])


def refuse_code(checkpoint: Path) -> None:
    """Raise ConfigurationError if loading a checkpoint could run code or read other files."""
    manifest = read_manifest(checkpoint)
    allow_known_classes(manifest.strategy)
    for name in manifest.files:
        if reason := forbidden(checkpoint / name):
            raise ConfigurationError(
                f"{checkpoint / name} {reason} Nothing of {checkpoint} was loaded: find out who "
                "wrote it, and move it away to resume from the checkpoint before."
            )


def forbidden(path: Path) -> str | None:
    """Return why a checkpoint's file must not be loaded, as text, or None for a safe file.

    Raises OSError. Raises ConfigurationError if the file names a path outside of the checkpoint.
    """
    try:
        if path.name.endswith(".index.json"):
            index = json.loads(path.read_text(encoding="utf-8"))
            paths_inside(path.parent, set(index["weight_map"].values()), path)
        elif path.name.startswith("latest"):  # DeepSpeed: a folder's name
            folder = path.read_text(encoding="utf-8").strip()
            paths_inside(path.parent, [f"{folder}/mp_rank_00_model_states.pt"], path)
        elif path.suffix not in HARMLESS_SUFFIXES:
            with skip_data():
                if path.name.endswith(".metadata"):
                    _check_sharded(path)
                else:
                    torch.load(path, weights_only=True)
    except (OSError, ConfigurationError):
        raise
    except Exception as error:  # a damaged or hostile file may raise any error here
        if named := re.search(r"GLOBAL (\S+)", str(error)):
            return f"names {named[1]}, which no checkpoint needs: loading it would run that."
        return "is nothing that torch.save writes of known classes."
    return None


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = METADATA_NAMES.fullmatch(f"{module}.{name}")
        if not known and not (module == "torch" and type(vars(torch).get(name)) is torch.dtype):
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name} is not on the list")
        return super().find_class(module, name)


def _check_sharded(metadata: Path) -> None:
    """Check the pickles of a sharded checkpoint: `.metadata` and the non-tensor parts of shards.

    metadata: the path of `.metadata`. torch's FileSystemReader unpickles the same parts later.
    Raises UnpicklingError if a pickle names a forbidden class.
    """
    with metadata.open("rb") as file:
        content = _MetadataUnpickler(file).load()
    named = {info.relative_path for info in content.storage_data.values()}
    shards = paths_inside(metadata.parent, named, metadata)
    for index, info in content.storage_data.items():
        if type(content.state_dict_metadata[index.fqn]).__name__ == "BytesStorageMetadata":
            with shards[info.relative_path].open("rb") as shard:
                shard.seek(info.offset)
                torch.load(io.BytesIO(shard.read(info.length)), weights_only=True)
