"""Find a split's directory and its Arrow files in what `datasets` wrote to disk."""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from utils.config.errors import ConfigurationError

STATE_FILE = "state.json"
DICT_FILE = "dataset_dict.json"


def find_split(path: str | Path, default_split: str = "train") -> Path:
    """Return the directory of one split.

    `path` may be a split itself, or a folder of splits (a `DatasetDict`, or the output of
    `prepare_data.py`), of which `default_split` is taken.
    """
    directory = Path(path).expanduser()
    if not directory.exists():
        raise ConfigurationError(f"{path}: no such directory; give the folder of a token dataset.")
    if not directory.is_dir():
        raise ConfigurationError(
            f"{path}: is a file; give the folder that `datasets` save_to_disk or prepare_data.py "
            "wrote."
        )
    for candidate in (directory, directory / default_split):
        if (candidate / STATE_FILE).is_file():
            return candidate.resolve()
    raise ConfigurationError(_why_not_a_split(directory, default_split))


def data_files(directory: Path) -> list[Path]:
    """Return a split's Arrow files in row order, as its state.json lists them."""
    state = read_json_object(directory / STATE_FILE)
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise ConfigurationError(
            f"{directory}: rows go through an indices mapping; call `flatten_indices()` on the "
            "dataset and save it again."
        )
    entries = state.get("_data_files")
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("filename"), str) for entry in entries
    ):
        raise ConfigurationError(
            f"{directory / STATE_FILE}: `_data_files` does not list file names; the dataset was "
            "not written by `datasets` save_to_disk, or is damaged. Save it again."
        )
    files = [directory / entry["filename"] for entry in entries]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigurationError(
            f"{directory}: {len(missing)} of {len(files)} data files are missing, first "
            f"{missing[0]}; copy the whole folder or prepare it again."
        )
    return files


