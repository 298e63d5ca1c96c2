"""The files of a checkpoint: which there are, which rank writes which, what they hold."""

import concurrent.futures
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from utils.checkpoints.digests import file_digests

MANIFEST = "manifest.json"
THREADS = 8  # of fsync: parallel file systems like several writers

# Names of the files that ranks other than the first write: Trainer's random states, the shards of
# torch.distributed.checkpoint (FSDP), and those of DeepSpeed's ZeRO.
_OWNED = re.compile(
    r"(?:.*/)?(?:rng_state_(?P<random>\d+)\.pth"
    r"|__(?P<shard>\d+)_\d+\.distcp"
    r"|(?:[a-z0-9]+_)?zero_pp_rank_(?P<zero>\d+)_[^/]*)"
)


@dataclass(frozen=True)
class FileRecord:
    """What a file held when it was committed; for `sha256` see utils/checkpoints/digests.py."""

    size_bytes: int
    sha256: str


def owner(name: str) -> int:
    """Return the rank that writes the file of this name, a path within the checkpoint."""
    match = _OWNED.fullmatch(name)
    return int(next(filter(None, match.groups()))) if match else 0


def list_files(directory: Path) -> list[str]:
    """Return the paths within `directory` of all files in it, sorted, but the manifest itself.

    What NFS keeps of deleted files that are still open (.nfsXXXX) does not count.
    """
    names = []
    for folder, folders, files in os.walk(directory):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        for name in [*files, *links]:
            path = (Path(folder) / name).relative_to(directory).as_posix()
            if path != MANIFEST and not name.startswith(".nfs"):
                names.append(path)
    return sorted(names)


def flush_and_record(directory: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Bring files, and the folders they are in, to stable storage; return what they hold.

    A file is hashed while it is on its way, so hashing costs little where the disk is slower.
    Raises OSError.
    """
    names = list(names)
    folders = {(directory / name).parent for name in names} | {directory}
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        flushed = [pool.submit(flush, directory / name) for name in names]
        digests = file_digests(directory / name for name in names)
        for work in flushed:
            work.result()
    for folder in sorted(folders):
        flush(folder)
    return {
        name: FileRecord((directory / name).stat().st_size, digest)
        for name, digest in zip(names, digests, strict=True)
    }


def file_problems(
    directory: Path, records: Mapping[str, FileRecord], suffixes: Collection[str] | None = None
) -> list[str]:
    """Compare the files of a checkpoint with what was committed; return what differs.

    Names and sizes come first: most damage shows there, without reading. With `suffixes` only the
    files that end so are read then.
    """
    there = set(list_files(directory))
    problems = [f"{name} is missing" for name in sorted(records.keys() - there)]
    problems += [f"{name} was not committed" for name in sorted(there - records.keys())]
    whole = []
    for name in sorted(there & records.keys()):
        path = directory / name
        if path.is_symlink() or not path.is_file():
            problems.append(f"{name} is no regular file")
        elif path.stat().st_size != records[name].size_bytes:
            problems.append(
                f"{name} has {path.stat().st_size:,} bytes, not {records[name].size_bytes:,}"
            )
        elif suffixes is None or path.suffix in suffixes:
            whole.append(name)
    if problems:
        return problems
    digests = file_digests(directory / name for name in whole)
    return [
        f"{name} has other contents"
        for name, digest in zip(whole, digests, strict=True)
        if digest != records[name].sha256
    ]


def flush(path: Path) -> None:
    """Bring a file or a folder to stable storage; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
