"""The Arrow files of a token dataset as zero-copy numpy views, and the meaning of their columns.

An Arrow list column is one flat array of values plus the offset of each document in this array. The
values of a document are thus a slice of the array.
"""

import logging
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from utils.config.errors import ConfigurationError, did_you_mean
from utils.host.atomic_files import paths_inside
from utils.host.foreign import read_object

_ROOT = Path(__file__).parents[2]
TOKENS = "input_ids"
PADDING = "attention_mask"
LABELS = "labels"
LOSS_MASKS = ("assistant_masks", "completion_mask", LABELS)
IGNORED_LABEL = -100
# Names of loss masks in other toolkits. Masks in the last line are 1 for tokens not trained on.
FOREIGN_MASKS = (
    *("loss_mask", "loss_masks", "assistant_mask", "completion_masks", "response_mask"),
    *("train_mask", "target_mask", "labels_mask"),
    *("prompt_mask", "prompt_masks", "source_mask", "instruction_mask"),
)
# Columns of packed rows. If a row of several documents were read as one document, these documents
# would attend to each other.
PACKED_MARKS = ("seq_lengths", "position_ids", "seq_idx")

STATE_FILE = "state.json"
# The last bytes of a complete Arrow stream. A file that was truncated between two record batches
# would otherwise be read as a shorter dataset.
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"

