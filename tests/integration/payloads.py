"""Malicious checkpoint files: unpickling them would run code that touches a file."""

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp


class Touch:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


class _Nested:
    """An archive inside of an archive. Without a guard torch's own function would unpickle it."""

    def __init__(self, content: bytes):
        self.content = content

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.storage._load_from_bytes, (self.content,)


def archived(value: Any) -> bytes:
    """Return the bytes that torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def sharded(path: Path, content: bytes, storage_meta: Any = None) -> None:
    """Write a sharded checkpoint: the metadata of one part, and the part itself."""
    shard = path.with_name("__0_0.distcp")
    shard.write_bytes(content)
    index = dcp.MetadataIndex("optimizer.param_groups")
    info = filesystem._StorageInfo(shard.name, 0, len(content))
    entries: dict[str, Any] = {index.fqn: dcp.BytesStorageMetadata()}
    metadata = dcp.Metadata(entries, None, {index: info}, storage_meta)
    path.write_bytes(pickle.dumps(metadata))


def _saved(path: Path, touch: Touch) -> None:
    torch.save({"state": {0: touch}}, path)


# File -> function that writes it. Trainer, accelerate and DeepSpeed load these files on a resume.
PAYLOADS: dict[str, Callable[[Path, Touch], Any]] = {
    "rng_state_1.pth": _saved,
    "optimizer.pt": _saved,
    "training_args.bin": _saved,
    "global_step2/mp_rank_00_model_states.pt": _saved,
    "optimizer_0/.metadata": lambda path, touch: sharded(path, archived([0.1]), touch),
    "pytorch_model_fsdp_0/.metadata": lambda path, touch: sharded(path, archived([0.1, touch])),
    "custom_checkpoint_0.pkl": lambda path, touch: path.write_bytes(pickle.dumps([touch])),
    "legacy/optimizer.pt": lambda path, touch: torch.save(
        [touch], path, _use_new_zipfile_serialization=False
    ),
    "nested/optimizer.pt": lambda path, touch: torch.save([_Nested(archived(touch))], path),
}


def write(directory: Path, name: str, touch: Touch) -> Path:
    """Write a payload into a file of the checkpoint; return its path."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    PAYLOADS[name](path, touch)
    return path
