"""The files of a checkpoint: the rank that writes each file, digests, copies, and manifest.json.

manifest.json has the size and digest of each other file. A save writes manifest.json last and
thereby commits the checkpoint. A directory without manifest.json is an unfinished save.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from utils.config.errors import ConfigurationError
from utils.host.atomic_files import (
    cache_path,
    file_states,
    paths_inside,
    read_cache,
    replace_text,
    write_cache,
)

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
CHECKPOINT_FORMAT = 1
# Pairs of strategies that can load each other's checkpoints. Both pairs store unsharded weights;
# the second pair stores one optimizer shard per rank.
SAME_FORMAT_STRATEGIES = [{"single", "ddp"}, {"zero1", "zero2"}]
# Files and folders of a run directory.
CONFIG = "config.yaml"  # the settings of the run's first start
PROVENANCE = "provenance.json"  # versions, settings and Slurm job of each start and resume
FINAL = "final"  # the finished model
REPORT = "report.html"
RECORD = "run"  # the folder in a checkpoint with copies of CONFIG and PROVENANCE
# Files that the processor of an image or sound model has in addition to its tokenizer's files.
OLD_TEMPLATE = "chat_template.json"  # a processor prefers this file to any other template
PROCESSOR_FILES = (
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "audio_tokenizer_config.json", OLD_TEMPLATE,
)  # fmt: skip
OWN_STATE = "stoker"  # the key of Stoker's own state in a checkpoint's trainer_state.json
RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # a run's id is a part of file names
SPACE_MARGIN = 1.02  # each checkpoint is a little larger than the previous one, because logs grow
# Suffixes of the files of a model's configuration and a tokenizer. These files have no tensors.
DESCRIPTIONS = frozenset({".json", ".jinja", ".txt", ".model"})
# One core hashes about a gigabyte per second, so several cores hash parts of a file.
PART_BYTES = 2**26
PIECE_BYTES = 2**20
THREADS = 8  # parallel file systems are faster with several readers
COPY_THREADS = 2  # training runs at the same time

# Names of files that contain the number of the rank that writes the file: Trainer's RNG states,
# shards of torch.distributed.checkpoint (FSDP) and shards of DeepSpeed's ZeRO.
_OWNED = re.compile(
    r"(?:.*/)?(?:rng_state_(\d+)\.pth|__(\d+)_\d+\.distcp|(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_[^/]*)"
)


@dataclass(frozen=True)
class FileRecord:
    """The manifest's entry for a file: its size and its digest from `file_digests`."""

    size_bytes: int
    sha256: str


def readable(size_bytes: float) -> str:
    """Return a size as text in KiB, MiB or GiB.

    >>> readable(1000), readable(5 * 2**20), readable(1.5 * 2**40)
    ('1.0 KiB', '5.0 MiB', '1,536.0 GiB')
    """
    power = 1 + (size_bytes >= 1023.95 * 2**10) + (size_bytes >= 1023.95 * 2**20)
    return f"{size_bytes / 1024**power:,.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def owner(name: str) -> int:
    """Return the rank that writes a checkpoint's file: the number in the file's name, else 0."""
    match = _OWNED.fullmatch(name)
    return int(next(filter(None, match.groups()))) if match else 0


def list_files(directory: Path) -> list[str]:
    """Return the paths of a checkpoint's files and links, sorted and relative to `directory`.

    manifest.json is left out. Files .nfsXXXX are left out, because NFS gives these names to deleted
    files that are still open.
    """
    paths = [path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir()]
    names = [path.relative_to(directory).as_posix() for path in paths if path.name[:4] != ".nfs"]
    return sorted(name for name in names if name != MANIFEST)


