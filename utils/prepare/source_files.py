"""Source files: list and open the readable files below the paths that a user gives."""

import codecs
import glob
import hashlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, cast

import pyarrow as pa
import zstandard

from utils.config.errors import ConfigurationError, Report, did_you_mean
from utils.prepare.messages import are_messages

SourceKind = Literal["text", "jsonl", "json", "csv", "parquet", "datasets"]
Compression = Literal["gzip", "zstd"]

TEXT_SUFFIXES = (
    *(".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".html", ".htm", ".xml", ".org"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts", ".go"),
    *(".rs", ".rb", ".php", ".sh", ".sql", ".jl", ".r", ".scala", ".kt", ".swift", ".lua"),
)
RECORD_KINDS: dict[str, SourceKind] = {
    **dict.fromkeys((".jsonl", ".json-lines", ".jsonlines", ".ndjson"), "jsonl"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **{".json": "json", ".parquet": "parquet"},
}
KIND_BY_SUFFIX: dict[str, SourceKind] = {**dict.fromkeys(TEXT_SUFFIXES, "text"), **RECORD_KINDS}
COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}
SNIFFED_BYTES = 1 << 16
LONGEST_FIRST_LINE = 1 << 24  # bytes; a longer line is probably the whole file

# Names of splits in the Hub's files and folders, and our names for them.
SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_FOLDER_INFO = re.compile(
    r"(readme|licen[cs]e|changelog|citation)[^.]*(\.\w+)?"
    r"|(dataset_(infos?|dict)|config|metadata)\.json",
    re.IGNORECASE,
)
DIGESTED_BYTES = 1 << 20
_DATA_ARRAY = re.compile(r'"data"\s*:\s*\[')
_SHARD_OF_SPLIT = re.compile(r"(.+)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?")


@dataclass
class Remarks:
    """The problems and log lines collected while a preparation is planned."""

    problems: list[str] = field(default_factory=list)
    lines: Report = field(default_factory=Report)

    def refuse(self) -> None:
        """Raise ConfigurationError with all problems, if there are any."""
        if self.problems:
            raise ConfigurationError(self.problems)


@dataclass(frozen=True)
class SourceFile:
    """A source file, or a folder of `datasets.save_to_disk`. size: its bytes on disk.

    url: the hf:// address of a Hub file, equal on all machines. None means a local file.
    """

    path: str
    kind: SourceKind
    compression: Compression | None
    size: int
    mtime_ns: int
    url: str | None = None

    @property
    def name(self) -> str:
        """The file's name in stoker.json: the URL of a Hub file, or the path of a local file."""
        return self.url or self.path

    def digest(self) -> str:
        """Return a hex hash of the file's size, first MiB and last MiB (DIGESTED_BYTES)."""
        hasher = hashlib.blake2b(str(self.size).encode(), digest_size=8)
        path = Path(self.path)
        for file in sorted(path.rglob("*.arrow")) if path.is_dir() else [path]:
            with file.open("rb") as opened:
                hasher.update(opened.read(DIGESTED_BYTES))
                opened.seek(max(file.stat().st_size - DIGESTED_BYTES, 0))
                hasher.update(opened.read())
        return hasher.hexdigest()

    def identity(self, folder: Path | None = None) -> dict[str, Any]:
        """Return the attributes that identify this version of the file in the plan's digest.

        folder: a local file's path is returned relative to this folder. None: absolute paths.
        """
        own = {key: value for key, value in asdict(self).items() if key != "url"}
        is_relative = folder is not None and self.url is None
        return {**own, "path": os.path.relpath(self.path, folder) if is_relative else self.name}


def list_sources(
    paths: Sequence[str], document_format: str, split: str = "train", *, is_named: bool = False
) -> tuple[list[SourceFile], Remarks]:
    """Return the readable files below all paths, and remarks about faulty paths and skipped files.

    Files are sorted within each path. A file below two paths is listed once. If file names show
    several splits, only the files of `split` are returned. is_named: the user named the split, so
    it must exist. Files with unknown suffixes are read only if `document_format` is "text".
    """
    files: dict[str, SourceFile] = {}  # by real path
    remarks = Remarks()
    skipped: Counter[str] = Counter()
    for given in paths:
        try:
            found = list(_files_of_path(given))
            if any(_holds_records(path) for path in found if path != given):
                records = [path for path in found if not _FOLDER_INFO.fullmatch(Path(path).name)]
                skipped["README or the like"] += len(found) - len(records)
                found = records
            found = _files_of_one_split(given, found, split, is_named, remarks)
        except ValueError as error:
            remarks.problems.append(f"{given}: {error}")
            continue
        is_empty = True
        for path in found:
            try:
                file = _source_file(path, document_format == "text", is_given=path == given)
            except ValueError as error:
                remarks.problems.append(f"{path}: {error}")
                is_empty = False
                continue
            if file is None:
                skipped[Path(path).suffix or "no suffix"] += 1
                continue
            is_empty = False
            skipped["given twice"] += os.path.realpath(path) in files
            files.setdefault(os.path.realpath(path), file)
        if is_empty:
            names = ", ".join(sorted(+skipped)) or "nothing"
            remarks.problems.append(
                f"{given}: empty source, no file in it can be read (skipped: {names}); give "
                "--format text to read any suffix as text"
            )
    if counts := ", ".join(f"{number} x {what}" for what, number in sorted((+skipped).items())):
        remarks.lines.warn(f"{', '.join(paths)}: files skipped: {counts}")
    return list(files.values()), remarks