def read_json_object(path: Path) -> dict:
    """Return the JSON object in `path`; unreadable or other content is a ConfigurationError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path}: cannot be read as JSON ({error}); save the dataset again."
        ) from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path}: not a JSON object; save the dataset again.")
    return content


def _why_not_a_split(directory: Path, default_split: str) -> str:
    splits = sorted(state.parent.name for state in directory.glob(f"*/{STATE_FILE}"))
    if splits:
        return (
            f"{directory}: has no split {default_split!r}; it has {', '.join(splits)}. "
            f"Name one, for example {directory / splits[0]}."
        )
    if (directory / DICT_FILE).is_file():
        return f"{directory}: {DICT_FILE} is there but no split is; copy the whole folder."
    return (
        f"{directory}: not a token dataset (no {STATE_FILE} in it or in {default_split}/). Make "
        "one with prepare_data.py, or with `datasets`: Dataset.save_to_disk."
    )


# Zero-copy numpy views of the list columns in memory-mapped Arrow files.

# What a complete Arrow stream ends with. A reader takes a file that was cut between two record
# batches for a shorter dataset, so its absence is looked for.
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"

# Of each segment its chunk, and from where to where in the chunk's values.
Bounds = tuple[list[int], list[int], list[int]]


@dataclass(frozen=True)
class ListColumn:
    """One list column over all record batches ("chunks") of a split.

    values: per chunk the flat values, a view into the memory map.
    first_rows: (chunks,) the first document of each chunk.
    offsets: (documents + 1,) int64, where each document starts among all values of the column.
    """

    name: str
    values: tuple[np.ndarray, ...]
    first_rows: np.ndarray
    offsets: np.ndarray

    def pieces(self, bounds: Bounds) -> list[np.ndarray]:
        """Return the values of each segment: views in the type they are stored."""
        values = self.values
        return [values[chunk][start:stop] for chunk, start, stop in zip(*bounds, strict=True)]

    def bounds(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> Bounds:
        """Return where the values [start, stop) of each document lie; int64 arrays of one length.

        Columns that share their offsets share their bounds.
        """
        chunks = self.first_rows.searchsorted(documents, side="right") - 1
        base = self.offsets[documents] - self.offsets[self.first_rows[chunks]]
        return chunks.tolist(), (base + starts).tolist(), (base + stops).tolist()

    def rows(self, chunk: int, first: int, last: int) -> np.ndarray:
        """Return the flat values of the documents [first, last), which lie in one chunk."""
        base = self.offsets[self.first_rows[chunk]]
        return self.values[chunk][self.offsets[first] - base : self.offsets[last] - base]


def read_tables(files: Sequence[Path]) -> pa.Table:
    """Return the files of a split as one memory-mapped table with the chunks they were written in.

    Raises ConfigurationError naming the file that is damaged, or whose columns differ.
    """
    tables = [_read_table(file) for file in files]
    for file, table in zip(files, tables, strict=True):
        if not table.schema.equals(tables[0].schema, check_metadata=False):
            raise ConfigurationError(
                f"{file}: its columns ({_columns(table)}) are not those of {files[0].name} "
                f"({_columns(tables[0])}); save the whole dataset with one set of features."
            )
    if not sum(table.num_rows for table in tables):
        where = files[0].parent if files else "the dataset"
        raise ConfigurationError(f"{where}: holds no documents.")
    # concat_tables compares metadata too, which says nothing about the columns.
    return pa.concat_tables([table.replace_schema_metadata() for table in tables])


def list_column(name: str, column: pa.ChunkedArray, where: str) -> ListColumn:
    """Return `column` as views; lists of integers of any width, without nulls.

    `where` names the dataset in the ConfigurationError for other types and for nulls.
    """
    if not _is_list_of_integers(column.type):
        raise ConfigurationError(
            f"{where}: column {name!r} is {column.type}; it must be a list of integers "
            "(uint16, uint32, int32 or int64 ids, int8 masks). Cast it and save again."
        )
    values, first_rows, lengths = [], [], []
    row = 0
    for chunk in column.chunks:
        if len(chunk) == 0:
            continue
        _refuse_nulls(name, chunk, row, where)
        flat, chunk_lengths = _flat_values(chunk)
        if (chunk_lengths < 0).any() or chunk_lengths.sum() != len(flat):
            raise ConfigurationError(
                f"{where}: column {name!r} has broken list offsets from row {row} on; the file is "
                "damaged. Copy or prepare it again."
            )
        _refuse_null_values(name, flat, chunk_lengths, row, where)
        values.append(_numbers(flat))
        first_rows.append(row)
        lengths.append(chunk_lengths)
        row += len(chunk)
    offsets = np.zeros(row + 1, dtype=np.int64)
    np.cumsum(np.concatenate(lengths), out=offsets[1:])
    return ListColumn(name, tuple(values), np.array(first_rows, dtype=np.int64), offsets)


def aligned_with(column: ListColumn, tokens: ListColumn, where: str) -> ListColumn:
    """Return `column` sharing the offsets of `tokens`; a row of another length is refused."""
    differing = np.flatnonzero(np.diff(column.offsets) != np.diff(tokens.offsets))
    if differing.size:
        row = int(differing[0])
        found = int(column.offsets[row + 1] - column.offsets[row])
        expected = int(tokens.offsets[row + 1] - tokens.offsets[row])
        raise ConfigurationError(
            f"{where}: row {row} has {found} {column.name} for {expected} {tokens.name} "
            f"({differing.size} such rows); every token needs exactly one."
        )
    return replace(column, offsets=tokens.offsets)


def _read_table(file: Path) -> pa.Table:
    try:
        with file.open("rb") as stream:
            stream.seek(-min(len(END_OF_STREAM), file.stat().st_size), 2)
            complete = stream.read() == END_OF_STREAM
        table = pa.ipc.open_stream(pa.memory_map(str(file))).read_all()
    except (OSError, pa.ArrowException) as error:
        raise ConfigurationError(
            f"{file}: cannot be read as an Arrow stream ({error}); it is damaged or cut short. "
            "Copy or prepare it again."
        ) from error
    if not complete:
        raise ConfigurationError(
            f"{file}: has no end-of-stream mark: it is cut short. Copy or prepare it again."
        )
    return table


def _columns(table: pa.Table) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in table.schema)


def _is_list_of_integers(kind: pa.DataType) -> bool:
    is_list = (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )
    return is_list and pa.types.is_integer(kind.value_type)


def _flat_values(chunk: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """Return a chunk's own values (a slice's parent holds more) and its list lengths (int64)."""
    if pa.types.is_fixed_size_list(chunk.type):
        width = chunk.type.list_size
        return chunk.flatten(), np.full(len(chunk), width, dtype=np.int64)
    offsets = _numbers(chunk.offsets).astype(np.int64)
    # Clipped, so that damaged offsets end as a length that does not match, not as an IndexError.
    first, last = np.clip(offsets[[0, -1]], 0, len(chunk.values)).tolist()
    return chunk.values.slice(first, max(last - first, 0)), np.diff(offsets)


def _numbers(integers: pa.Array) -> np.ndarray:
    """Return a view of integers without nulls; pyarrow's own brings pandas along."""
    kind = np.dtype(str(integers.type))
    _, buffer = integers.buffers()
    if buffer is None:
        return np.empty(0, dtype=kind)
    return np.frombuffer(buffer, kind, len(integers), integers.offset * kind.itemsize)


