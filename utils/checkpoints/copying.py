"""Copies files to storage, hashing them on the way."""

import concurrent.futures
import os
from collections.abc import Iterable
from pathlib import Path

from utils.checkpoints.digests import PartsDigest
from utils.checkpoints.files import FileRecord, flush

# Training goes on meanwhile: few threads, and pieces large enough that they seldom need Python.
THREADS = 2
PIECE_BYTES = 2**23


def copy_and_record(source: Path, target: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Copy files into `target`, to stable storage with their folders; return what they hold.

    Raises OSError.
    """
    names = list(names)
    folders = {(target / name).parent for name in names} | {target}
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        records = pool.map(lambda name: _copy(source / name, target / name), names)
        found = dict(zip(names, records, strict=True))
    for folder in sorted(folders):
        flush(folder)
    return found


def _copy(source: Path, target: Path) -> FileRecord:
    digest, size_bytes = PartsDigest(), 0
    piece = memoryview(bytearray(PIECE_BYTES))
    with source.open("rb", buffering=0) as reader, target.open("wb") as writer:
        while count := reader.readinto(piece):
            digest.update(piece[:count])
            writer.write(piece[:count])
            size_bytes += count
        writer.flush()
        os.fsync(writer.fileno())
    return FileRecord(size_bytes, digest.hexdigest())
