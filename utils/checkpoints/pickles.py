"""Only known classes in a checkpoint are unpickled, and only its own files, whoever loads it.

Trainer loads with weights_only=True; DeepSpeed and torch.distributed.checkpoint do not, which a
variable of torch overrules. torch unpickles the metadata of sharded checkpoints without a guard:
it is read here first.
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
from utils.support.files import paths_inside

# What no library unpickles; shards are read as their metadata says.
HARMLESS = frozenset({
    ".json", ".jsonl", ".yaml", ".safetensors", ".jinja", ".txt", ".md", ".model", ".py", ".distcp",
})  # fmt: skip
# What .metadata may name beside torch's dtypes; nothing here does more than hold its arguments.
METADATA_NAMES = re.compile(
    r"builtins\.set|collections\.OrderedDict|pathlib\.(_local\.)?PosixPath|torch\.Size"
    r"|torch\.serialization\._get_layout|torch\.distributed\.checkpoint\.filesystem\._StorageInfo"
    r"|torch\.distributed\.checkpoint\.metadata\.(_MEM_FORMAT_ENCODING|TensorProperties|Metadata"
    r"|MetadataIndex|StorageMeta|(Bytes|Chunk|Tensor)StorageMetadata)"
)


def guard_loading(strategy: str) -> None:
    """Overrule weights_only=False in this process, for good; let torch.save write no CRC-32.

    It would read all it writes once more. Our digests find more, and torch.load looks at none.
    """
    set_crc32_options(False)
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    allow_known_classes(strategy)


def allow_known_classes(strategy: str) -> None:
    """Add what checkpoints of a strategy hold to what torch loads with weights_only."""
    # Not torch's context manager of that name: at its end it forgets what was known before, too.
    rebuild: Any = np.empty(0).__reduce__()[0]
    add_safe_globals([rebuild, np.ndarray, np.dtype, np.dtypes.UInt32DType])
    if strategy.startswith("zero"):
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        add_safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address])


def refuse_code(checkpoint: Path) -> None:
    """Raise ConfigurationError for a checkpoint that names a class or a file it must not."""
    manifest = read_manifest(checkpoint)
    allow_known_classes(manifest.strategy)
    for name in manifest.files:
        if reason := forbidden(checkpoint / name):
            raise ConfigurationError(
                f"{checkpoint / name} {reason} Nothing of {checkpoint} was loaded: find out who "
                "wrote it, and move it away to resume from the checkpoint before."
            )


def forbidden(path: Path) -> str | None:
    """Return why a file of a checkpoint must not be loaded; None: it may be.

    Raises OSError, and ConfigurationError for a name of a file elsewhere.
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
    except Exception as error:  # what a stream of bytes can raise here is not bounded
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
    """Read metadata, and what the shards hold beside tensors, as FileSystemReader does."""
    with metadata.open("rb") as file:
        content = _MetadataUnpickler(file).load()
    named = {info.relative_path for info in content.storage_data.values()}
    shards = paths_inside(metadata.parent, named, metadata)
    for index, info in content.storage_data.items():
        if type(content.state_dict_metadata[index.fqn]).__name__ == "BytesStorageMetadata":
            with shards[info.relative_path].open("rb") as shard:
                shard.seek(info.offset)
                torch.load(io.BytesIO(shard.read(info.length)), weights_only=True)
