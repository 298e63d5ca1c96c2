"""A safe unpickler: a checkpoint can load only known classes, and only its own files.

Trainer loads with weights_only=True. DeepSpeed and torch.distributed.checkpoint do not, so an
environment variable of torch forces it for them. torch unpickles the metadata of sharded
checkpoints without a check, so this module checks the metadata first.
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

# Suffixes of files that no library unpickles. Only parts of a .distcp shard are unpickled, as its
# metadata says: see `_read_sharded`.
HARMLESS = frozenset({
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
    """Force weights_only=True in this process, and let torch.save write no CRC-32.

    torch.load does not check the CRC-32, for which torch.save would read the file again.
    """
    set_crc32_options(False)
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    allow_known_classes(strategy)


def allow_known_classes(strategy: str) -> None:
    """Allow the classes in a strategy's checkpoints for loading with weights_only."""
    # Not by torch's context manager: its end would also forbid classes that were allowed before.
    rebuild: Any = np.empty(0).__reduce__()[0]
    add_safe_globals([rebuild, np.ndarray, np.dtype, np.dtypes.UInt32DType])
    if strategy.startswith("zero"):
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        add_safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address])


def refuse_code(checkpoint: Path) -> None:
    """Raise ConfigurationError for a checkpoint with a forbidden class or file name."""
    manifest = read_manifest(checkpoint)
    allow_known_classes(manifest.strategy)
    for name in manifest.files:
        if reason := forbidden(checkpoint / name):
            raise ConfigurationError(
                f"{checkpoint / name} {reason} Nothing of {checkpoint} was loaded: find out who "
                "wrote it, and move it away to resume from the checkpoint before."
            )


def forbidden(path: Path) -> str | None:
    """Return why a file of a checkpoint must not be loaded; None for a safe file.

    Raises OSError, and ConfigurationError if the file names another one outside of the checkpoint.
    """
    try:
        if path.name.endswith(".index.json"):
            index = json.loads(path.read_text(encoding="utf-8"))
            paths_inside(path.parent, set(index["weight_map"].values()), path)
        elif path.name.startswith("latest"):  # DeepSpeed: a folder's name
            folder = path.read_text(encoding="utf-8").strip()
            paths_inside(path.parent, [f"{folder}/mp_rank_00_model_states.pt"], path)
        elif path.suffix not in HARMLESS:
            with skip_data():
                if path.name.endswith(".metadata"):
                    _read_sharded(path)
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


def _read_sharded(metadata: Path) -> None:
    """Unpickle the metadata and the non-tensor parts of shards, as torch's FileSystemReader does.

    Raises UnpicklingError for a class that is not allowed.
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
