"""Files of a checkpoint that run code when they are unpickled: each would touch a file."""

import io
import os
import pickle
import zipfile
from collections import OrderedDict
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


def _archive(value: Callable[[Touch], Any]) -> Callable[[Path, Touch], None]:
    return lambda path, touch: torch.save(value(touch), path)


def archived(value: Any) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class _Nested:
    """A second archive, which torch's own function unpickles without a guard."""

    def __init__(self, content: bytes):
        self.content = content

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.storage._load_from_bytes, (self.content,)


def _legacy(path: Path, touch: Touch) -> None:
    torch.save({"state": touch}, path, _use_new_zipfile_serialization=False)


def _bare(path: Path, touch: Touch) -> None:
    path.write_bytes(pickle.dumps({"state": touch}))


def _python_2(path: Path, touch: Touch) -> None:
    """The names that Python 2 had, in the oldest protocol."""
    path.write_bytes(f"cposix\nsystem\n(S'touch {touch.path}'\ntR.".encode())


def _two_pickles(path: Path, touch: Touch) -> None:
    """An archive with a harmless pickle and another one under the same name."""
    with zipfile.ZipFile(io.BytesIO(archived({"state": touch}))) as bad:
        content = {name: bad.read(name) for name in bad.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            if name.endswith("data.pkl"):
                archive.writestr(name, pickle.dumps({}, protocol=2))
            archive.writestr(name, data)


def sharded(path: Path, shard: str, content: bytes, storage_meta: Any = None) -> None:
    """Write the metadata of a sharded checkpoint with one part, and that part."""
    (path.parent / shard).write_bytes(content)
    index = dcp.MetadataIndex("optimizer.param_groups")
    info = filesystem._StorageInfo(shard, 0, len(content))
    entries: dict[str, Any] = {index.fqn: dcp.BytesStorageMetadata()}
    metadata = dcp.Metadata(entries, None, {index: info}, storage_meta)
    path.write_bytes(pickle.dumps(metadata))


def _metadata(path: Path, touch: Touch) -> None:
    sharded(path, "__0_0.distcp", archived([0.1]), storage_meta=touch)


def _shard(path: Path, touch: Touch) -> None:
    sharded(path, "__0_0.distcp", archived([0.1, touch]))


def _model_states(touch: Touch) -> dict[str, Any]:
    return {"module": OrderedDict(), "ds_config": {}, "client_state": touch}


_ZERO = "global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt"
# file -> what writes it: those that the trainers, accelerate and DeepSpeed load on a resume.
PAYLOADS: dict[str, Callable[[Path, Touch], None]] = {
    "rng_state.pth": _archive(lambda touch: {"python": (3, (1, 2), None), "cpu": touch}),
    "rng_state_1.pth": _archive(lambda touch: {"numpy": touch}),
    "optimizer.pt": _archive(lambda touch: {"state": {0: touch}, "param_groups": []}),
    "scheduler.pt": _archive(lambda touch: {"last_epoch": touch}),
    "scaler.pt": _archive(lambda touch: {"scale": touch}),
    "training_args.bin": _archive(lambda touch: touch),
    "pytorch_model.bin": _archive(lambda touch: OrderedDict(weight=torch.zeros(2), other=touch)),
    "global_step2/mp_rank_00_model_states.pt": _archive(_model_states),
    _ZERO: _archive(lambda touch: {"optimizer_state_dict": {"loss_scaler": touch}}),
    "optimizer_0/.metadata": _metadata,
    "pytorch_model_fsdp_0/.metadata": _shard,
    "custom_checkpoint_0.pkl": _bare,
    "legacy/optimizer.pt": _legacy,
    "bare/optimizer.pt": _bare,
    "python2/scheduler.pt": _python_2,
    "twice/optimizer.pt": _two_pickles,
    "nested/optimizer.pt": _archive(lambda touch: {"state": _Nested(archived(touch))}),
}


def write(directory: Path, name: str, touch: Touch) -> Path:
    """Write a payload where the checkpoint has such a file; return its path."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    PAYLOADS[name](path, touch)
    return path