def flush_and_record(
    directory: Path, names: Iterable[str], source: Path | None = None
) -> dict[str, FileRecord]:
    """Flush files and their folders to stable storage; return {name: FileRecord}.

    names: paths of the files, relative to `directory`. If a folder `source` is given, first copy
    the files from `source` to `directory`. The digests are then computed from the files in
    `source`. Raises OSError.
    """
    names = list(names)
    threads = THREADS if source is None else COPY_THREADS
    paths = [directory / name for name in names]

    def copy_and_flush(name: str, path: Path) -> int:
        if source is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, path)
        flush(path)
        return path.stat().st_size

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        copies = [pool.submit(copy_and_flush, *each) for each in zip(names, paths, strict=True)]
        digests = file_digests([(source or directory) / name for name in names], threads)
        sizes = [work.result() for work in copies]
    for folder in sorted({path.parent for path in paths} | {directory}):
        flush(folder)
    return dict(zip(names, map(FileRecord, sizes, digests), strict=True))


def file_problems(
    directory: Path, records: Mapping[str, FileRecord], *, tensors: bool = True
) -> list[str]:
    """Return one text for each difference between a checkpoint's files and its manifest, or [].

    records: the files in the manifest, {name: FileRecord}. First compare names and sizes. If all
    agree, compare contents. Without `tensors`, read only files with a suffix in DESCRIPTIONS:
    configuration and tokenizer files.
    """
    found = set(list_files(directory))
    problems = [f"{name} is missing" for name in sorted(records.keys() - found)]
    problems += [f"{name} was not committed" for name in sorted(found - records.keys())]
    for name in sorted(found & records.keys()):
        committed = records[name].size_bytes
        if (size := (directory / name).stat().st_size) != committed:
            problems.append(f"{name} has {size:,} bytes, not {committed:,}")
    if problems:
        return problems
    read = [name for name in sorted(records) if tensors or Path(name).suffix in DESCRIPTIONS]
    digests = file_digests(directory / name for name in read)
    return [
        f"{name} has other contents"
        for name, digest in zip(read, digests, strict=True)
        if digest != records[name].sha256
    ]


