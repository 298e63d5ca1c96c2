"""Work units: the sources cut into pieces that are prepared independently of each other.

The cut depends on the sources alone, never on the number of processes or shards: a unit becomes
one Arrow file, so the output is the same bytes however the work is divided.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from utils.config.errors import ConfigurationError
from utils.data.preparation.sources import SourceFile

SMALLEST_UNIT_BYTES = 1 << 20
LARGEST_UNIT_BYTES = 64 << 20
UNITS_WANTED = 64


@dataclass(frozen=True)
class Piece:
    """A part [start, stop) of one file.

    Bytes of an uncompressed JSONL file, row groups of a Parquet file, rows of a datasets folder;
    (0, 1) stands for any other file as a whole. `size` is in bytes on disk.
    """

    file: SourceFile
    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class WorkUnit:
    """Consecutive pieces of one split; `index` counts over all splits."""

    index: int
    split: str
    pieces: tuple[Piece, ...]
    size: int


def cut_into_units(sources: Mapping[str, Sequence[SourceFile]]) -> list[WorkUnit]:
    """Cut the files of every split into work units of about equal size.

    Raises ConfigurationError naming every Parquet file or datasets folder that cannot be opened.
    """
    total = sum(file.size for files in sources.values() for file in files)
    unit_bytes = min(max(total // UNITS_WANTED, SMALLEST_UNIT_BYTES), LARGEST_UNIT_BYTES)
    units: list[WorkUnit] = []
    problems: list[str] = []
    for split, files in sources.items():
        group: list[Piece] = []
        for piece in _pieces(files, unit_bytes, problems):
            if group and sum(p.size for p in group) + piece.size > unit_bytes:
                units.append(_unit(len(units), split, group))
                group = []
            group.append(piece)
        if group:
            units.append(_unit(len(units), split, group))
    if problems:
        raise ConfigurationError(problems)
    return units


def _unit(index: int, split: str, pieces: list[Piece]) -> WorkUnit:
    return WorkUnit(index, split, tuple(pieces), sum(piece.size for piece in pieces))


def _pieces(files: Sequence[SourceFile], unit_bytes: int, problems: list[str]) -> Iterator[Piece]:
    for file in files:
        try:
            if file.kind == "jsonl" and file.compression is None:
                yield from _byte_ranges(file, unit_bytes)
            elif file.kind == "parquet":
                yield from _row_groups(file, unit_bytes)
            elif file.kind == "datasets":
                yield from _row_ranges(file, unit_bytes)
            else:
                yield Piece(file, 0, 1, file.size)
        except (pa.ArrowException, OSError, ValueError) as error:
            problems.append(f"{file.path}: cannot be opened ({error})")


def _byte_ranges(file: SourceFile, unit_bytes: int) -> Iterator[Piece]:
    for start in range(0, file.size, unit_bytes):
        stop = min(start + unit_bytes, file.size)
        yield Piece(file, start, stop, stop - start)


def _row_groups(file: SourceFile, unit_bytes: int) -> Iterator[Piece]:
    """Group consecutive row groups up to the unit size (their compressed bytes)."""
    with pq.ParquetFile(file.path) as parquet:
        metadata = parquet.metadata
    start = size = 0
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        group_bytes = sum(group.column(c).total_compressed_size for c in range(group.num_columns))
        if size and size + group_bytes > unit_bytes:
            yield Piece(file, start, index, size)
            start, size = index, 0
        size += group_bytes
    if metadata.num_row_groups:
        yield Piece(file, start, metadata.num_row_groups, size)


def _row_ranges(file: SourceFile, unit_bytes: int) -> Iterator[Piece]:
    from datasets import load_from_disk

    rows = len(load_from_disk(file.path, keep_in_memory=False))
    rows_per_piece = max(1, rows * unit_bytes // max(file.size, 1))
    for start in range(0, rows, rows_per_piece):
        stop = min(start + rows_per_piece, rows)
        yield Piece(file, start, stop, file.size * (stop - start) // rows)
