"""Disk space: the output of `status.py --space`, and the verified copies of `status.py --keep`.

`--space` deletes nothing. `--keep` copies into a hidden folder. After all files are verified, this
folder gets its final name. The run may train during the copy, because a committed checkpoint does
not change and metrics.jsonl only gets new lines at its end.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from utils.checkpoints import discovery, files
from utils.checkpoints.files import FINAL, PROVENANCE, readable
from utils.checkpoints.record import RunRecord, is_run
from utils.config.errors import ConfigurationError, StorageError, did_you_mean
from utils.host.atomic_files import cache_root, locked_directory, paths_inside, remove_abandoned
from utils.host.journal_file import FILE_NAME as JOURNAL
from utils.host.journal_file import printable
from utils.observe.run_state import queued_jobs, read_status

KIND_BY_FILE = {
    JOURNAL: "run",
    PROVENANCE: "run",
    "stoker.json": "dataset",
}  # {file: kind of its folder}
DAY_S = 24 * 3600
WARN_DAYS = 7
QUOTA_S = 5.0


@dataclass
class Space:
    """The disk space of a run, dataset or cache.

    parts: bytes of "checkpoints", "final" and "logs" (all other files). oldest: (time in unix
    seconds, path) of the oldest file. unread: errors of folders that cannot be read.
    """

    parts: Counter[str] = field(default_factory=Counter)
    inodes: int = 1
    oldest: tuple[float, Path] | None = None
    unread: list[OSError] = field(default_factory=list)


def show_space(folder: Path) -> str:
    """Return the text of `status.py --space`: sizes, purge dates, quota and unneeded checkpoints.

    Raises ConfigurationError if the folder is missing or a STOKER_PURGE_ variable is wrong.
    """
    days = os.environ.get("STOKER_PURGE_DAYS") or "0"
    purged_by = os.environ.get("STOKER_PURGE_BY") or "mtime"
    if not days.isdecimal() or purged_by not in ("atime", "mtime"):
        raise ConfigurationError(
            f"STOKER_PURGE_DAYS={days} STOKER_PURGE_BY={purged_by}: give a number of days, and "
            "atime (the site deletes what nobody read) or mtime (what nobody wrote)"
        )
    if not folder.is_dir():
        raise ConfigurationError(f"{folder}: no such folder{did_you_mean(folder)}")
    lines, warnings, unneeded = [f"{'size':>12} {'inodes':>9}  what"], list[str](), list[str]()
    jobs, seen = queued_jobs(), set[tuple[int, int]]()
    unread: list[OSError] = []
    for path, kind in find_spaces(folder, unread).items():
        space = measure_folder(path, purged_by, seen)
        line = f"{readable(space.parts.total()):>12} {space.inodes:>9,}  {path}: {kind}"
        if kind == "run":
            state = read_status(path, jobs).state
            parts = ", ".join(f"{part} {readable(size)}" for part, size in space.parts.items())
            line += f", {state}; {parts}"
            if state not in ("running", "starting") and (
                spare := discovery.deletable_checkpoints(path)
            ):
                freed = readable(sum(map(discovery.taken_bytes, spare)))
                # Mask secrets before quoting: the shell would expand an unquoted ***.
                names = shlex.join(printable(str(each)) for each in spare)
                unneeded.append(f"not needed, {freed}: rm -r -- {names}")
        if int(days) and space.oldest and not _is_below_home(path):
            ends_s = space.oldest[0] + int(days) * DAY_S
            purge = f"purged from {time.strftime('%Y-%m-%d', time.localtime(ends_s))} on"
            line += f"; {purge}"
            if copy := _complete_copy(path):
                line += f"; copied to {copy}"
            elif ends_s - time.time() <= WARN_DAYS * DAY_S:
                keep = f"python status.py --keep {shlex.quote(printable(str(path)))}"
                then = keep if kind == "run" else "copy it to other storage"
                warnings.append(f"WARNING  {space.oldest[1]} is {purge}: {then}")
        lines.append(line)
        unread += space.unread[:1]
    warnings += [f"WARNING  not counted: {error}" for error in unread]
    free = f"free: {readable(discovery.free_disk_bytes(folder))}, without regard to a quota"
    return "\n".join(map(printable, [*lines, *warnings, *unneeded, free, *_quota(folder)]))


def find_spaces(folder: Path, unread: list[OSError]) -> dict[Path, str]:
    """Return {path: "run", "dataset" or "cache"}: runs and datasets below a folder, and caches.

    Only links directly inside the folder are followed, because runs/ is often a link. The runs in
    benchmarks/results come with the repository and are left out. Errors of folders that cannot be
    read are appended to `unread`.
    """
    links = sorted(path for path in folder.iterdir() if path.is_symlink() and path.is_dir())
    found, seen = dict[Path, str](), set[Path]()
    repository = Path(__file__).parents[2]
    shipped = repository / "benchmarks" / "results"
    for root in (folder, *links):
        for top, folders, names in os.walk(root, onerror=unread.append):
            folders[:] = [name for name in folders if Path(top, name).absolute() != shipped]
            if kind := next((KIND_BY_FILE[name] for name in names if name in KIND_BY_FILE), None):
                folders.clear()
                real = Path(top).resolve()
                if real not in seen:
                    seen.add(real)
                    found[Path(top)] = kind
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    caches = (home, cache_root(), repository / ".stoker")
    return found | {path: "cache" for path in caches if path.is_dir()}


def _is_below_home(path: Path) -> bool:
    """Return whether a path is in the home directory, which is never purged."""
    home = Path.home().resolve()
    return home != Path("/") and path.resolve().is_relative_to(home)


def measure_folder(folder: Path, purged_by: str, seen: set[tuple[int, int]]) -> Space:
    """Return the disk space of the files in a folder that are not in `seen`. Add them to `seen`.

    purged_by: "atime" or "mtime", the time that decides which file is the oldest. seen: (device,
    inode) of the files that were already counted.
    """
    space = Space()
    for top, folders, names in os.walk(folder, onerror=space.unread.append):
        space.inodes += len(folders)
        for file in (Path(top, name) for name in names):
            with contextlib.suppress(OSError):  # deleted meanwhile
                stat = file.lstat()
                if (stat.st_dev, stat.st_ino) in seen:
                    continue
                seen.add((stat.st_dev, stat.st_ino))
                part = file.relative_to(folder).parts[0]
                part = "checkpoints" if "checkpoint-" in part else part
                space.parts[part if part in ("checkpoints", FINAL) else "logs"] += stat.st_size
                space.inodes += 1
                at_s = stat.st_atime if purged_by == "atime" else stat.st_mtime
                space.oldest = min(space.oldest or (at_s, file), (at_s, file))
    return space


def _quota(folder: Path) -> Iterator[str]:
    """Yield the output lines of `quota` and `lfs quota`, or a line that neither is installed."""
    commands = ["quota", "-s"], ["lfs", "quota", "-h", str(folder)]
    installed = [command for command in commands if shutil.which(command[0])]
    if not installed:
        yield "quota: not known, neither `quota` nor `lfs` is here"
    for command in installed:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=QUOTA_S, check=False
            )
            output = done.stdout.strip() or done.stderr.strip()  # exit code 1: above a limit
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            output = str(error)
        yield from (f"{command[0]}: {line}" for line in output.splitlines())


def keep_run(run: Path, say: Callable[[str], None]) -> None:
    """Copy a run to STOKER_ARCHIVE: settings, journal, report, final/, newest and best checkpoint.

    An earlier copy stays until the new copy is complete. If the earlier copy has files that the run
    has lost, raise StorageError and change nothing. say: prints a line of progress. Raises
    ConfigurationError, StorageError, OSError.
    """
    archive = _archive_for(run)
    target, work = (each / run.resolve().name for each in (archive, archive / ".incomplete"))
    whole = discovery.whole_checkpoints(run)
    best = discovery.best_checkpoint(whole[0][0]) if whole else None
    kept = whole[:1] + [each for each in whole[1:] if each[0] == best]
    names = [each for each in (files.CONFIG, PROVENANCE, "report.html") if (run / each).is_file()]
    names += [f"{FINAL}/{each}" for each in files.list_files(run / FINAL)]
    for directory, manifest in kept:
        names += [f"{directory.name}/{each}" for each in (*manifest.files, files.MANIFEST)]
    if not kept and not (run / FINAL).is_dir():
        raise ConfigurationError(f"{run} has neither {FINAL}/ nor a whole checkpoint to copy")
    step = kept[0][1].step if kept else -1
    if lost := _lost_files(target, [*names, JOURNAL], step):
        raise StorageError(
            f"{run} has lost {lost[0]}, which its copy {target} has: nothing was changed. Was the "
            f"run purged? To copy the run as it is now, move {target} away"
        )
    size = sum(path.stat().st_size for path in paths_inside(run, names, run).values())
    work.mkdir(parents=True, exist_ok=True)
    remove_abandoned(work, "copy-")
    free = discovery.free_disk_bytes(archive)
    say(f"{run}: {readable(size)} in {len(names)} files; {archive} has {readable(free)} free")
    if size + discovery.RESERVE_BYTES > free:
        raise StorageError(f"{archive} has too little room for {run}: nothing was copied")
    partial, lock = locked_directory(work, "copy-")
    try:
        shutil.copymode(run, partial)
        problems = files.file_problems(partial, files.flush_and_record(partial, names, run))
        for directory, manifest in kept:
            problems += files.file_problems(partial / directory.name, manifest.files)
        problems += _copy_journal(run / JOURNAL, partial / JOURNAL)
        if problems:
            raise StorageError(
                f"{partial}: {problems[0]}: unless the run has changed it meanwhile, check the "
                "storage. Then give the same command again"
            )
        if target.exists():
            target.rename(work / f"old-{partial.name}")
        partial.rename(target)
        files.flush(archive)
    except FileNotFoundError as error:
        raise StorageError(f"the run has deleted {error.filename}: keep it again") from error
    except OSError as error:
        where = error.filename2 or error.filename
        raise StorageError(f"{run}: not copied: {error.strerror}: {where}") from error
    finally:
        os.close(lock)
        remove_abandoned(work, "copy-")
    remove_abandoned(work, "old-")
    say(f"kept: {target}, all files read back and verified")


def _complete_copy(run: Path) -> Path | None:
    """Return the path of a run's copy in STOKER_ARCHIVE; None without a copy of all log lines."""
    copy = Path(os.environ.get("STOKER_ARCHIVE", "(not set)"), run.resolve().name)
    records = [RunRecord(each, lenient=True).run_id for each in (run, copy) if is_run(each)]
    sizes = [(each / JOURNAL).stat().st_size for each in (run, copy) if (each / JOURNAL).is_file()]
    is_whole = len(records) == len(sizes) == 2 and copy.resolve() != run.resolve()
    return copy if is_whole and records[0] == records[1] and sizes[0] == sizes[1] else None