def open_source(path: str, compression: Compression | None) -> IO[bytes]:
    """Open a file to read its decompressed bytes. Only an uncompressed file supports seek."""
    if compression is None:
        return Path(path).open("rb")
    if compression == "zstd":
        return io.BufferedReader(_ZstdStream(path), 1 << 16)
    return cast(IO[bytes], io.BufferedReader(pa.input_stream(path, compression=compression)))


class _ZstdStream(io.RawIOBase):
    """Reader of zstd files with windows up to 2 GiB (zstd --long=31). pyarrow allows 128 MiB."""

    def __init__(self, path: str):
        self._blocks = _zstd_blocks(path)
        self._unread = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unread:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._unread = memoryview(block)
        size = min(len(buffer), len(self._unread))
        buffer[:size], self._unread = self._unread[:size], self._unread[size:]
        return size


def _zstd_blocks(path: str) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file. Raises OSError if the file is damaged."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = None
    with Path(path).open("rb") as file:
        while compressed := file.read(1 << 17):
            while compressed:
                frame = frame or decompressor.decompressobj()
                try:
                    yield frame.decompress(compressed)
                except zstandard.ZstdError as error:
                    raise OSError(str(error)) from error
                compressed = frame.unused_data
                frame = None if frame.eof else frame
    if frame is not None:
        raise OSError("the compressed stream is incomplete")


# --- paths to files


def _files_of_path(given: str) -> Iterator[str]:
    """Yield the files below a path, or below the matches of a glob pattern.

    Raises ValueError if the path does not exist or nothing matches.
    """
    if os.path.lexists(given):
        yield from _files_below(given)
    elif glob.has_magic(given):
        matches = sorted(glob.glob(given, recursive=True))  # noqa: PTH207 - keeps absolute globs
        if not matches:
            raise ValueError("no file matches this pattern")
        for match in matches:
            # A recursive pattern lists folders next to the files inside them.
            if not Path(match).is_dir() or "**" not in given:
                yield from _files_below(match)
    else:
        raise ValueError(f"no such file or folder{did_you_mean(given)}")


def _files_below(path: str) -> Iterator[str]:
    """Yield the files below a path, sorted. A folder of save_to_disk counts as one file."""
    if not Path(path).is_dir():
        yield path
        return
    paths = []
    visited = set()
    for folder, names, files in os.walk(path, followlinks=True):
        if (real := os.path.realpath(folder)) in visited:  # a symbolic link to a visited folder
            names.clear()
        elif {"dataset_info.json", "state.json"} <= set(files):
            names.clear()
            paths.append(folder)
        else:
            names[:] = [name for name in names if not name.startswith(".")]
            paths.extend(str(Path(folder) / name) for name in files if not name.startswith("."))
        visited.add(real)
    yield from sorted(paths)


def _holds_records(path: str) -> bool:
    suffixes = {suffix.lower() for suffix in Path(path).suffixes[-2:]}
    return bool(suffixes & RECORD_KINDS.keys()) or Path(path).is_dir()


# --- files of one split


def _files_of_one_split(
    given: str, paths: list[str], split: str, is_named: bool, remarks: Remarks
) -> list[str]:
    """Return the paths with `split` in their names.

    given: the user's path or glob pattern. paths: the files found for `given`. is_named: the user
    named the split. Exceptions: a file that the user gave is always returned. If is_named is False,
    all paths are returned if their names show fewer than two splits, or if `given` is a pattern and
    no name shows `split`. Raises ValueError if the split is missing or has several file formats.
    """
    if paths == [given]:
        return paths
    by_split: dict[str, list[str]] = {}
    for path in paths:
        by_split.setdefault(_split_name(path, given), []).append(path)
    splits = sorted(name for name in by_split if name)
    wanted = SPLIT_NAMES.get(split, split)
    if len(splits) < 2 and not is_named:
        return paths
    if wanted in by_split:
        others = [name or "no split" for name in by_split if name != wanted]
        if others:
            remarks.lines.warn(
                f"{given}: of its splits {wanted} is read here, not {', '.join(others)}; "
                f"--eval_sources NAME={given} evaluates on another"
            )
        known = {
            *KIND_BY_SUFFIX,
            *COMPRESSIONS,
        }  # not .00000-of-01024 in c4-train.00000-of-01024.json.gz
        formats = {
            "".join(one for one in Path(path).suffixes if one.lower() in known)
            for path in by_split[wanted]
        }
        if len(formats) > 1:
            raise ValueError(f"has {wanted} in several formats ({', '.join(formats)}): name files")
        return by_split[wanted]
    if is_named or not glob.has_magic(given):
        raise ValueError(
            f"has no split {split!r}; its files are of {', '.join(splits) or 'no split'}: name "
            f"files, or in a recipe give sources: [{{path: {given}, split: NAME}}]"
        )
    return paths


