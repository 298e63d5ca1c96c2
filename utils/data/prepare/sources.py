"""Source files: from the paths a user gives to a sorted list of files that can be read."""

import glob
import gzip
import io
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal, cast

import zstandard

SourceKind = Literal["text", "jsonl", "json", "csv", "parquet", "datasets"]
Compression = Literal["gzip", "zstd"]

TEXT_SUFFIXES = (
    *(".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".html", ".htm", ".xml", ".org"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts", ".go"),
    *(".rs", ".rb", ".php", ".sh", ".sql", ".jl", ".r", ".scala", ".kt", ".swift", ".lua"),
)
KINDS: dict[str, SourceKind] = {
    **dict.fromkeys(TEXT_SUFFIXES, "text"),
    **dict.fromkeys((".jsonl", ".json-lines", ".jsonlines", ".ndjson"), "jsonl"),
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
RECORD_SUFFIXES = {suffix for suffix, kind in KINDS.items() if kind != "text"}
COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}
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
    """The files found, what was skipped (by suffix), notes for the log, and faults."""

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
            skipped = ", ".join(sorted(listing.ignored)) or "nothing"
            listing.problems.append(
                f"{given}: empty source, no file in it can be read (skipped: {skipped}); "
                "give --format text to read any suffix as text"
            )
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


# --- paths to files


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
        hint = ""
        if _HUB_NAME.fullmatch(given):
            folder = f"data/{given.split('/')[1]}"
            hint = (
                "; if it is a dataset of the Hub, fetch its files where there is a network: hf "
                f"download --repo-type dataset {given} --local-dir {folder}, and give --sources "
                f"{folder}"
            )
        listing.problems.append(f"{given}: no such file or folder{hint}")


def _walk(path: str) -> Iterator[str]:
    """Yield the files below a path, sorted; a datasets folder counts as one file."""
    if not Path(path).is_dir() or is_datasets_folder(path):
        yield path
        return
    found = []
    visited = set()
    for folder, names, files in os.walk(path, followlinks=True):
        if (real := os.path.realpath(folder)) in visited:  # a symbolic link back up
            names.clear()
        elif is_datasets_folder(folder):
            names.clear()
            found.append(folder)
        else:
            names[:] = [name for name in names if not name.startswith(".")]
            found.extend(str(Path(folder) / name) for name in files if not name.startswith("."))
        visited.add(real)
    yield from sorted(found)


def is_datasets_folder(path: str) -> bool:
    """Tell whether `datasets` wrote this folder (save_to_disk of a Dataset or DatasetDict)."""
    folder = Path(path)
    return (folder / "dataset_dict.json").is_file() or (
        (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file()
    )


def _without_readmes(given: str, paths: list[str], listing: SourceListing) -> list[str]:
    """Leave out the files that describe a folder of records."""
    if not any(_holds_records(path) for path in paths if path != given):
        return paths
    records = [path for path in paths if not _ABOUT_A_FOLDER.fullmatch(Path(path).name)]
    if len(records) < len(paths):
        listing.ignored["README or the like"] += len(paths) - len(records)
    return records


def _holds_records(path: str) -> bool:
    suffixes = {suffix.lower() for suffix in Path(path).suffixes[-2:]}
    return bool(suffixes & RECORD_SUFFIXES) or Path(path).is_dir()


# --- files of one split


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
        example = named[-1] if named else ""
        listing.problems.append(
            f"{given}: has no split {split!r}; its files are of {', '.join(named) or 'no split'}: "
            f"name files, as in {by_split[example][0]}, or in a recipe give "
            f"sources: [{{path: {given}, split: {example or 'NAME'}}}]"
        )
        return []
    return paths


def _split_of_dict(path: str, split: str, listing: SourceListing) -> str:
    """Return the folder of a split of a DatasetDict, if there is one; any other path as it is."""
    folder = Path(path)
    if not (folder / "dataset_dict.json").is_file() or not (folder / split).is_dir():
        return path
    others = sorted(each.name for each in folder.iterdir() if each.is_dir() and each.name != split)
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


# --- the kind of a file


def _add(path: str, given: str, document_format: str, listing: SourceListing) -> None:
    """Add a file to the listing, to what was skipped, or to the faults."""
    kind, compression = _kind_of(path)
    if kind is None and document_format == "text":
        kind = "text"
    problem = _problem(path, kind, is_given=path == given)
    if problem:
        listing.problems.append(f"{path}: {problem}")
    elif kind is None:
        listing.ignored[Path(path).suffix or "no suffix"] += 1
    else:
        files = sorted(Path(path).glob("*.arrow")) if kind == "datasets" else [Path(path)]
        stats = [file.stat() for file in files]
        size, mtime_ns = (
            sum(s.st_size for s in stats),
            max((s.st_mtime_ns for s in stats), default=0),
        )
        listing.files.append(
            SourceFile(str(Path(path).absolute()), kind, compression, size, mtime_ns)
        )


def _problem(path: str, kind: SourceKind | None, *, is_given: bool) -> str | None:
    """Return why a file cannot be read, if the user named it or its suffix is known."""
    file = Path(path)
    problem = None
    if (file / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in file.iterdir() if entry.is_dir())
        example = f"; name one, as in {path}/{splits[0]}" if splits else ""
        problem = f"a DatasetDict of {len(splits)} splits{example}"
    elif kind != "datasets" and not file.is_file():
        problem = "not a regular file" if file.exists() else "cannot be read (a broken link)"
    elif kind is None and is_given:
        what = (
            'JSON that is no array of records, no {"data": [...]} and not one record a line'
            if ".json" in file.suffix
            else f"unknown file type {file.suffix or 'no suffix'!r}; records come as .jsonl, "
            ".json, .csv, .tsv or .parquet"
        )
        problem = f"{what}; give --format text to read the whole file as one document"
    elif is_given and file.stat().st_size == 0:
        problem = "empty source, the file has 0 bytes"
    elif file.stat().st_size < 1024 and _head(path, None).startswith("version https://git-lfs"):
        problem = "is a pointer of Git LFS, not the file: fetch it with git lfs pull"
    return problem


def _kind_of(path: str) -> tuple[SourceKind | None, Compression | None]:
    if Path(path).is_dir():
        return "datasets", None
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    compression = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    if compression:
        suffixes.pop()
    kind = KINDS.get(suffixes[-1]) if suffixes else None
    if kind == "jsonl":
        # Arrays under this name are met often enough.
        is_array = _head(path, compression).lstrip().startswith("[")
        return "json" if is_array else "jsonl", compression
    if kind == "json":
        return _kind_of_json(_head(path, compression)), compression
    return (None if kind == "parquet" and compression else kind), compression


def _kind_of_json(text: str) -> SourceKind | None:
    """Tell an array of records from one record a line; None for any other JSON."""
    if not text.strip() or JSON_ARRAY_OPENS.match(text):
        return "json"
    line, end, _ = text.lstrip().partition("\n")
    try:
        if end:
            json.loads(line)
    except (ValueError, RecursionError):
        return None
    return "jsonl"


def _head(path: str, compression: Compression | None) -> str:
    """Return how a file begins; "" where it cannot be read, which its reader will report."""
    if not Path(path).is_file():  # a pipe would block
        return ""
    try:
        with open_source(path, compression) as stream:
            return stream.read(SNIFFED_BYTES).decode("utf-8-sig", errors="replace")
    except (OSError, EOFError, zlib.error, zstandard.ZstdError):
        return ""