def flush(path: Path) -> None:
    """Flush a file or a folder to stable storage. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digests(paths: Iterable[Path], threads: int = THREADS) -> list[str]:
    """Return the SHA-256 of each file as hexadecimal text, in the order of `paths`. Raises OSError.

    A file larger than PART_BYTES (64 MiB) is hashed in parts. Its result is the SHA-256 of the
    joined digests of the parts.
    """
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        started = [
            [
                pool.submit(_part_digest, path, begin)
                for begin in range(0, max(path.stat().st_size, 1), PART_BYTES)
            ]
            for path in paths
        ]
        digests = [b"".join(part.result() for part in parts) for parts in started]
    one = hashlib.sha256().digest_size
    return [
        parts.hex() if len(parts) == one else hashlib.sha256(parts).hexdigest() for parts in digests
    ]


def cached_digests(files: Sequence[Path]) -> dict[str, str]:
    """Return {file name: digest}. The digests are computed by `file_digests`, and cached on disk.

    The cache is used if the path, size and modification time of every file are unchanged. Raises
    OSError.
    """
    states = file_states(files)  # before reading, so that later writes are noticed
    path = cache_path("digests", states)
    digests: dict[str, str] | None = read_cache(path, dict)
    if digests is None or digests.keys() != {file.name for file in files}:
        size_bytes = sum(size for _, size, _ in states)
        logger.info("hashing %s of weights once", readable(size_bytes))
        digests = dict(zip([file.name for file in files], file_digests(files), strict=True))
        write_cache(path, digests)
    return digests


def _part_digest(path: Path, begin: int) -> bytes:
    """Return the SHA-256 (bytes) of a part of a file: up to PART_BYTES from offset `begin`."""
    digest, left = hashlib.sha256(), PART_BYTES
    with path.open("rb") as file:
        file.seek(begin)
        while left and (piece := file.read(min(PIECE_BYTES, left))):
            digest.update(piece)
            left -= len(piece)
    return digest.digest()


class DamagedCheckpointError(Exception):
    """Error for a checkpoint whose manifest.json was changed or cannot be parsed."""


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json: the files of a committed checkpoint, and how it was trained.

    samples, tokens   numbers of sequences and tokens trained on since step 0, without padding
    fingerprints      digests of the datasets and the tokenizer
    versions          {package: installed version}
    files             {path in the checkpoint: size and digest}
    """

    run_id: str
    world_size: int
    strategy: str
    global_batch_size: int
    fingerprints: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str | None] = field(default_factory=dict)
    step: int = 0
    samples: int = 0
    tokens: int = 0
    time: str = ""
    files: Mapping[str, FileRecord] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """The total size in bytes of the checkpoint's files."""
        return sum(record.size_bytes for record in self.files.values())


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write manifest.json and so commit a checkpoint. Raises OSError.

    The checkpoint's other files must have been flushed to storage.
    """
    flush(directory.parent)  # makes the directory's name durable
    replace_text(directory / MANIFEST, _text(dataclasses.asdict(manifest)), exact=True)
    flush(directory)


def read_manifest(directory: Path) -> Manifest:
    """Return the content of a checkpoint's manifest.json.

    The checkpoint may come from a stranger. So each listed path must be inside the checkpoint, and
    must be a regular file or missing. Raises DamagedCheckpointError if a path breaks this rule or
    manifest.json was changed. Raises OSError if manifest.json cannot be read. Raises
    ConfigurationError if a later version of Stoker wrote it.
    """
    path = directory / MANIFEST
    try:
        paths_inside(directory, [MANIFEST], directory)
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
        number, committed = content["format"], content.get("checkpoint")
        if not (isinstance(number, int) and number > CHECKPOINT_FORMAT):
            if text != _text(committed):
                raise DamagedCheckpointError(f"{MANIFEST} is not as it was written")
            files = {name: FileRecord(**record) for name, record in committed.pop("files").items()}
            manifest = Manifest(**committed, files=files)
            paths_inside(directory, [MANIFEST, *files], path)
            if MANIFEST in files or not _has_valid_types(manifest):
                raise TypeError("an entry has another form than Stoker writes")
            return manifest
    except ConfigurationError as error:
        raise DamagedCheckpointError(error.problems[0]) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{MANIFEST} cannot be read ({error})") from error
    raise ConfigurationError(
        f"{path} has format {number}, a later version of Stoker wrote it (this one knows "
        f"{CHECKPOINT_FORMAT}): update, or name another --output_dir."
    )


def _has_valid_types(manifest: Manifest) -> bool:
    """Return whether all fields have the right types, and the run id is safe in file names."""
    sizes = [record.size_bytes for record in manifest.files.values()]
    counts = [manifest.world_size, manifest.global_batch_size, manifest.step, *sizes]
    counts += [manifest.samples, manifest.tokens]
    valid_counts = all(type(count) is int and count >= 0 for count in counts)
    texts = [manifest.strategy, manifest.time, *(each.sha256 for each in manifest.files.values())]
    valid_id = isinstance(manifest.run_id, str) and RUN_ID.fullmatch(manifest.run_id) is not None
    return valid_counts and valid_id and all(isinstance(text, str) for text in texts)


def _text(committed: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(committed, sort_keys=True).encode()).hexdigest()
    content = {"format": CHECKPOINT_FORMAT, "checkpoint": committed, "sha256": digest}
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def check_layout(checkpoint: Path, strategy: str) -> None:
    """Raise ConfigurationError if a parallel strategy cannot load a checkpoint.

    A strategy can load a checkpoint that it saved itself. The two strategies of each pair in
    SAME_FORMAT_STRATEGIES can also load each other's checkpoints.
    """
    written = read_manifest(checkpoint).strategy
    if written == strategy or {written, strategy} in SAME_FORMAT_STRATEGIES:
        return
    raise ConfigurationError(
        f"{checkpoint} was written under {written} and cannot be loaded under {strategy}: resume "
        f"with the accelerate config of {written} (any number of ranks will do), or start a new "
        "run from its weights: --init_from with another --output_dir."
    )