# Lists of chunk, start and stop of each segment: its values are values[chunk][start:stop].
Bounds = tuple[list[int], list[int], list[int]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ListColumn:
    """One column of a split, such as input_ids, with a list of integers for each document.

    A chunk is one of the split's Arrow record batches.

    values           for each chunk its values as a flat array, usually a view of the memory map
    first_documents  (chunks,) index of the first document of each chunk
    offsets          (documents + 1,) int64: the index of each document's first value among all
                     values of the column, then the number of all values
    """

    name: str
    values: tuple[np.ndarray, ...]
    first_documents: np.ndarray
    offsets: np.ndarray

    def pieces(self, bounds: Bounds) -> list[np.ndarray]:
        """Return for each segment in `bounds` an array of its values, a view in the stored type."""
        values = self.values
        return [values[chunk][start:stop] for chunk, start, stop in zip(*bounds, strict=True)]

    def bounds(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> Bounds:
        """Return Bounds of segments. Segment i has values [starts[i], stops[i]) of documents[i]."""
        chunks = self.first_documents.searchsorted(documents, side="right") - 1
        base = self.offsets[documents] - self.offsets[self.first_documents[chunks]]
        return chunks.tolist(), (base + starts).tolist(), (base + stops).tolist()

    def documents(self, chunk: int, first: int, last: int) -> np.ndarray:
        """Return the values of the documents [first, last) of one chunk, as one flat array."""
        base = self.offsets[self.first_documents[chunk]]
        return self.values[chunk][self.offsets[first] - base : self.offsets[last] - base]


def find_split(path: str | Path, default_split: str = "train") -> Path:
    """Return the directory of a split: `path` itself or its subfolder `default_split`.

    Raises ConfigurationError if neither is a split.
    """
    directory = Path(path).expanduser()
    for candidate in (directory, directory / default_split):
        if (candidate / STATE_FILE).is_file():
            return candidate.resolve()
    splits = sorted(state.parent.name for state in directory.glob(f"*/{STATE_FILE}"))
    if splits:
        raise ConfigurationError(
            f"{directory}: has no split {default_split!r}; it has {', '.join(splits)}. "
            f"Name one, for example {directory / splits[0]}."
        )
    what = f"not a token dataset (no {STATE_FILE} in it or in {default_split}/)"
    if directory.exists() and not directory.is_dir():
        what = "a file, not a token dataset"
    elif not directory.exists():
        what = "no such file" if directory.suffix else "no such directory"
        what += did_you_mean(directory)
    advice = "Make one with prepare_data.py --sources, or with `datasets`: Dataset.save_to_disk."
    if recipe := _recipe_that_makes(directory):
        advice = f"This makes it: python prepare_data.py --config {recipe}"
    raise ConfigurationError(f"{directory}: {what}. {advice}")


def _recipe_that_makes(directory: Path) -> Path | None:
    """Return the data recipe in recipes/data whose output_dir is `directory` or its parent."""
    for path in sorted(_ROOT.glob("recipes/data/*.yaml")):
        match = re.search(r"^output_dir: (\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        if match and Path(match[1]) in (directory, directory.parent):
            return path.relative_to(_ROOT)
    return None


def data_files(directory: Path) -> list[Path]:
    """Return the paths of a split's Arrow files, in the order in which state.json lists them.

    Raises ConfigurationError if state.json lists no usable files.
    """
    state = read_object(directory / STATE_FILE)
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise ConfigurationError(
            f"{directory}: rows go through an indices mapping; call `flatten_indices()` on the "
            "dataset and save it again."
        )
    try:
        names = [entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError):
        raise ConfigurationError(
            f"{directory / STATE_FILE}: `_data_files` does not list file names; save the dataset "
            "again with `datasets` save_to_disk."
        ) from None
    paths = paths_inside(directory, names, directory / STATE_FILE, links=True)
    return [paths[name] for name in names]


def loss_mask_among(names: Iterable[str]) -> str | None:
    """Return the column name in `names` that is a loss mask (one of LOSS_MASKS), or None."""
    return next((name for name in LOSS_MASKS if name in names), None)


def trained_on(loss_mask: str, values: np.ndarray) -> np.ndarray:
    """Return a bool for each token: whether training uses the token's loss.

    loss_mask: the column's name, one of LOSS_MASKS. values: the column's value for each token.
    """
    return values != IGNORED_LABEL if loss_mask == LABELS else values != 0


def open_columns(directory: Path, files: Sequence[Path] | None = None) -> dict[str, ListColumn]:
    """Return the columns of a split that training reads, as {name: column}.

    All columns share one array of offsets. `files`: the Arrow files, by default the files in
    state.json. Raises ConfigurationError for damaged files, for columns that differ in the length
    of a row, and for column names with an unclear meaning.
    """
    table = _read_table(directory, data_files(directory) if files is None else files)
    names = table.schema.names
    problems = schema_problems(names)
    if problems:
        raise ConfigurationError([f"{directory}: {problem}" for problem in problems])
    found = {
        name: list_column(name, table.column(name), str(directory))
        for name in (TOKENS, *LOSS_MASKS, PADDING)
        if name in names
    }
    tokens = found[TOKENS]
    for column in found.values():
        differing = np.flatnonzero(np.diff(column.offsets) != np.diff(tokens.offsets))
        if differing.size:
            raise ConfigurationError(
                f"{directory}: row {differing[0]} has another number of {column.name} than of "
                f"{tokens.name} ({differing.size} such rows); every token needs exactly one."
            )
    columns = {name: replace(column, offsets=tokens.offsets) for name, column in found.items()}
    unread = [name for name in names if name not in columns]
    if unread:
        logger.info("%s: columns not used: %s.", directory, ", ".join(unread))
    return columns


def schema_problems(names: Collection[str]) -> list[str]:
    """Return messages for the user if columns of tokenized data are missing or ambiguous."""
    masks = [name for name in LOSS_MASKS if name in names]
    problems = []
    if TOKENS not in names:
        problems.append(
            f"no column {TOKENS!r}; it has {', '.join(names)}. Tokenize it with prepare_data.py."
        )
    if len(masks) > 1:
        problems.append(f"several loss masks ({', '.join(masks)}); keep one and remove the others.")
    for name in sorted({*PACKED_MARKS} & {*names}):
        problems.append(
            f"column {name!r} says that its rows are packed already; give one document per row, or "
            "remove the column if that is what the rows are."
        )
    for name in sorted({*FOREIGN_MASKS} & {*names}) if not masks else ():
        problems.append(
            f"column {name!r} looks like a loss mask, but this name is not read, so every token "
            "would be trained on: save it as completion_mask (1: trained on, so invert the mask of "
            "a prompt), or remove the column if every token is meant."
        )
    return problems


def _read_table(directory: Path, files: Sequence[Path]) -> pa.Table:
    """Memory-map a split's Arrow files and return them as one table.

    Raises ConfigurationError if a file is damaged or all files are empty.
    """
    tables = []
    for file in files:
        try:
            mapped = pa.memory_map(str(file))
            end = mapped.read_at(len(END_OF_STREAM), max(mapped.size() - len(END_OF_STREAM), 0))
            if end != END_OF_STREAM:
                raise pa.ArrowInvalid("no end-of-stream mark")
            # Remove the schema metadata, because concat_tables refuses tables that differ in it.
            tables.append(pa.ipc.open_stream(mapped).read_all().replace_schema_metadata())
        except (OSError, pa.ArrowException) as error:
            raise ConfigurationError(
                f"{file}: not a whole Arrow stream ({error}); it is missing, damaged or cut short. "
                "Copy or prepare it again."
            ) from error
    if not sum(table.num_rows for table in tables):
        raise ConfigurationError(f"{directory}: holds no documents.")
    try:
        return pa.concat_tables(tables)
    except pa.ArrowInvalid as error:
        raise ConfigurationError(
            f"{directory}: its files have different columns; save the whole dataset with one set "
            f"of features. {' '.join(str(error).split())}"
        ) from error


def list_column(name: str, column: pa.ChunkedArray, where: str) -> ListColumn:
    """Return an Arrow column of integer lists as a ListColumn.

    Integers are views of the Arrow data, and boolean masks are copied to int8. `where`: the name of
    the data in errors. Raises ConfigurationError for other types, nulls and damaged data.
    """
    kind, are = column.type, pa.types
    is_list = are.is_list(kind) or are.is_large_list(kind) or are.is_fixed_size_list(kind)
    is_mask = is_list and are.is_boolean(kind.value_type) and name not in (TOKENS, LABELS)
    if not (is_list and are.is_integer(kind.value_type)) and not is_mask:
        raise ConfigurationError(
            f"{where}: column {name!r} is {kind}; it must be a list of integers "
            "(uint16, uint32, int32 or int64 ids, int8 or bool masks). Cast it and save again."
        )
    values, first_documents, lengths = [], [], []
    first = 0
    for chunk in column.chunks:
        if len(chunk) == 0:
            continue
        try:
            chunk.validate(full=True)  # offsets must rise and stay inside the values
            flat = chunk.flatten()  # if the chunk is a slice, only the values of the slice
            if chunk.null_count or flat.null_count:
                raise pa.ArrowInvalid("it holds a null, and every token needs a number")
        except pa.ArrowInvalid as error:
            raise ConfigurationError(
                f"{where}: column {name!r} is damaged from row {first} on ({error}). Copy or "
                "prepare it again."
            ) from error
        # Booleans are packed bits. pyarrow's own conversion to numpy imports pandas.
        values.append(np.from_dlpack(flat.cast(pa.int8()) if is_mask else flat))
        first_documents.append(first)
        lengths.append(np.from_dlpack(chunk.value_lengths()))
        first += len(chunk)
    offsets = np.zeros(first + 1, dtype=np.int64)
    np.cumsum(np.concatenate(lengths), out=offsets[1:])
    return ListColumn(name, tuple(values), np.array(first_documents, dtype=np.int64), offsets)
