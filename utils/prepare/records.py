"""Readers of all kinds of source files: cut a file into parts, and read the records of a part."""

import codecs
import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from utils.config.errors import ConfigurationError
from utils.config.own_code import load_own
from utils.data.arrow_columns import STATE_FILE
from utils.host.atomic_files import paths_inside
from utils.host.foreign import read_object
from utils.prepare.hints import CHAT_COLUMNS
from utils.prepare.messages import are_messages
from utils.prepare.rows import detect_formats
from utils.prepare.source_files import SourceFile, open_source
from utils.prepare.values import FILTERED, BadRow, Location, Record

ROWS_PER_READ = 64


@dataclass(frozen=True)
class FilePart:
    """A part [start, stop) of a file. size: approximate bytes on disk.

    `start` and `stop` count bytes in uncompressed JSONL, row groups in Parquet, and rows in a
    datasets folder. Any other file has one part, with start 0 and stop 1.
    """

    file: SourceFile
    start: int
    stop: int
    size: int


Records = Iterator[Record | BadRow]


def cut_file(file: SourceFile, part_bytes: int) -> Iterator[FilePart]:
    """Yield parts of about `part_bytes` bytes, or one part if the file cannot be cut."""
    if file.kind == "parquet":
        metadata = pq.read_metadata(file.path)
        start = size = 0
        for index in range(metadata.num_row_groups):
            group = metadata.row_group(index)
            added = sum(group.column(c).total_compressed_size for c in range(group.num_columns))
            if size and size + added > part_bytes:
                yield FilePart(file, start, index, size)
                start, size = index, 0
            size += added
        if metadata.num_row_groups:
            yield FilePart(file, start, metadata.num_row_groups, size)
        return
    total = step = 1  # the whole file
    if file.kind == "jsonl" and file.compression is None:
        total, step = file.size, part_bytes
    elif file.kind == "datasets":
        total = len(_load_folder(file.path))
        step = max(1, total * part_bytes // max(file.size, 1))
    for start in range(0, total, step):
        stop = min(start + step, total)
        yield FilePart(file, start, stop, file.size * (stop - start) // total)


def read_records(part: FilePart, columns: Sequence[str] | None) -> Records:
    """Yield the records of a part in order. Raises ConfigurationError if the file is damaged.

    columns: the columns to read from Parquet files and datasets folders. None means all columns. A
    text file is one record with one field, which is named columns[0] or, by default, "text". Text
    files and JSON files are loaded into memory as a whole.
    """
    try:
        yield from READERS[part.file.kind](part, columns)
    except UnicodeError as error:
        raise ConfigurationError(f"{part.file.path}: {_utf8_fault(part.file, error)}") from error
    except (OSError, pa.ArrowException) as error:
        raise ConfigurationError(
            f"{part.file.path}: cannot be read, the file is damaged or was cut short ({error})"
        ) from error


def _utf8_fault(file: SourceFile, error: UnicodeError) -> str:
    with open_source(file.path, file.compression) as stream:
        is_utf16 = stream.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    encoding = "UTF-16" if is_utf16 else "WINDOWS-1252"
    return f"not UTF-8 ({error}); convert it, for example with iconv -f {encoding} -t UTF-8"


def converter(own_format: str) -> Callable[[Record], Record | BadRow]:
    """Return a function that converts a record with the user's function `own_format`.

    own_format: FILE.py:NAME or MODULE:NAME. "" means that records stay unchanged. The returned
    function returns a BadRow if the user's function fails or returns None.
    """
    if not own_format:
        return lambda record: record
    function = load_own(own_format)  # load once, because loading reads the file

    def convert(record: Record) -> Record | BadRow:
        try:
            result = function(dict(record.fields))
            fields = None if result is None else dict(result)
        except Exception as error:  # the user's function may raise anything
            fault = f"{own_format}: {type(error).__name__}: {error}"
            return BadRow("own_format", fault, record.location)
        if fields is None:
            return BadRow(FILTERED, f"left out by {own_format}", record.location)
        return replace(record, fields=fields, left_out=())

    return convert


def _read_text(part: FilePart, columns: Sequence[str] | None) -> Records:
    """Yield the whole file as one record."""
    file, column = part.file, columns[0] if columns else "text"
    location = Location(file.path)
    with open_source(file.path, file.compression) as stream:
        try:
            text = stream.read().decode("utf-8")
        except UnicodeDecodeError as error:
            yield BadRow("invalid_utf8", f"not UTF-8 at byte {error.start}", location)
            return
    # Remove the byte order mark and end lines with \n, as the text loader of `datasets` does.
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    yield Record({column: text}, location)


def _read_jsonl(part: FilePart, _: Sequence[str] | None) -> Records:
    with open_source(part.file.path, part.file.compression) as stream:
        position = number = 0
        if part.start:
            # A line that begins before this part belongs to the earlier part.
            stream.seek(part.start - 1)
            position = part.start - 1 + len(stream.readline())
        offset = position
        while part.file.compression or position < part.stop:
            line = stream.readline()
            if not line:
                return
            number, position = number + 1, position + len(line)
            if not line.strip():
                continue
            location = Location(part.file.path, "line", number, offset)
            try:
                text = line.decode("utf-8").removeprefix("\ufeff")
                value = json.loads(text, parse_constant=_json_constant)
            except UnicodeDecodeError as error:
                message = f"not UTF-8 at byte {error.start} of the line"
                yield BadRow("invalid_utf8", message, location)
            except (RecursionError, ValueError) as error:  # also very long numbers
                message = f"malformed JSON ({str(error).replace('line 1 column', 'column')})"
                yield BadRow("malformed_json", message, location)
            else:
                yield _record_of_json(value, location)


def _json_constant(word: str) -> float | None:
    """Return None for NaN, which pandas writes for a missing text, and a float for Infinity."""
    return None if word == "NaN" else float(word)


def _record_of_json(value: Any, location: Location) -> Record | BadRow:
    if isinstance(value, dict):
        return Record(value, location)
    if are_messages(value):
        return Record({"messages": value}, location)
    message = f"a record must be a JSON object, found {type(value).__name__}"
    return BadRow("not_an_object", message, location)


def _read_json(part: FilePart, _: Sequence[str] | None) -> Records:
    """Yield the records of a JSON file that has one JSON value, or several one after another."""
    path = part.file.path
    with open_source(path, part.file.compression) as stream:
        text = stream.read().decode("utf-8-sig").strip()
    values, start, decoder = [], 0, json.JSONDecoder(parse_constant=_json_constant)
    while start < len(text):
        try:
            value, stop = decoder.raw_decode(text, start)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ConfigurationError(f"{path}: malformed JSON ({error}); repair the file") from None
        values.append(value)
        start = stop + len(text[stop:]) - len(text[stop:].lstrip())
    records = _records_of_json(path, values[0]) if len(values) == 1 else values
    for number, value in enumerate(records):
        yield _record_of_json(value, Location(path, "record", number))


def _records_of_json(path: str, value: Any) -> list[Any]:
    """Return the records in a JSON value: an array, an object with an array, or one record.

    Raises ConfigurationError for a pandas table, and for an object with several arrays of records
    if no array has the key "data".
    """
    if isinstance(value, list):
        return [value] if are_messages(value) else value
    if isinstance(value, dict) and {"columns", "data"} <= value.keys():
        raise ConfigurationError(f'{path}: a table of pandas: write it with orient="records"')
    if not isinstance(value, dict) or detect_formats(value):
        return [value]
    arrays = [
        key
        for key, item in value.items()
        if key not in {*CHAT_COLUMNS, "history"}
        and isinstance(item, list)
        and item
        and (isinstance(item[0], dict) or are_messages(item[0]))
    ]
    if len(arrays) > 1 and "data" not in arrays:
        raise ConfigurationError(
            f"{path}: one object with several lists of records ({', '.join(arrays)}): write each "
            "list to a file of its own"
        )
    return value["data" if "data" in arrays else arrays[0]] if arrays else [value]


def _read_csv(part: FilePart, _: Sequence[str] | None) -> Records:
    """Yield each row of a CSV or TSV file as a record: {column name from the header: string}."""
    path = part.file.path
    csv.field_size_limit(1 << 28)
    with (
        open_source(path, part.file.compression) as raw,
        io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as stream,
    ):
        header, lines_above = stream.readline(), 0
        if header.lower().startswith("sep="):  # Excel writes this line above the header
            header, lines_above = stream.readline(), 1
        delimiter = _delimiter(header, "\t" if ".tsv" in path.lower()[-8:] else ",")
        rows = csv.reader(chain([header], stream), delimiter=delimiter, strict=True)
        try:
            names = [name.strip() for name in next(rows, [])]
            if twice := [name for name, number in Counter(names).items() if name and number > 1]:
                raise ConfigurationError(
                    f"{path}: its header has {twice[0]!r} twice, so one of these columns would be "
                    "lost: rename it"
                )
            for row in rows:
                location = Location(path, "line", rows.line_num + lines_above)
                if len(row) == len(names):
                    yield Record(dict(zip(names, row, strict=True)), location)
                elif row:
                    message = f"{len(row)} cells where the header names {len(names)} columns"
                    yield BadRow("malformed_csv", message, location)
        except csv.Error as error:
            raise ConfigurationError(
                f"{path}:{rows.line_num + lines_above}: malformed CSV ({error}); repair the file"
            ) from error


def _delimiter(header: str, default: str) -> str:
    """Return `default` if it separates the header, else the delimiter that gives most columns."""
    column_counts: dict[str, int] = {}
    for delimiter in (default, *",;|\t"):
        with suppress(csv.Error):
            names = next(csv.reader([header], delimiter=delimiter, strict=True), [])
            column_counts[delimiter] = len(names)
    if column_counts.get(default, 0) > 1 or not column_counts:
        return default
    return max(column_counts, key=column_counts.__getitem__)


def _read_parquet(part: FilePart, columns: Sequence[str] | None) -> Records:
    with pq.ParquetFile(part.file.path) as parquet:
        row = sum(parquet.metadata.row_group(i).num_rows for i in range(part.start))
        names = parquet.schema_arrow.names
        left_out = tuple(name for name in names if columns is not None and name not in columns)
        for batch in parquet.iter_batches(
            batch_size=ROWS_PER_READ,
            row_groups=list(range(part.start, part.stop)),
            columns=[name for name in names if name not in left_out],
            use_threads=False,
        ):
            yield from _table_records(pa.Table.from_batches([batch]), part.file.path, row, left_out)
            row += batch.num_rows


def _read_datasets(part: FilePart, columns: Sequence[str] | None) -> Records:
    dataset = _load_folder(part.file.path)
    names = dataset.column_names
    left_out = tuple(name for name in names if columns is not None and name not in columns)
    dataset = dataset.remove_columns(list(left_out)).select(range(part.start, part.stop))
    row = part.start
    for table in dataset.with_format("arrow").iter(batch_size=ROWS_PER_READ):
        yield from _table_records(table, part.file.path, row, left_out)
        row += table.num_rows


def _load_folder(path: str) -> Any:
    from datasets import load_from_disk

    state = Path(path) / STATE_FILE
    kinds = ("_data_files", "_indices_files", "_indices_data_files")
    files = [file for kind in kinds for file in read_object(state).get(kind) or ()]
    names = [file.get("filename") if isinstance(file, dict) else None for file in files]
    paths_inside(Path(path), names, state, links=True)
    return load_from_disk(path, keep_in_memory=False)


def _table_records(
    table: pa.Table, path: str, first_row: int, left_out: tuple[str, ...]
) -> Iterator[Record]:
    rows = table.to_pylist() if table.num_columns else [{}] * table.num_rows
    nested = {
        field.name: field.type
        for field in table.schema
        if isinstance(field.type, pa.JsonType) or not pa.types.is_primitive(field.type)
    }
    for row, fields in enumerate(rows, start=first_row):
        decoded = {name: _json_value(fields[name], kind) for name, kind in nested.items()}
        yield Record({**fields, **decoded}, Location(path, "row", row), left_out=left_out)


def _json_value(value: Any, kind: pa.DataType) -> Any:
    """Convert an Arrow value to the JSON value it was written from. kind: the Arrow type.

    Null fields of a struct are left out, because Arrow gives each row the keys of all rows and
    fills missing keys with null. Features of type `Json()` are decoded.
    """
    if value is None:
        return None
    if isinstance(kind, pa.JsonType):
        return json.loads(value)
    if pa.types.is_struct(kind):
        names = [(field.name, field.type) for field in kind if value[field.name] is not None]
        return {name: _json_value(value[name], inner) for name, inner in names}
    if pa.types.is_map(kind):
        return {key: _json_value(item, kind.item_type) for key, item in value}
    if pa.types.is_nested(kind) and hasattr(kind, "value_type"):
        return [_json_value(item, kind.value_type) for item in value]
    if isinstance(value, bytes):  # some writers store texts as bytes
        with suppress(UnicodeDecodeError):  # check_text refuses other bytes, such as pictures
            value = value.decode()
    return value


READERS: dict[str, Callable[[FilePart, Sequence[str] | None], Records]] = {
    "jsonl": _read_jsonl,
    "json": _read_json,
    "csv": _read_csv,
    "parquet": _read_parquet,
    "datasets": _read_datasets,
    "text": _read_text,
}
