"""Work units: the sources cut into pieces that are prepared independently of each other.

The cut depends on the sources alone, never on the number of processes or shards: a unit becomes
one Arrow file, so the output is the same bytes however the work is divided.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from utils.config.errors import ConfigurationError
from utils.data.preparation.sources import SourceFile

SMALLEST_UNIT_BYTES = 1 << 20
LARGEST_UNIT_BYTES = 64 << 20
UNITS_WANTED = 64
# A source of which little is wanted is read in few places, so that each holds whole documents.
LEAST_TOKENS_OF_A_UNIT = 1 << 13


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
    """Consecutive pieces of one source; `index` counts over all sources, as `source` does.

    `max_tokens`: the unit ends before the document that would go beyond it.
    """

    index: int
    split: str
    pieces: tuple[Piece, ...]
    size: int
    source: int = 0
    max_tokens: int | None = None


@dataclass(frozen=True)
class SourceOfUnits:
    """The files of one source, the split they go to, and how many tokens may be taken of them."""

    split: str
    files: Sequence[SourceFile]
    max_tokens: int | None = None


def cut_into_units(sources: Sequence[SourceOfUnits]) -> list[WorkUnit]:
    """Cut the files of every source into work units of about equal size.

    A cap in tokens is shared out over units spread evenly over the source, so that what is taken
    depends on no other unit. Raises ConfigurationError naming every Parquet file or datasets folder
    that cannot be opened.
    """
    total = sum(file.size for source in sources for file in source.files)
    unit_bytes = min(max(total // UNITS_WANTED, SMALLEST_UNIT_BYTES), LARGEST_UNIT_BYTES)
    units: list[WorkUnit] = []
    problems: list[str] = []
    for number, source in enumerate(sources):
        groups = list(_groups(_pieces(source.files, unit_bytes, problems), unit_bytes))
        for group, max_tokens in _capped(groups, source.max_tokens):
            size = sum(piece.size for piece in group)
            units.append(WorkUnit(len(units), source.split, tuple(group), size, number, max_tokens))
    if problems:
        raise ConfigurationError(problems)
    return units


def _groups(pieces: Iterable[Piece], unit_bytes: int) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    for piece in pieces:
        if group and sum(p.size for p in group) + piece.size > unit_bytes:
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _capped(
    groups: Sequence[list[Piece]], max_tokens: int | None
) -> Iterator[tuple[list[Piece], int | None]]:
    """Yield the groups that are read, each with its share of the tokens."""
    if max_tokens is None:
        yield from ((group, None) for group in groups)
        return
    read = max(1, min(len(groups), max_tokens // LEAST_TOKENS_OF_A_UNIT)) if groups else 0
    for number in range(read):
        share = max_tokens * (number + 1) // read - max_tokens * number // read
        yield groups[(2 * number + 1) * len(groups) // (2 * read)], share


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