def _split_name(path: str, given: str) -> str:
    """Return the split named in a file's path, such as "train"; "" if no split is named."""
    if not _holds_records(path):
        return ""
    parts = Path(os.path.relpath(path, given)).parts if Path(given).is_dir() else (Path(path).name,)
    stem = parts[-1].split(".")[0]
    words_of_name = re.split(r"[-_\s]", stem.lower())
    shard = _SHARD_OF_SPLIT.fullmatch(stem)
    if shard and any(word in SPLIT_NAMES for word in words_of_name):
        return SPLIT_NAMES.get(shard[1], shard[1])  # the whole name, such as train_sft
    if (Path(path).parent / "dataset_dict.json").is_file():
        return SPLIT_NAMES.get(stem, stem)
    for words in (words_of_name, [part.lower() for part in parts[:-1]]):
        splits = {SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES}
        if len(splits) == 1:
            return splits.pop()
    return ""


# --- the kind of a file


def _source_file(path: str, any_suffix: bool, *, is_given: bool) -> SourceFile | None:
    """Return the SourceFile of a path, or None for a file of unknown kind in the user's folder.

    is_given: the user gave the path of this file, not of a folder. any_suffix: read unknown kinds
    as text. Raises ValueError for a file that cannot be read.
    """
    files = sorted(Path(path).glob("*.arrow")) if Path(path).is_dir() else [Path(path)]
    if not all(file.is_file() for file in files):
        raise ValueError("not a regular file, or a broken link")
    kind, compression = _kind_of(path, is_given)
    if kind is None and any_suffix:
        kind = "text"
    if kind is None:
        if not is_given:
            return None
        raise ValueError(
            "neither text nor records (.jsonl, .json, .csv, .tsv, .parquet); give --format text to "
            "read the whole file as one document; a dataset of the Hub may have it as Parquet too, "
            "in a recipe {path: OWNER/NAME, revision: refs/convert/parquet}"
        )
    stats = [file.stat() for file in files]
    size = sum(stat.st_size for stat in stats)
    if is_given and size == 0:
        raise ValueError("empty source, the file has 0 bytes")
    if size < 1024 and _first_line(path, None)[0].startswith("version https://git-lfs"):
        raise ValueError("is a pointer of Git LFS, not the file: fetch it with git lfs pull")
    mtime_ns = max((stat.st_mtime_ns for stat in stats), default=0)
    return SourceFile(str(Path(path).absolute()), kind, compression, size, mtime_ns)


def _kind_of(path: str, is_given: bool) -> tuple[SourceKind | None, Compression | None]:
    if Path(path).is_dir():
        return "datasets", None
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    compression = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    if compression:
        suffixes.pop()
    kind = KIND_BY_SUFFIX.get(suffixes[-1]) if suffixes else None
    if kind in ("jsonl", "json"):
        line, rest = _first_line(path, compression)
        kind = _kind_of_json(line, rest, kind)
        # In a folder, a JSON object over many lines usually describes the other files: skip it.
        if line.strip() == "{" and not is_given and not _DATA_ARRAY.search(rest):
            kind = None
    return (None if kind == "parquet" and compression else kind), compression


def _kind_of_json(line: str, rest: str, kind_by_suffix: SourceKind) -> SourceKind:
    """Return "jsonl" for a file with a record per line, "json" for a file that is one value.

    line, rest: the first line and the text after it. kind_by_suffix: returned if the text is
    ambiguous.
    """
    try:
        first = json.loads(line)
    except (ValueError, RecursionError):  # a JSON value over several lines, or a very long line
        return "json" if line.startswith("[") or line.strip() == "{" else kind_by_suffix
    if isinstance(first, list):
        return "jsonl" if are_messages(first) and rest else "json"
    return "jsonl" if rest else kind_by_suffix


def _first_line(path: str, compression: Compression | None) -> tuple[str, str]:
    """Return the first line that is not blank, and the beginning of the text after this line.

    Both are "" if the file cannot be read.
    """
    try:
        with open_source(path, compression) as stream:
            line = b""
            while not line.removeprefix(codecs.BOM_UTF8).strip():
                line = stream.readline(LONGEST_FIRST_LINE)
                if not line:
                    return "", ""
            rest = stream.read(SNIFFED_BYTES)
    except (OSError, pa.ArrowException):  # read_records will report the fault
        return "", ""
    return line.decode("utf-8-sig", "replace").lstrip(), rest.decode(errors="replace").strip()
