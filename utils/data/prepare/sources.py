"""Source files: from the paths a user gives to a sorted list of files that can be read."""

import glob
import gzip
import io
import json
import logging
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal, cast

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from utils.config.errors import ConfigurationError

logger = logging.getLogger(__name__)

SourceKind = Literal["text", "jsonl", "json", "csv", "parquet", "datasets"]

JSONL_SUFFIXES = {".jsonl", ".json-lines", ".jsonlines", ".ndjson"}
CSV_SUFFIXES = {".csv", ".tsv"}
TEXT_SUFFIXES = {
    *(".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".html", ".htm", ".xml", ".org"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts", ".go"),
    *(".rs", ".rb", ".php", ".sh", ".sql", ".jl", ".r", ".scala", ".kt", ".swift", ".lua"),
}
Compression = Literal["gzip", "zstd"]
COMPRESSION_SUFFIXES: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}
# What comes before the first record: an array, or an object with scalars before its array `data`.
JSON_ARRAY_OPENS = re.compile(
    r"""\s*(?:\{\s*(?:"[^"]*"\s*:\s*(?:"[^"]*"|[\w.+-]+)\s*,\s*)*"data"\s*:\s*)?\["""
)
SNIFFED_BYTES = 1 << 16

# The names of splits as the Hub's files and folders have them, and what they are called here.
SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-]+")
_ABOUT_A_FOLDER = re.compile(
    r"(readme|licen[cs]e|changelog|citation)[^.]*(\.\w+)?|(dataset_infos?|config|metadata)\.json",
    re.IGNORECASE,
)
_SHARD_OF_SPLIT = re.compile(r"(.+)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?")


@dataclass(frozen=True)
class SourceFile:
    """One readable file, or one datasets folder; size in bytes on disk (all its files)."""

    path: str
    kind: SourceKind
    compression: Compression | None
    size: int
    mtime_ns: int


@dataclass
class SourceListing:
    """The files found, what was passed over (by suffix), what to know of it, and what is wrong."""

    files: list[SourceFile] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def list_sources(
    paths: Sequence[str], document_format: str, split: str = "train", *, is_named: bool = False
) -> SourceListing:
    """Expand files, folders (recursive) and globs, in the order given, sorted inside each.

    Of a folder (or pattern) whose file names tell several splits, as on the Hub, `split` is taken;
    `is_named`: the user named it, so that nothing else will do. A file that two paths reach is
    taken once. Unknown suffixes are read as text only under `document_format` "text". Nothing is
    raised: faults are collected in `problems`.
    """
    listing = SourceListing()
    seen: set[str] = set()
    for given in paths:
        before = len(listing.files) + len(listing.problems)
        found = _without_readmes(given, list(_expand(given, listing)), listing)
        for path in _of_split(given, found, split, is_named, listing):
            real = os.path.realpath(path)
            if real in seen:
                listing.ignored["given twice"] += 1
            else:
                seen.add(real)
                _add(path, given, document_format, listing)
        if len(listing.files) + len(listing.problems) == before:
            listing.problems.append(_nothing_found(given, listing))
    return listing


def open_source(path: str, compression: Compression | None) -> IO[bytes]:
    """Open a file for reading what was compressed."""
    if compression == "gzip":
        return cast(IO[bytes], gzip.open(path, "rb"))
    raw = Path(path).open("rb")  # noqa: SIM115 - the caller closes it
    if compression == "zstd":
        stream = zstandard.ZstdDecompressor().stream_reader(
            raw, read_across_frames=True, closefd=True
        )
        return io.BufferedReader(stream)
    return raw


def _without_readmes(given: str, paths: list[str], listing: SourceListing) -> list[str]:
    """Leave out what describes a folder of records: it is no document of it."""
    if not any(_holds_records(path) for path in paths if path != given):
        return paths
    kept = [path for path in paths if not _ABOUT_A_FOLDER.fullmatch(Path(path).name)]
    if len(kept) < len(paths):
        listing.ignored["README or the like"] += len(paths) - len(kept)
    return kept


