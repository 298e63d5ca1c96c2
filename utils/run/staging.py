"""Copies of the token datasets on each node's own disk (setting `stage_data`).

    FOLDER/stoker-data-UID/NAME        a copy, with the digests of its files in digests.json
    FOLDER/stoker-data-UID/NAME.lock   a lock: exclusive while a job copies, shared while runs read

NAME is a digest of the original files' paths, sizes and times. digests.json is written last. If no
copy can be made, a run reads the original files.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from utils.checkpoints.files import readable
from utils.config.arguments import eval_splits, train_sources
from utils.config.errors import ConfigurationError
from utils.config.settings import RunSettings
from utils.data.arrow_columns import data_files, find_split
from utils.host.atomic_files import file_states
from utils.host.collectives import cpu_group, on_every_rank
from utils.host.machine import memory_room_bytes
from utils.launch.processes import LaunchFacts
from utils.launch.signals import NODE_DIR
from utils.run.raw_data import LONGEST_PREPARATION_S

logger = logging.getLogger(__name__)

DIGESTS = "digests.json"
LOCAL_DISKS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "overlay")
THREADS, CHUNK_BYTES, TRIES = 8, 2**23, 5


def stage_data(settings: RunSettings, launch: LaunchFacts) -> RunSettings:
    """Copy the datasets to each node's disk. Return settings that name the copies.

    All ranks must call this. The first rank of each node copies. If a dataset cannot be copied, the
    original is read. Without `stage_data` or in a dry run, return the settings unchanged.
    """
    if not settings.run.stage_data or settings.run.dry_run:
        return settings
    first = launch.hosts.index(launch.hosts[launch.rank])
    group = cpu_group(LONGEST_PREPARATION_S)
    own = on_every_rank(lambda: _copy_all(settings) if launch.rank == first else {}, group)[first]
    # A dataset may have changed between the copies of two nodes.
    checks = launch.rank == first and len({*launch.hosts}) > 1
    changed = on_every_rank(lambda: _changed_splits(own) if checks else [], group)
    if group is not None:
        torch.distributed.destroy_process_group(group)
    left_out = {split for splits in changed for split in splits}
    return replace(settings, staged={split: own[split] for split in own if split not in left_out})


def _copy_all(settings: RunSettings) -> dict[tuple[str, str], tuple[Path, Path]]:
    """Copy all datasets to this node's disk. Return {(directory, split): (original, copy)}.

    If a split cannot be copied, log a warning and leave out the split.
    """
    data, wanted, copies = settings.data, settings.run.stage_data, {}
    splits = [(directory, "train") for directory in train_sources(data.train_data)]
    splits += [(directory, name) for name, directory in eval_splits(data.eval_data).items()]
    for split in splits:
        try:
            copies[split] = _locked_copy(find_split(*split), _folder(wanted))
        except (ConfigurationError, OSError) as error:
            logger.warning("stage_data: %s is read where it is: %s", split[0], error)
    return copies


def _changed_splits(copies: dict[tuple[str, str], tuple[Path, Path]]) -> list[tuple[str, str]]:
    """Return the keys of `copies` whose original files have changed, and log warnings."""
    changed = list[tuple[str, str]]()
    for split, (original, copy) in copies.items():
        try:
            is_same = _copy_name(file_states(_split_files(original))) == copy.name
        except (ConfigurationError, OSError):
            is_same = False
        if not is_same:
            logger.warning("stage_data: %s is read where it is: it has changed", split[0])
            changed.append(split)
    return changed


def _folder(wanted: bool | str) -> Path:
    """Return the path of this user's folder for copies. Create the folder if it does not exist.

    wanted: the setting `stage_data`: a folder, or True to choose a disk of this node.
    Raises OSError if there is no local disk, or if other users can write to the folder.
    """
    chosen = wanted if isinstance(wanted, str) else os.environ.get("STOKER_STAGE_DIR")
    job = os.environ.get(NODE_DIR)  # a folder in SLURM_TMPDIR, TMPDIR or /tmp
    own = str(Path(job).parent) if job else os.environ.get("TMPDIR", "/tmp")  # noqa: S108
    local = [each for each in (own, "/tmp") if _file_system(Path(each)) in LOCAL_DISKS]  # noqa: S108
    if not (chosen or local):
        raise OSError(f"{own} and /tmp are on no disk of this node: set STOKER_STAGE_DIR")
    chosen = os.path.expanduser(chosen or local[0])  # noqa: PTH111 -- keeps an unknown ~USER
    if not Path(chosen).is_dir():
        raise OSError(f"{chosen} is no folder on this node: name one in STOKER_STAGE_DIR")
    folder = Path(chosen) / f"stoker-data-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    state, parent_mode = folder.lstat(), folder.parent.stat().st_mode
    is_private = stat.filemode(state.st_mode) in ("drwx------", "drwx--S---")
    is_replaceable = parent_mode & stat.S_IWOTH and not parent_mode & stat.S_ISVTX
    if state.st_uid != os.getuid() or not is_private or is_replaceable:
        raise OSError(f"{folder} is not yours alone (owner, mode 700): name another folder")
    return folder


def _file_system(path: Path) -> str:
    """Return the type of the file system of `path`, such as ext4, or "" if it is unknown."""
    resolved, mounts = path.resolve(), psutil.disk_partitions(all=True)
    above = [mount for mount in mounts if resolved.is_relative_to(mount.mountpoint)]
    # If several file systems are mounted at one path, only the last is visible.
    return max(reversed(above), key=lambda mount: len(mount.mountpoint)).fstype if above else ""


def _split_files(original: Path) -> list[Path]:
    """Return the paths of a split's files, sorted. Cache files of `datasets` are left out.

    Raises OSError if Arrow files of the split are in other folders.
    """
    named = [file for file in original.glob("[!.]*") if not file.name.startswith("cache-")]
    files = sorted(file for file in named if file.is_file())
    if not {*data_files(original)} <= {*files}:
        raise OSError("its Arrow files are in other folders")
    return files


def _copy_name(states: list[tuple[str, int, int]]) -> str:
    return hashlib.blake2b(json.dumps(states).encode(), digest_size=16).hexdigest()


def _locked_copy(original: Path, folder: Path) -> tuple[Path, Path]:
    """Return (original, copy), and hold a lock on the copy until the process ends.

    A missing or damaged copy is made first. Raises OSError if this fails.
    """
    files = _split_files(original)
    states = file_states(files)
    copy = folder / _copy_name(states)
    lock = os.open(copy.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        for _ in range(TRIES):
            fcntl.flock(lock, fcntl.LOCK_SH)  # waits for a job that copies
            if _is_undamaged(copy, files):
                os.utime(lock)  # the last use
                logger.info("stage_data: %s is read from %s", original, copy)
                return original, copy
            with contextlib.suppress(BlockingIOError):  # another job is checking the copy
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _make_copy(copy, files, states)
                continue
            time.sleep(1)
        raise OSError(f"{copy} is damaged, and another job uses it")
    except BaseException:
        os.close(lock)
        raise


def _make_copy(copy: Path, files: list[Path], states: list[tuple[str, int, int]]) -> None:
    """Copy `files` to the new folder `copy`, then write digests.json.

    states: the files' paths, sizes and times before copying. Raises OSError if this fails or if the
    files change during copying.
    """
    if copy.exists():
        logger.warning("stage_data: %s is damaged or cut short: it is made again", copy)
        shutil.rmtree(copy)
    size = sum(size for _, size, _ in states)
    _delete_unused_copies(copy.parent, size)
    logger.info("stage_data: copying %s to %s", readable(size), copy)
    try:
        copy.mkdir(mode=0o700)
        with ThreadPoolExecutor(THREADS) as pool:
            digests = [*pool.map(_copy_with_digest, files, [copy / file.name for file in files])]
        for file in files:
            shutil.copystat(file, copy / file.name)
        if file_states(files) != states:
            raise OSError("its files changed while they were copied")
        (copy / DIGESTS).write_text(json.dumps(digests), encoding="utf-8")
    except BaseException:
        shutil.rmtree(copy, ignore_errors=True)
        raise


def _delete_unused_copies(folder: Path, size: int) -> None:
    """Delete unused copies, least recently used first, until `size` bytes fit.

    Raises OSError if `size` bytes cannot fit.
    """
    copies, room = list[Path](), _free_bytes(folder)
    with contextlib.ExitStack() as locked:
        for lock in sorted(folder.glob("*.lock"), key=lambda path: path.stat().st_mtime):
            if room < size:
                file, copy = locked.enter_context(lock.open()), lock.with_suffix("")
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    copies.append(copy)
                    room += sum(part.stat().st_size for part in copy.glob("*"))
        for copy in copies if room >= size else ():
            shutil.rmtree(copy, ignore_errors=True)
    if (free := _free_bytes(folder)) < size:
        raise OSError(f"{readable(size)} do not fit, {folder} has {readable(free)} free")


def _free_bytes(folder: Path) -> int:
    """Return the bytes that copies may take.

    On a disk, 5 % of its size stays free. On a tmpfs, half of the free memory stays free.
    """
    disk = shutil.disk_usage(folder)
    free = max(disk.free - disk.total // 20, 0)
    return min(free, memory_room_bytes() // 2) if _file_system(folder) == "tmpfs" else free


def _is_undamaged(copy: Path, files: list[Path]) -> bool:
    """Return whether the folder `copy` has all `files`, with the digests in its digests.json."""
    try:
        expected = json.loads((copy / DIGESTS).read_text(encoding="utf-8"))
        with ThreadPoolExecutor(THREADS) as pool:
            return [*pool.map(_copy_with_digest, [copy / file.name for file in files])] == expected
    except (OSError, ValueError):
        return False


def _copy_with_digest(source: Path, target: Path = Path(os.devnull)) -> str:
    """Copy a file to `target` (default: nowhere), and return its BLAKE2b digest in hexadecimal."""
    digest = hashlib.blake2b()
    with source.open("rb") as read, target.open("wb") as written:
        while chunk := read.read(CHUNK_BYTES):
            digest.update(chunk)
            written.write(chunk)
    return digest.hexdigest()
