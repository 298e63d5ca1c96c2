"""The files of a checkpoint: who writes which, their digests and copies, the manifest over all.

The manifest makes a directory a checkpoint: written last, it says what all other files hold.
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
from utils.support.files import (
    cache_path,
    file_states,
    paths_inside,
    read_cache,
    replace_text,
    write_cache,
)

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1
# Strategies that write the same: whole weights, and the optimizer's state whole or in equal parts.
ALIKE = [{"single", "ddp"}, {"zero1", "zero2"}]
# The files of a run directory beside its checkpoints.
CONFIG = "config.yaml"  # the settings of the first start
PROVENANCE = "provenance.json"  # how each of its starts came about
FINAL = "final"  # the finished model
RECORD = "run"  # in a checkpoint: copies of CONFIG and PROVENANCE
# What the processor of a model for images or sound is loaded from, beside its tokenizer.
OLD_TEMPLATE = "chat_template.json"  # which a processor prefers to any other
PROCESSOR_FILES = (
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "audio_tokenizer_config.json", OLD_TEMPLATE,
)  # fmt: skip
OWN_STATE = "stoker"  # of ours among the callbacks' in a checkpoint's trainer_state.json
RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # it becomes part of names of files
MARGIN = 1.02  # over the checkpoint before: logs and random states grow a little
# Files of a model's configuration and a tokenizer; no tensors are among them.
DESCRIPTIONS = frozenset({".json", ".jinja", ".txt", ".model"})
# One SHA-256 keeps a core busy at about a gigabyte a second, so several cores hash parts.
PART_BYTES = 2**26
PIECE_BYTES = 2**20
THREADS = 8  # parallel file systems like several readers
COPY_THREADS = 2  # training continues while files are copied

# Names of the files that ranks other than the first write: Trainer's random states, the shards of
# torch.distributed.checkpoint (FSDP), and those of DeepSpeed's ZeRO.
_OWNED = re.compile(
    r"(?:.*/)?(?:rng_state_(\d+)\.pth|__(\d+)_\d+\.distcp|(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_[^/]*)"
)


@dataclass(frozen=True)
class FileRecord:
    """What a file held when it was committed; `sha256` is as `file_digests` returns it."""

    size_bytes: int
    sha256: str


def readable(size_bytes: float) -> str:
    """Write a size in KiB, MiB or GiB.

    >>> readable(1000), readable(5 * 2**20), readable(1.5 * 2**40)
    ('1.0 KiB', '5.0 MiB', '1,536.0 GiB')
    """
    power = 1 + (size_bytes >= 1023.95 * 2**10) + (size_bytes >= 1023.95 * 2**20)
    return f"{size_bytes / 1024**power:,.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def owner(name: str) -> int:
    """Return the rank that writes the file of this name, a path within the checkpoint."""
    match = _OWNED.fullmatch(name)
    return int(next(filter(None, match.groups()))) if match else 0


def list_files(directory: Path) -> list[str]:
    """Return the relative paths of all files and links but the manifest, sorted.

    NFS keeps deleted files that are still open as .nfsXXXX; they do not count.
    """
    paths = [path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir()]
    names = [path.relative_to(directory).as_posix() for path in paths if path.name[:4] != ".nfs"]
    return sorted(name for name in names if name != MANIFEST)


def flush_and_record(
    directory: Path, names: Iterable[str], source: Path | None = None
) -> dict[str, FileRecord]:
    """Bring files and their folders to stable storage; return what they hold; raises OSError.

    They are hashed meanwhile. With a `source` they are copied from there.
    """
    names = list(names)
    threads = THREADS if source is None else COPY_THREADS
    paths = [directory / name for name in names]

    def bring(name: str, path: Path) -> int:
        if source is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, path)
        flush(path)
        return path.stat().st_size

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        brought = [pool.submit(bring, *each) for each in zip(names, paths, strict=True)]
        digests = file_digests([(source or directory) / name for name in names], threads)
        sizes = [work.result() for work in brought]
    for folder in sorted({path.parent for path in paths} | {directory}):
        flush(folder)
    return dict(zip(names, map(FileRecord, sizes, digests), strict=True))


def file_problems(
    directory: Path, records: Mapping[str, FileRecord], *, tensors: bool = True
) -> list[str]:
    """Compare the files of a checkpoint with what was committed; return what differs.

    Names and sizes come first: most damage shows there, without reading. Without `tensors` the
    contents of DESCRIPTIONS alone are read.
    """
    there = set(list_files(directory))
    problems = [f"{name} is missing" for name in sorted(records.keys() - there)]
    problems += [f"{name} was not committed" for name in sorted(there - records.keys())]
    for name in sorted(there & records.keys()):
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
    """Bring a file or a folder to stable storage; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digests(paths: Iterable[Path], threads: int = THREADS) -> list[str]:
    """Return the SHA-256 of each file, of several parts that of the parts' digests; OSError."""
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        started = [
            [
                pool.submit(_part, path, begin)
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
    """Return the digest of each file by its name, from the disk cache if an earlier start has it.

    Files count as the same while paths, sizes and modification times are. Raises OSError.
    """
    states = file_states(files)  # before the files are read: what is written meanwhile counts
    path = cache_path("digests", states)
    digests: dict[str, str] | None = read_cache(path, dict)
    if digests is None or digests.keys() != {file.name for file in files}:
        size_bytes = sum(size for _, size, _ in states)
        logger.info("hashing %s of weights once", readable(size_bytes))
        digests = dict(zip([file.name for file in files], file_digests(files), strict=True))
        write_cache(path, digests)
    return digests


def _part(path: Path, begin: int) -> bytes:
    """Return the digest of the part of a file that begins there."""
    digest, left = hashlib.sha256(), PART_BYTES
    with path.open("rb") as file:
        file.seek(begin)
        while left and (piece := file.read(min(PIECE_BYTES, left))):
            digest.update(piece)
            left -= len(piece)
    return digest.digest()


class DamagedCheckpointError(Exception):
    """A checkpoint that is not as it was committed; the text says in what."""


@dataclass(frozen=True)
class Manifest:
    """What a committed checkpoint holds, and which run made it.

    `samples` and `tokens` (without padding) count from step 0. `fingerprints` are digests of data,
    tokenizer and settings; `versions` are the packages'.
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
        """All files together."""
        return sum(record.size_bytes for record in self.files.values())


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Commit the checkpoint in `directory`, whose files are flushed already; raises OSError."""
    flush(directory.parent)  # the entry of the directory itself
    replace_text(directory / MANIFEST, _text(dataclasses.asdict(manifest)), exact=True)
    flush(directory)


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a committed checkpoint.

    It may be a stranger's: all its names are of regular files in the directory, or of none. Raises
    DamagedCheckpointError if a bit of it changed, OSError if it cannot be read, and
    ConfigurationError if a later version of Stoker wrote it.
    """
    path = directory / MANIFEST
    try:
        paths_inside(directory, [MANIFEST], directory)
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
        number, committed = content["format"], content.get("checkpoint")
        as_written = text == _text(committed)
    except ConfigurationError as error:
        raise DamagedCheckpointError(error.problems[0]) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{MANIFEST} cannot be read ({error})") from error
    if isinstance(number, int) and number > FORMAT:
        raise ConfigurationError(
            f"{path} has format {number}, a later version of Stoker wrote it (this one knows "
            f"{FORMAT}): update, or name another --output_dir."
        )
    if not as_written:
        raise DamagedCheckpointError(f"{MANIFEST} is not as it was written")
    try:
        files = {name: FileRecord(**record) for name, record in committed.pop("files").items()}
        manifest = Manifest(**committed, files=files)
        paths_inside(directory, [MANIFEST, *files], path)
        if MANIFEST in files or not _has_its_types(manifest):
            raise TypeError("an entry has another form than Stoker writes")
    except ConfigurationError as error:
        raise DamagedCheckpointError(error.problems[0]) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{MANIFEST} cannot be read ({error})") from error
    return manifest


def _has_its_types(manifest: Manifest) -> bool:
    """Return whether the run's id and all counts are such: both become parts of paths."""
    sizes = [record.size_bytes for record in manifest.files.values()]
    counts = [manifest.world_size, manifest.global_batch_size, manifest.step, *sizes]
    counts += [manifest.samples, manifest.tokens]
    counted = all(type(count) is int and count >= 0 for count in counts)
    texts = [manifest.strategy, manifest.time, *(each.sha256 for each in manifest.files.values())]
    named = isinstance(manifest.run_id, str) and RUN_ID.fullmatch(manifest.run_id) is not None
    return counted and named and all(isinstance(text, str) for text in texts)


def _text(committed: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(committed, sort_keys=True).encode()).hexdigest()
    content = {"format": FORMAT, "checkpoint": committed, "sha256": digest}
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def check_layout(checkpoint: Path, strategy: str) -> None:
    """Raise ConfigurationError for a checkpoint that `strategy` cannot load."""
    written = read_manifest(checkpoint).strategy
    if written == strategy or {written, strategy} in ALIKE:
        return
    raise ConfigurationError(
        f"{checkpoint} was written under {written} and cannot be loaded under {strategy}: resume "
        f"with the accelerate config of {written} (any number of ranks will do), or start a new "
        "run from its weights: --init_from with another --output_dir."
    )