def _of_split(
    given: str, paths: list[str], split: str, is_named: bool, listing: SourceListing
) -> list[str]:
    """Return the paths that belong to a split, where folders or names of files tell several."""
    paths = [_split_of_dict(path, split, listing) for path in paths]
    if paths == [given]:
        return paths
    by_split: dict[str, list[str]] = {}
    for path in paths:
        by_split.setdefault(_split_name(path, given), []).append(path)
    named = sorted(name for name in by_split if name)
    wanted = SPLIT_NAMES.get(split, split)
    if len(named) < 2 and not is_named:
        return paths
    if wanted in by_split:
        others = [name for name in by_split if name != wanted]
        counts = ", ".join(f"{name or 'no split'} ({len(by_split[name])} files)" for name in others)
        if others:
            listing.notes.append(
                f"{given}: split {wanted} is taken ({len(by_split[wanted])} files); not used: "
                f"{counts}; to evaluate on one: --eval_sources {others[0] or 'NAME'}={given}"
            )
        return _in_one_format(given, by_split[wanted], listing)
    if is_named or not glob.has_magic(given):
        listing.problems.append(
            f"{given}: has no split {split!r}; its files are of {', '.join(named) or 'no split'}: "
            f"name files, as in {Path(by_split[named[-1] if named else ''][0])}, or in a recipe "
            f"give sources: [{{path: {given}, split: {named[-1] if named else 'NAME'}}}]"
        )
        return []
    return paths


def _in_one_format(given: str, paths: list[str], listing: SourceListing) -> list[str]:
    """Return the files of a split in one format: some datasets are published in several."""
    by_suffix: dict[str, list[str]] = {}
    for path in paths:
        by_suffix.setdefault(Path(path).name.partition(".")[2], []).append(path)
    if len(by_suffix) < 2:
        return paths
    chosen = "parquet" if "parquet" in by_suffix else next(iter(by_suffix))
    others = ", ".join(f"{len(by_suffix[s])} .{s}" for s in by_suffix if s != chosen)
    listing.notes.append(
        f"{given}: the split is there in several formats; .{chosen} is taken, not used: {others}; "
        "name files to choose others"
    )
    return by_suffix[chosen]


def _split_of_dict(path: str, split: str, listing: SourceListing) -> str:
    """Return the folder of a split of a DatasetDict, if there is one; any other path as it is."""
    folder = Path(path)
    if not (folder / "dataset_dict.json").is_file() or not (folder / split).is_dir():
        return path
    others = [each.name for each in sorted(folder.iterdir()) if each.is_dir()]
    others.remove(split)
    if others:
        listing.notes.append(
            f"{path}: split {split} is taken; not used: {', '.join(others)}; to evaluate on one: "
            f"--eval_sources {others[0]}={path}"
        )
    return str(folder / split)


def _split_name(path: str, given: str) -> str:
    """Return the split that the name of a file, or of a folder above it, tells; "" for none."""
    if not _holds_records(path):
        return ""
    parts = Path(os.path.relpath(path, given)).parts if Path(given).is_dir() else (Path(path).name,)
    stem = parts[-1].split(".")[0]
    words_of_name = re.split(r"[-_\s]", stem.lower())
    shard = _SHARD_OF_SPLIT.fullmatch(stem)
    if shard and any(word in SPLIT_NAMES for word in words_of_name):
        return SPLIT_NAMES.get(shard[1], shard[1])  # such as train_sft, a split of its own
    for words in (words_of_name, [part.lower() for part in parts[:-1]]):
        named = {SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES}
        if len(named) == 1:
            return named.pop()
    return ""


def _holds_records(path: str) -> bool:
    suffixes = {suffix.lower() for suffix in Path(path).suffixes[-2:]}
    return (
        bool(suffixes & {*JSONL_SUFFIXES, *CSV_SUFFIXES, ".json", ".parquet"})
        or Path(path).is_dir()
    )


def _nothing_found(given: str, listing: SourceListing) -> str:
    passed_over = ", ".join(sorted(listing.ignored)) or "nothing"
    return (
        f"{given}: empty source, no file in it can be read (passed over: {passed_over}); "
        "give --format text to read any suffix as text"
    )


def _expand(given: str, listing: SourceListing) -> Iterator[str]:
    if os.path.lexists(given):
        yield from _walk(given)
    elif glob.has_magic(given):
        matches = sorted(glob.glob(given, recursive=True))  # noqa: PTH207 - keeps absolute globs
        if not matches:
            listing.problems.append(f"{given}: no file matches this pattern")
        for match in matches:
            # A recursive pattern lists folders next to the files inside them.
            if not Path(match).is_dir() or "**" not in given:
                yield from _walk(match)
    elif _HUB_NAME.fullmatch(given):
        listing.problems.append(
            f"{given}: no such file or folder; if it is a dataset of the Hub, fetch its files "
            f"where there is a network: hf download --repo-type dataset {given} --local-dir "
            f"data/{given.split('/')[1]}, and give --sources data/{given.split('/')[1]}"
        )
    else:
        listing.problems.append(f"{given}: no such file or folder")


