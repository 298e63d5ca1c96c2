"""Records: what the pieces of a source hold, read as a stream with the place of each one."""

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from utils.config.errors import ConfigurationError
from utils.data.preparation.sources import SourceFile
from utils.data.preparation.work_units import Piece

# A document longer than this is cut at line ends. It is some hundred times any sequence length,
# and what bounds the memory of a worker: a tokenizer needs about 100 bytes per token.
LARGEST_DOCUMENT_BYTES = 4 << 20
LARGEST_LINE_BYTES = 256 << 20
ROWS_PER_READ = 64


@dataclass(frozen=True)
class Place:
    """Where a record stands: its file and its line (from 1), row (from 0) or byte.

    `number` counts from byte `offset` of the file, where the piece starts: the line number in
    the file is looked up only when it is shown.
    """

    path: str
    unit: str = ""
    number: int = 0
    offset: int = 0

    def __str__(self) -> str:
        if self.unit == "line":
            return f"{self.path}:{_lines_before(self.path, self.offset) + self.number}"
        return f"{self.path} {self.unit} {self.number}" if self.unit else self.path


@dataclass(frozen=True)
class Record:
    """The fields of one record; `part` > 0 continues the text of the record before it."""

    fields: Mapping[str, Any]
    place: Place
    part: int = 0


@dataclass(frozen=True)
class BadRow:
    """A record that cannot be used: `reason` is the name it is counted under."""

    reason: str
    message: str
    place: Place

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


def read_records(piece: Piece, columns: Sequence[str]) -> Iterator[Record | BadRow]:
    """Yield the records of a piece in order, in bounded memory.

    Only `columns` of Parquet files and datasets folders are read; a text file gives records with
    one field, the first of `columns`. Raises ConfigurationError when the file is damaged.
    """
    try:
        if piece.file.kind == "text":
            yield from _read_text(piece.file, columns[0])
        elif piece.file.kind == "jsonl":
            yield from _read_jsonl(piece)
        elif piece.file.kind == "parquet":
            yield from _read_parquet(piece, columns)
        else:
            yield from _read_datasets(piece, columns)
    except (OSError, EOFError, zlib.error, zstandard.ZstdError, pa.ArrowException) as error:
        raise ConfigurationError(
            f"{piece.file.path}: cannot be read, the file is damaged or was cut short ({error})"
        ) from error


def _open(file: SourceFile) -> IO[bytes]:
    if file.compression == "gzip":
        return cast(IO[bytes], gzip.open(file.path, "rb"))
    raw = Path(file.path).open("rb")  # noqa: SIM115 - the caller closes it
    if file.compression == "zstd":
        stream = zstandard.ZstdDecompressor().stream_reader(
            raw, read_across_frames=True, closefd=True
        )
        return io.BufferedReader(stream)
    return raw


def _read_text(file: SourceFile, column: str) -> Iterator[Record | BadRow]:
    """Yield the file as one record, or as several cut at line ends when it is very long."""
    place, offset, part, rest = Place(file.path), 0, 0, b""
    with _open(file) as stream:
        while True:
            block = rest + stream.read(LARGEST_DOCUMENT_BYTES - len(rest))
            # A full block may have more behind it: keep what follows its last line end.
            cut = len(block) if len(block) < LARGEST_DOCUMENT_BYTES else _last_line_end(block)
            try:
                text = block[:cut].decode("utf-8")
            except UnicodeDecodeError as error:
                yield BadRow("invalid_utf8", f"not UTF-8 at byte {offset + error.start}", place)
                return
            if text or part == 0:
                yield Record({column: text.removeprefix("\ufeff")}, place, part)
            if len(block) < LARGEST_DOCUMENT_BYTES:
                return
            rest, offset, part = block[cut:], offset + cut, part + 1


