"""Reads what a checkpoint's pickles name, without running any of it, before a library loads them.

Loading a pickle calls whatever it names. DeepSpeed and torch.distributed.checkpoint load theirs
unguarded (torch's weights_only guards the others), so a file that anyone could have put there is
looked at first, by a reader that only knows names. See the documentation of the pickle module,
"Restricting Globals", and CVE-2025-32434 for why one guard is not enough.
"""

import io
import logging
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from utils.checkpoints.files import list_files
from utils.config.errors import ConfigurationError

# What no library unpickles. All else has to be an archive of torch.save, or of the kinds below.
NEVER_UNPICKLED = frozenset(
    {".json", ".jsonl", ".safetensors", ".jinja", ".txt", ".md", ".model", ".py"}
)
NO_PICKLES = frozenset({"latest"})  # DeepSpeed: the name of the folder beside it
METADATA, SHARD = ".metadata", ".distcp"  # of torch.distributed.checkpoint
ZIP_MAGIC = b"PK\x03\x04"  # what torch.load goes by, too

_TENSORS = {
    "_codecs": {"encode"},
    "builtins": {"bytearray", "complex", "set"},
    "collections": {"OrderedDict", "defaultdict"},
    "numpy": {"dtype", "ndarray"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "torch": {"Size", "Tensor", "device"}
    | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    | {name for name in vars(torch) if name.endswith("Storage")},
    "torch._tensor": {"_rebuild_from_type_v2"},
    "torch._utils": {
        "_rebuild_parameter",
        "_rebuild_parameter_with_state",
        "_rebuild_tensor",
        "_rebuild_tensor_v2",
        "_rebuild_tensor_v3",
    },
    "torch.nn.parameter": {"Parameter"},
    "torch.storage": {"TypedStorage", "UntypedStorage"},  # _load_from_bytes unpickles once more
}
_SHARDED = {
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}
_DEEPSPEED = {
    "deepspeed.runtime.fp16.loss_scaler": {"DynamicLossScaler", "LossScaler"},
    "deepspeed.runtime.zero.config": {"ZeroStageEnum"},
    "deepspeed.utils.tensor_fragment": {"fragment_address"},
}
# What the checkpoints of every strategy name (tests that resume them fail when one is missing), and
# nothing that does more than hold its arguments.
ALLOWED = frozenset(
    (module, name)
    for group in (_TENSORS, _SHARDED, _DEEPSPEED)
    for module, names in group.items()
    for name in names
)


class ForbiddenPickleError(Exception):
    """A file that is not loaded; the text says why."""


def check(directory: Path) -> list[str]:
    """Return why files of a checkpoint must not be loaded, by reading them; none: they may be.

    Nothing in them is run, whatever they hold. Raises OSError.
    """
    problems = []
    for name in list_files(directory):
        try:
            check_file(directory / name)
        except ForbiddenPickleError as error:
            problems.append(f"{name} {error}")
    return problems


def refuse_code(checkpoint: Path) -> None:
    """Raise ConfigurationError for a checkpoint of which something must not be loaded.

    It is not set aside for an older one: a person has to know how that came there.
    """
    problems = check(checkpoint)
    if problems:
        raise ConfigurationError(
            [f"{checkpoint / problem}" for problem in problems]
            + [
                f"nothing of {checkpoint} was loaded. Find out who wrote it; move it away to go on "
                "from the checkpoint before."
            ]
        )


def check_file(path: Path) -> None:
    """Raise ForbiddenPickleError for a file that must not be loaded."""
    if path.suffix in NEVER_UNPICKLED or path.name in NO_PICKLES:
        return
    if path.name.endswith(METADATA):
        _check_sharded(path)
    elif path.suffix != SHARD:  # those are read as their metadata says
        with path.open("rb") as file:
            _read_archive(file)


class _Inert:
    """Stands for any class or function: takes what the real one would, and does nothing."""

    def __new__(cls, *_arguments: Any, **_keywords: Any) -> "_Inert":
        return object.__new__(cls)

    def __init__(self, *_arguments: Any, **_keywords: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        """Take an item, as a list would."""

    def extend(self, items: Any) -> None:
        """Take items, as a list would."""

    def add(self, item: Any) -> None:
        """Take an item, as a set would."""


class _InertUnpickler(pickle.Unpickler):
    """Builds inert objects alone, and none for a name that is not on the list."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise ForbiddenPickleError(
                f"names {module}.{name}, which no checkpoint needs: loading it would run that."
            )
        return type(name, (_Inert,), {})

    def persistent_load(self, _pid: Any) -> Any:
        return _Inert()  # a storage: bytes elsewhere in the archive


class _Part(io.RawIOBase):
    """A part of a file, as a file of its own."""

    def __init__(self, file: BinaryIO, offset: int, length: int):
        self._file, self._offset, self._length, self._place = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._length}[whence]
        self._place = base + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._place)
        left = max(0, self._length - self._place)
        content = self._file.read(min(len(buffer), left))
        buffer[: len(content)] = content
        self._place += len(content)
        return len(content)


def _read_pickle(file: Any) -> Any:
    try:
        return _InertUnpickler(file, encoding="utf-8").load()
    except ForbiddenPickleError:
        raise
    except Exception as error:  # what a stream of bytes can raise here is not bounded
        raise ForbiddenPickleError(f"holds a pickle that cannot be read ({error}).") from error


def _read_archive(file: Any) -> None:
    """Read the pickle of an archive through torch's own reader of archives.

    Two readers may find two different pickles in one crafted archive.
    """
    magic = file.read(len(ZIP_MAGIC))
    file.seek(0)
    if magic != ZIP_MAGIC:
        raise ForbiddenPickleError(
            "is no archive of torch.save (a bare pickle, or from before torch 1.6): such files are "
            "not read."
        )
    try:
        reader = torch._C.PyTorchFileReader(file)
        records = reader.get_all_records()
        content = reader.get_record("data.pkl") if "data.pkl" in records else None
    except Exception as error:  # as above
        reason = (str(error) or repr(error)).splitlines()[0]
        raise ForbiddenPickleError(f"is an archive that torch cannot read ({reason}).") from error
    if "constants.pkl" in records or content is None:
        raise ForbiddenPickleError("is an archive of code (TorchScript) or of something else.")
    _read_pickle(io.BytesIO(content))


def _check_sharded(metadata: Path) -> None:
    """Read the metadata of a sharded checkpoint, and all parts of shards that it speaks of."""
    with metadata.open("rb") as file:
        content = _read_pickle(file)
    for shard, offset, length in sorted(_parts(content)):
        if Path(shard).name != shard or not shard.endswith(SHARD):
            raise ForbiddenPickleError(f"speaks of {shard!r}, which is no shard beside it.")
        try:
            with (metadata.parent / shard).open("rb") as file:
                _read_archive(io.BufferedReader(_Part(file, offset, length)))
        except OSError as error:
            raise ForbiddenPickleError(
                f"speaks of {shard}, which cannot be read ({error})."
            ) from error
        except ForbiddenPickleError as error:
            raise ForbiddenPickleError(
                f"speaks of bytes {offset:,} to {offset + length:,} of {shard}: that part {error}"
            ) from error


def _parts(metadata: Any) -> Iterator[tuple[str, int, int]]:
    """Yield (shard, offset, length) of everything in a sharded checkpoint."""
    try:
        infos = [vars(info) for info in vars(metadata)["storage_data"].values()]
    except (TypeError, KeyError, AttributeError) as error:
        raise ForbiddenPickleError("is no metadata of a sharded checkpoint.") from error
    for info in infos:
        shard, offset, length = map(info.get, ("relative_path", "offset", "length"))
        if (
            not (isinstance(shard, str) and isinstance(offset, int) and isinstance(length, int))
            or min(offset, length) < 0
            or info.get("transform_descriptors")
        ):
            raise ForbiddenPickleError("is no metadata of a sharded checkpoint as torch writes it.")
        yield shard, offset, length


# Lets torch build nothing but known classes from any file, whichever library loads it.

logger = logging.getLogger(__name__)

FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
FORBID = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def guard_loading(strategy: str) -> None:
    """Overrule weights_only=False in this process, for good."""
    if os.environ.pop(FORBID, None):
        logger.warning("%s is ignored: files are loaded with weights_only=True alone", FORBID)
    os.environ[FORCE] = "1"
    if strategy.startswith("zero"):
        _know_the_state_of_deepspeed()


def _know_the_state_of_deepspeed() -> None:
    """Name the classes in DeepSpeed's checkpoints that hold values and do nothing."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    torch.serialization.add_safe_globals(
        [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    )