def _archive_for(run: Path) -> Path:
    """Return the path in STOKER_ARCHIVE. Raises ConfigurationError if the run cannot go there."""
    named = os.environ.get("STOKER_ARCHIVE") or "(not set)"
    archive = Path(named).resolve()
    target = archive / run.resolve().name
    if not archive.is_dir():
        raise ConfigurationError(
            f"STOKER_ARCHIVE={named} is no folder: make one on storage without a purge, and name "
            "it: mkdir -p /project/me/runs && export STOKER_ARCHIVE=/project/me/runs"
        )
    if not is_run(run):
        raise ConfigurationError(f"{run} is no run directory{did_you_mean(run)}")
    own, there = (RunRecord(each, lenient=True).run_id for each in (run, target))
    if target == run.resolve() or (target.exists() and (own is None or there != own)):
        raise ConfigurationError(f"{target} is there and stays: name another STOKER_ARCHIVE")
    return archive


def _lost_files(copy: Path, names: list[str], step: int) -> list[str]:
    """Return the names of files and checkpoints that an earlier copy has but the run has not.

    names: the run's files. step: the step of the run's newest checkpoint. Earlier checkpoints of
    the copy do not count, because a run deletes its old checkpoints.
    """
    there = [name for name in files.list_files(copy) if not name.startswith("checkpoint-")]
    later = [path.name for at, path in discovery.numbered_checkpoints(copy) if at > step]
    return [*later, *(name for name in there if name not in names)]


def _copy_journal(journal: Path, copy: Path) -> list[str]:
    """Copy metrics.jsonl if the run has this file; return problems as a list of texts.

    The run may append lines during the copy.
    """
    if not journal.is_file():
        return []
    shutil.copyfile(journal, copy)
    files.flush(copy)
    same = journal.read_bytes().startswith(copy.read_bytes())
    return [] if same else [f"{JOURNAL} has other contents"]