def _last_line_end(block: bytes) -> int:
    """Return where to cut: behind the last line end, else before the last UTF-8 character."""
    cut = block.rfind(b"\n") + 1
    if cut == 0:
        cut = len(block)
        while cut > len(block) - 4 and block[cut - 1] & 0xC0 == 0x80:
            cut -= 1
        cut -= 1
    return cut


def _read_jsonl(piece: Piece) -> Iterator[Record | BadRow]:
    path = piece.file.path
    with _open(piece.file) as stream:
        position = number = 0
        if piece.start:
            # The line that runs across the cut belongs to the piece before this one.
            stream.seek(piece.start - 1)
            position = piece.start - 1 + _skip_line(stream)
        offset = position
        while piece.file.compression or position < piece.stop:
            line = stream.readline(LARGEST_LINE_BYTES)
            if not line:
                return
            number += 1
            place = Place(path, "line", number, offset)
            position += len(line)
            if len(line) == LARGEST_LINE_BYTES and not line.endswith(b"\n"):
                position += _skip_line(stream)
                limit = LARGEST_LINE_BYTES >> 20
                yield BadRow("line_too_long", f"the line is longer than {limit} MiB", place)
            elif line.strip():
                yield _parse_line(line, place)


def _skip_line(stream: IO[bytes]) -> int:
    """Read to the end of the line; return the number of bytes read."""
    skipped = 0
    while block := stream.readline(1 << 20):
        skipped += len(block)
        if block.endswith(b"\n"):
            break
    return skipped


def _parse_line(line: bytes, place: Place) -> Record | BadRow:
    try:
        value = json.loads(line.decode("utf-8").removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        return BadRow("invalid_utf8", f"not UTF-8 at byte {error.start} of the line", place)
    except json.JSONDecodeError as error:
        return BadRow(
            "malformed_json", f"malformed JSON at column {error.colno} ({error.msg})", place
        )
    except (RecursionError, ValueError) as error:  # nested too deep; a number too long
        return BadRow("malformed_json", f"malformed JSON ({error})", place)
    if not isinstance(value, dict):
        kind = type(value).__name__
        return BadRow("not_an_object", f"a JSON object is needed on each line, found {kind}", place)
    return Record(value, place)


def _read_parquet(piece: Piece, columns: Sequence[str]) -> Iterator[Record | BadRow]:
    with pq.ParquetFile(piece.file.path) as parquet:
        metadata = parquet.metadata
        row = sum(metadata.row_group(i).num_rows for i in range(piece.start))
        wanted = [name for name in parquet.schema_arrow.names if name in columns]
        for batch in parquet.iter_batches(
            batch_size=ROWS_PER_READ,
            row_groups=list(range(piece.start, piece.stop)),
            columns=wanted,
            use_threads=False,
        ):
            yield from _rows(pa.Table.from_batches([batch]), piece.file.path, row)
            row += batch.num_rows


def _read_datasets(piece: Piece, columns: Sequence[str]) -> Iterator[Record | BadRow]:
    from datasets import load_from_disk

    dataset = load_from_disk(piece.file.path, keep_in_memory=False)
    dataset = dataset.select_columns([c for c in dataset.column_names if c in columns])
    dataset = dataset.select(range(piece.start, piece.stop)).with_format("arrow")
    row = piece.start
    for table in dataset.iter(batch_size=ROWS_PER_READ):
        yield from _rows(table, piece.file.path, row)
        row += table.num_rows


def _rows(table: pa.Table, path: str, first_row: int) -> Iterator[Record]:
    rows = table.to_pylist() if table.num_columns else [{}] * table.num_rows
    for row, fields in enumerate(rows, start=first_row):
        yield Record(fields, Place(path, "row", row))


@lru_cache(maxsize=64)
def _lines_before(path: str, offset: int) -> int:
    """Count the line ends in the first `offset` bytes of a file."""
    lines, left = 0, offset
    if left:
        with Path(path).open("rb") as stream:
            while left and (block := stream.read(min(left, 1 << 20))):
                lines += block.count(b"\n")
                left -= len(block)
    return lines
