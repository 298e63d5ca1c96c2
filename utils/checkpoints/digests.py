"""Digests of files, by several cores: one SHA-256 keeps a core busy at about a gigabyte a second.

The digest of a file of up to PART_BYTES is its SHA-256, as sha256sum writes it; that of a larger
one is the SHA-256 of its parts' digests, put end to end as bytes.
"""

import concurrent.futures
import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch.serialization import get_crc32_options, set_crc32_options

PART_BYTES = 2**26
THREADS = 8  # parallel file systems like several readers
PIECE_BYTES = 2**20


class PartsDigest:
    """The digest of contents that come piece by piece."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.part, self.room = hashlib.sha256(), PART_BYTES

    def update(self, piece: memoryview) -> None:
        """Add the next piece, of any length."""
        while piece:
            if not self.room:
                self.parts.append(self.part.digest())
                self.part, self.room = hashlib.sha256(), PART_BYTES
            taken = piece[: self.room]
            self.part.update(taken)
            self.room -= len(taken)
            piece = piece[len(taken) :]

    def hexdigest(self) -> str:
        """Return the digest of all pieces so far."""
        return _of_parts([*self.parts, self.part.digest()])


@contextlib.contextmanager
def in_place_of_crc32() -> Iterator[None]:
    """Let torch.save leave CRC-32 out of what it writes, for which it reads all of it once more.

    Our digests find more, and torch.load never looks at a CRC-32: it takes a flipped bit as it is.
    Whatever unzips such an archive without torch calls it damaged.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def file_digests(paths: Iterable[Path]) -> list[str]:
    """Return the digest of each file, in order; raises OSError."""
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        started = [
            [pool.submit(_part, path, begin) for begin in _begins(path.stat().st_size)]
            for path in paths
        ]
        return [_of_parts([part.result() for part in parts]) for parts in started]


def _begins(size_bytes: int) -> range:
    return range(0, max(size_bytes, 1), PART_BYTES)


def _part(path: Path, begin: int) -> bytes:
    digest, left = hashlib.sha256(), PART_BYTES
    piece = memoryview(bytearray(min(PIECE_BYTES, left)))
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while left and (count := file.readinto(piece[:left])):
            digest.update(piece[:count])
            left -= count
    return digest.digest()


def _of_parts(parts: list[bytes]) -> str:
    return parts[0].hex() if len(parts) == 1 else hashlib.sha256(b"".join(parts)).hexdigest()