def _refuse_nulls(name: str, chunk: pa.Array, first_row: int, where: str) -> None:
    if chunk.null_count:
        row = first_row + int(np.flatnonzero(chunk.is_null().to_numpy(zero_copy_only=False))[0])
        raise ConfigurationError(
            f"{where}: row {row}: {name} is null; remove such rows and save the dataset again."
        )


def _refuse_null_values(
    name: str, values: pa.Array, lengths: np.ndarray, first_row: int, where: str
) -> None:
    if values.null_count:
        position = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        row = first_row + int(np.searchsorted(np.cumsum(lengths), position, side="right"))
        raise ConfigurationError(
            f"{where}: row {row}: {name} holds a null; every token needs a number."
        )


# Which columns of a token dataset mean what: token ids, loss mask, padding.

TOKENS = "input_ids"
PADDING = "attention_mask"
LABELS = "labels"
LOSS_MASKS = ("assistant_masks", "completion_mask", LABELS)
# Names under which other toolkits keep what is trained on; a prompt's mask says the opposite.
FOREIGN_MASKS = (
    *("loss_mask", "loss_masks", "assistant_mask", "completion_masks", "response_mask"),
    *("train_mask", "target_mask", "labels_mask"),
)
PROMPT_MASKS = ("prompt_mask", "prompt_masks", "source_mask", "instruction_mask")
# Columns of datasets whose rows hold several documents; read as one document each, those would
# see each other.
PACKED_MARKS = ("seq_lengths", "position_ids", "seq_idx")

logger = logging.getLogger(__name__)


def loss_mask_among(names: Iterable[str]) -> str | None:
    """Return the name of the loss-mask column, None without one."""
    return next((name for name in LOSS_MASKS if name in names), None)


def open_columns(directory: Path) -> dict[str, ListColumn]:
    """Open the columns that training reads, by name; all share one set of offsets.

    Raises ConfigurationError for columns that have no one meaning.
    """
    table = read_tables(data_files(directory))
    names = table.schema.names
    problems = _schema_problems(names)
    if problems:
        raise ConfigurationError([f"{directory}: {problem}" for problem in problems])
    tokens = list_column(TOKENS, table.column(TOKENS), str(directory))
    columns = {TOKENS: tokens}
    for name in (*LOSS_MASKS, PADDING):
        if name in names:
            column = list_column(name, table.column(name), str(directory))
            columns[name] = aligned_with(column, tokens, str(directory))
    unread = [name for name in names if name not in columns]
    if unread:
        logger.info("%s: columns not used: %s.", directory, ", ".join(unread))
    return columns


def _schema_problems(names: list[str]) -> list[str]:
    masks = [name for name in LOSS_MASKS if name in names]
    packed = [name for name in PACKED_MARKS if name in names]
    problems = [] if masks else list(_foreign_mask_problems(names))
    if TOKENS not in names:
        problems.append(
            f"no column {TOKENS!r}; it has {', '.join(names)}. Tokenize it with prepare_data.py."
        )
    if len(masks) > 1:
        problems.append(
            f"several loss masks ({', '.join(masks)}); keep the one that counts and remove the "
            "others."
        )
    if packed:
        problems.append(
            f"column {packed[0]!r} says that its rows are packed already; give one document per "
            "row, or remove the column if that is what the rows are."
        )
    return problems


def _foreign_mask_problems(names: list[str]) -> Iterator[str]:
    """Refuse a mask under a name that is not read: every token would be trained on."""
    for name in (*FOREIGN_MASKS, *PROMPT_MASKS):
        if name not in names:
            continue
        rename = f"dataset.rename_column({name!r}, 'completion_mask')"
        invert = (
            f"dataset.map(lambda row: {{'completion_mask': [1 - bit for bit in row[{name!r}]]}}, "
            f"remove_columns={name!r})"
        )
        yield (
            f"column {name!r} looks like a loss mask, but is not read under this name, so every "
            f"token would be trained on: save {invert if name in PROMPT_MASKS else rename} (1: "
            "trained on), or remove the column if every token is meant."
        )
