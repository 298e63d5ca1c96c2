"""Records: what the pieces of a source hold, read as a stream with the place of each one."""

import codecs
import csv
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from utils.config.errors import ConfigurationError
from utils.data.prepare.sources import JSON_ARRAY_OPENS, Piece, SourceFile, open_source

# A document longer than this is cut at line ends. It is some hundred times any sequence length,
# and what bounds the memory of a worker: a tokenizer needs about 100 bytes per token.
LARGEST_DOCUMENT_BYTES = 4 << 20
LARGEST_LINE_BYTES = 256 << 20
ROWS_PER_READ = 64
JSON_BLOCK_BYTES = 1 << 20
_JSON_GAP = re.compile(r"[\s,]+")


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
    read_kind: dict[str, Callable[[Piece], Iterator[Record | BadRow]]] = {
        "jsonl": _read_jsonl,
        "json": _read_json,
        "csv": _read_csv,
        "parquet": partial(_read_parquet, columns=columns),
        "datasets": partial(_read_datasets, columns=columns),
        "text": partial(_read_text, column=columns[0]),
    }
    damage = (OSError, EOFError, UnicodeError, zlib.error, zstandard.ZstdError, pa.ArrowException)
    try:
        yield from read_kind[piece.file.kind](piece)
    except damage as error:
        raise ConfigurationError(
            f"{piece.file.path}: cannot be read, the file is damaged or was cut short ({error})"
        ) from error


def _read_text(piece: Piece, column: str) -> Iterator[Record | BadRow]:
    """Yield the file as one record, or as several cut at line ends when it is very long."""
    file = piece.file
    place, offset, part, rest = Place(file.path), 0, 0, b""
    with open_source(file.path, file.compression) as stream:
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
    with open_source(path, piece.file.compression) as stream:
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


def _read_json(piece: Piece) -> Iterator[Record | BadRow]:
    """Yield the objects of a JSON array, or of the array `data` of an object."""
    path = piece.file.path
    with open_source(path, piece.file.compression) as stream:
        for number, value in enumerate(_json_values(stream, path)):
            place = Place(path, "record", number)
            if isinstance(value, dict):
                yield Record(value, place)
            else:
                message = f"a JSON object is needed, found {type(value).__name__}"
                yield BadRow("not_an_object", message, place)


def _json_values(stream: IO[bytes], path: str) -> Iterator[Any]:
    """Yield the values of the array in a stream, of which one block and one value are held.

    Raises ConfigurationError where the text is no JSON: nothing tells where the next value is.
    """
    decode, scan = codecs.getincrementaldecoder("utf-8-sig")().decode, json.JSONDecoder().raw_decode
    text, is_open, number = "", False, 0
    while True:
        block = stream.read(max(JSON_BLOCK_BYTES, len(text)))
        text += decode(block, not block)
        position, fault = 0, "it ends before its array does"
        if not is_open and (opening := JSON_ARRAY_OPENS.match(text)):
            is_open, position = True, opening.end()
        while is_open:
            gap = _JSON_GAP.match(text, position)
            position = gap.end() if gap else position
            if text.startswith("]", position):
                return
            try:
                value, end = scan(text, position)
            except json.JSONDecodeError as error:
                # An error far from the end of what was read is none of reading on.
                is_cut = error.msg.startswith("Unterminated") or error.pos > len(text) - 16
                fault = f"{error.msg} in record {number}"
                block = block if is_cut else b""
                break
            except RecursionError:
                raise ConfigurationError(f"{path}: record {number} is nested too deep") from None
            if end == len(text) and block:
                break  # a number may have more digits
            yield value
            position, number = end, number + 1
        text = text[position:]
        if not block or len(text) > LARGEST_LINE_BYTES:
            raise ConfigurationError(f"{path}: malformed JSON: {fault}; repair the file")


def _read_csv(piece: Piece) -> Iterator[Record | BadRow]:
    """Yield the rows below the header of a CSV or TSV file; every field is a string."""
    path = piece.file.path
    csv.field_size_limit(LARGEST_LINE_BYTES)
    with (
        open_source(path, piece.file.compression) as raw,
        io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as stream,
    ):
        delimiter = "\t" if ".tsv" in path.lower()[-8:] else ","
        rows = csv.reader(stream, delimiter=delimiter, strict=True)
        try:
            names = next(rows, [])
            for row in rows:
                place = Place(path, "line", rows.line_num)
                if len(row) == len(names):
                    yield Record(dict(zip(names, row, strict=True)), place)
                elif row:
                    message = f"{len(row)} cells where the header names {len(names)} columns"
                    yield BadRow("malformed_csv", message, place)
        except csv.Error as error:
            raise ConfigurationError(
                f"{path}:{rows.line_num}: malformed CSV ({error}); repair the file"
            ) from error


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
    nested = [field for field in table.schema if _is_nested(field.type)]
    for row, fields in enumerate(rows, start=first_row):
        for field in nested:
            fields[field.name] = _as_json(fields[field.name], field.type)
        yield Record(fields, Place(path, "row", row))


def _is_nested(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.JsonType) or pa.types.is_nested(kind)


def _as_json(value: Any, kind: pa.DataType) -> Any:
    """Return a value of Arrow as the JSON it was made from.

    `Json()` features of `datasets` are decoded. Keys of a struct that are null are left out: Arrow
    gives every row the keys of all rows, so that nothing tells them from a null that was written.
    """
    if value is None:
        return None
    if isinstance(kind, pa.JsonType):
        return json.loads(value)
    if pa.types.is_struct(kind):
        names = [(field.name, field.type) for field in kind if value[field.name] is not None]
        return {name: _as_json(value[name], inner) for name, inner in names}
    if pa.types.is_map(kind):
        return {key: _as_json(item, kind.item_type) for key, item in value}
    if pa.types.is_nested(kind) and hasattr(kind, "value_type"):
        return [_as_json(item, kind.value_type) for item in value]
    return value


def column_names(file: SourceFile) -> list[str]:
    """Return the columns of a Parquet file or datasets folder; [] where each record tells."""
    schema = _arrow_schema(file)
    return [] if schema is None else list(schema.names)


def keys_that_arrow_adds(file: SourceFile, columns: Sequence[str]) -> list[str]:
    """Return the columns whose tool calls or schemas are structs, which fill up absent keys."""
    schema = _arrow_schema(file) or []
    return [field.name for field in schema if field.name in columns and _fills_keys(field.type)]


def _arrow_schema(file: SourceFile) -> pa.Schema | None:
    if file.kind == "parquet":
        return pq.read_schema(file.path)
    if file.kind == "datasets":
        from datasets import load_from_disk

        return load_from_disk(file.path, keep_in_memory=False).data.schema
    return None


def _fills_keys(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(
            (field.name in ("arguments", "parameters") and pa.types.is_struct(field.type))
            or _fills_keys(field.type)
            for field in kind
        )
    return pa.types.is_nested(kind) and hasattr(kind, "value_type") and _fills_keys(kind.value_type)


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