def _walk(path: str) -> Iterator[str]:
    """Yield the files below a path, sorted; a datasets folder counts as one file."""
    if not Path(path).is_dir() or is_datasets_folder(path):
        yield path
        return
    visited: set[str] = set()
    found = []
    for folder, names, files in os.walk(path, followlinks=True):
        real = os.path.realpath(folder)
        if real in visited:  # a symbolic link back up: without this the walk never ends
            names.clear()
            continue
        visited.add(real)
        if is_datasets_folder(folder):
            names.clear()
            found.append(folder)
            continue
        names[:] = [name for name in names if not name.startswith(".")]
        found.extend(str(Path(folder) / name) for name in files if not name.startswith("."))
    yield from sorted(found)


def is_datasets_folder(path: str) -> bool:
    """Tell whether `datasets` wrote this folder (save_to_disk of a Dataset or DatasetDict)."""
    folder = Path(path)
    return (folder / "dataset_dict.json").is_file() or (
        (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file()
    )


def _add(path: str, given: str, document_format: str, listing: SourceListing) -> None:
    kind, compression = _kind_of(path)
    if kind is None and document_format == "text":
        kind = "text"
    suffix = Path(path).suffix or "no suffix"
    try:
        found = _stat(path, kind)
    except OSError as error:
        listing.problems.append(f"{path}: cannot be read ({error.strerror})")
        return
    if found is None:
        listing.problems.append(f"{path}: not a regular file")
    elif (Path(path) / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in Path(path).iterdir() if entry.is_dir())
        listing.problems.append(
            f"{path}: a DatasetDict of {len(splits)} splits; name one, as in {path}/{splits[0]}"
            if splits
            else f"{path}: a DatasetDict without splits"
        )
    elif kind is not None:
        if path == given and found[0] == 0:
            listing.problems.append(f"{path}: empty source, the file has 0 bytes")
        elif found[0] < 1024 and _head(path, None, 40).startswith("version https://git-lfs"):
            listing.problems.append(
                f"{path}: is a pointer of Git LFS, not the file: fetch it with git lfs pull"
            )
        else:
            listing.files.append(SourceFile(str(Path(path).absolute()), kind, compression, *found))
    elif path == given:
        listing.problems.append(
            f"{path}: "
            + (
                'JSON that is no array of records, no {"data": [...]} and not one record a line'
                if ".json" in suffix
                else f"unknown file type {suffix!r}; records come as .jsonl, .json, .csv, .tsv or "
                ".parquet"
            )
            + "; give --format text to read the whole file as one document"
        )
    else:
        listing.ignored[suffix] += 1


def _kind_of(path: str) -> tuple[SourceKind | None, Compression | None]:
    if Path(path).is_dir():
        return "datasets", None
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    compression = COMPRESSION_SUFFIXES.get(suffixes[-1]) if suffixes else None
    if compression:
        suffixes.pop()
    suffix = suffixes[-1] if suffixes else ""
    if suffix in JSONL_SUFFIXES:
        # Arrays under this name are met often enough.
        is_array = _head(path, compression, 256).lstrip().startswith("[")
        return "json" if is_array else "jsonl", compression
    if suffix == ".json":
        return _kind_of_json(path, compression), compression
    if suffix in CSV_SUFFIXES:
        return "csv", compression
    if suffix == ".parquet" and not compression:
        return "parquet", None
    return ("text", compression) if suffix in TEXT_SUFFIXES else (None, compression)


def _kind_of_json(path: str, compression: Compression | None) -> SourceKind | None:
    """Tell an array of records from one record a line; None for any other JSON."""
    text = _head(path, compression, SNIFFED_BYTES)
    if not text.strip() or JSON_ARRAY_OPENS.match(text):
        return "json"
    line, end, _ = text.lstrip().partition("\n")
    if not end:
        return "jsonl"
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return None
    return "jsonl"


def _head(path: str, compression: Compression | None, size: int) -> str:
    """Return how a file begins; "" where it cannot be read, which its reader will say."""
    if not Path(path).is_file():  # a pipe would block
        return ""
    try:
        with open_source(path, compression) as stream:
            return stream.read(size).decode("utf-8-sig", errors="replace")
    except (OSError, EOFError, zlib.error, zstandard.ZstdError):
        return ""


def _stat(path: str, kind: SourceKind | None) -> tuple[int, int] | None:
    """Return (bytes, mtime in ns) of a file or datasets folder; None if it is something else."""
    if kind == "datasets":
        found = [entry.stat() for entry in sorted(Path(path).glob("*.arrow"))]
        return sum(s.st_size for s in found), max((s.st_mtime_ns for s in found), default=0)
    status = Path(path).stat()
    if not stat.S_ISREG(status.st_mode):  # a pipe would block the reader for ever
        return None
    if not os.access(path, os.R_OK):
        raise PermissionError(13, "permission denied")
    return status.st_size, status.st_mtime_ns


# Work units: the sources cut into pieces that are prepared independently of each other.

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
