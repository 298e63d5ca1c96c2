"""Source files: from the paths a user gives to a sorted list of files that can be read."""

import glob
import logging
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

logger = logging.getLogger(__name__)

SourceKind = Literal["text", "jsonl", "parquet", "datasets"]

JSONL_SUFFIXES = {".jsonl", ".json-lines", ".jsonlines", ".ndjson"}
TEXT_SUFFIXES = {
    *(".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".html", ".htm", ".xml", ".org"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts", ".go"),
    *(".rs", ".rb", ".php", ".sh", ".sql", ".jl", ".r", ".scala", ".kt", ".swift", ".lua"),
}
COMPRESSION_SUFFIXES: dict[str, Literal["gzip", "zstd"]] = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True)
class SourceFile:
    """One readable file, or one datasets folder; size in bytes on disk (all its files)."""

    path: str
    kind: SourceKind
    compression: Literal["gzip", "zstd"] | None
    size: int
    mtime_ns: int


@dataclass
class SourceListing:
    """The files found for one split, what was passed over (by suffix), and what is wrong."""

    files: list[SourceFile] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def list_sources(paths: Sequence[str], document_format: str) -> SourceListing:
    """Expand files, folders (recursive) and globs, in the order given, sorted inside each.

    A file that two paths reach is taken once. Unknown suffixes are read as text only under
    `document_format` "text". Nothing is raised: faults are collected in `problems`.
    """
    listing = SourceListing()
    seen: set[str] = set()
    for given in paths:
        before = len(listing.files) + len(listing.problems)
        for path in _expand(given, listing):
            real = os.path.realpath(path)
            if real in seen:
                listing.ignored["given twice"] += 1
            else:
                seen.add(real)
                _add(path, given, document_format, listing)
        if len(listing.files) + len(listing.problems) == before:
            listing.problems.append(_nothing_found(given, listing))
    return listing


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
        else:
            listing.files.append(SourceFile(str(Path(path).absolute()), kind, compression, *found))
    elif path == given:
        listing.problems.append(
            f"{path}: unknown file type {suffix!r}; one JSON object per line needs the suffix "
            ".jsonl; give --format text to read the whole file as one document"
        )
    else:
        listing.ignored[suffix] += 1


def _kind_of(path: str) -> tuple[SourceKind | None, Literal["gzip", "zstd"] | None]:
    if Path(path).is_dir():
        return "datasets", None
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    compression = COMPRESSION_SUFFIXES.get(suffixes[-1]) if suffixes else None
    if compression:
        suffixes.pop()
    suffix = suffixes[-1] if suffixes else ""
    if suffix in JSONL_SUFFIXES:
        return "jsonl", compression
    if suffix == ".parquet" and not compression:
        return "parquet", None
    return ("text", compression) if suffix in TEXT_SUFFIXES else (None, compression)


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
