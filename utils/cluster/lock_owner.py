"""Who holds the lock of a run directory, and whether that process is still there."""

import dataclasses
import datetime
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from utils.cluster.host import host_name

_PROC = Path("/proc")


class Fate(Enum):
    """What became of a process, as far as it can be known from here."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"  # another machine: only its heartbeat tells


@dataclass(frozen=True)
class Owner:
    """One process that took the lock, as it wrote itself down.

    `machine` is the boot and the pid namespace in which `pid` means something (a container has its
    own); `process_start` tells the process from a later one with the same pid. `since` is for
    people alone: clocks of two hosts are never compared.
    """

    token: str
    host: str
    machine: str
    pid: int
    process_start: int | None
    cluster: str | None
    job: str | None
    restart_count: int
    since: str

    @classmethod
    def this_process(cls, token: str, environment: Mapping[str, str]) -> "Owner":
        """Return this process as an owner; its Slurm job is read from `environment`."""
        return cls(
            token=token,
            host=host_name(),
            machine=_machine(),
            pid=os.getpid(),
            process_start=_process_start(os.getpid()),
            cluster=environment.get("SLURM_CLUSTER_NAME"),
            job=environment.get("SLURM_JOB_ID"),
            restart_count=_restart_count(environment),
            since=datetime.datetime.now(datetime.UTC).isoformat(sep=" ", timespec="seconds"),
        )

    @classmethod
    def from_json(cls, text: bytes) -> "Owner | None":
        """Return the owner that a lock file names; None where it names none (cut off, damaged)."""
        try:
            content = json.loads(text)["owner"]
            return cls(**content)
        except (ValueError, TypeError, KeyError):
            return None

    def as_dict(self) -> dict[str, object]:
        """Return what `from_json` reads under "owner"."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        job = f" (Slurm job {self.job})" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"

    def fate(self, environment: Mapping[str, str]) -> Fate:
        """Say what became of this process, seen from the process with this environment."""
        if self.machine and self.machine == _machine():
            fate = _process_fate(self.pid, self.process_start)
            if fate is not Fate.UNKNOWN:
                return fate
        return self._job_fate(environment)

    def _job_fate(self, environment: Mapping[str, str]) -> Fate:
        """Ask Slurm. Job ids mean something within one cluster alone."""
        cluster = environment.get("SLURM_CLUSTER_NAME")
        if self.job is None or cluster is None or cluster != self.cluster:
            return Fate.UNKNOWN
        if self.job == environment.get("SLURM_JOB_ID"):
            # Slurm starts a job again once every process of the earlier start is gone.
            again = _restart_count(environment) > self.restart_count
            return Fate.GONE if again else Fate.UNKNOWN
        state = _job_state(self.job)
        if state == "":
            return Fate.GONE
        # A suspended process has no heartbeat, and goes on all the same.
        return Fate.ALIVE if state == "SUSPENDED" else Fate.UNKNOWN


def _restart_count(environment: Mapping[str, str]) -> int:
    return int(environment.get("SLURM_RESTART_COUNT") or 0)


def _machine() -> str:
    """Name this boot of this machine and this pid namespace; empty where /proc does not say."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return ""


def _process_fate(pid: int, process_start: int | None) -> Fate:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return Fate.GONE
    except PermissionError:
        pass  # another user's
    start = _process_start(pid)
    if start is None or process_start is None:
        return Fate.UNKNOWN  # /proc may hide other users' processes (mount option hidepid)
    return Fate.ALIVE if start == process_start else Fate.GONE


def _process_start(pid: int) -> int | None:
    """Return when a process began, in clock ticks since boot; -1 for one that only is not reaped.

    None where /proc does not say (proc(5), /proc/PID/stat: the name may hold spaces and brackets).
    """
    try:
        fields = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *rest = fields.rpartition(")")[2].split()
    return -1 if state in ("Z", "X") else int(rest[18])


def _job_state(job: str) -> str | None:
    """Return a job's state in squeue's words; empty: it is not in the queue; None: no answer."""
    try:
        done = subprocess.run(
            ["squeue", "--noheader", f"--jobs={job}", "--format=%T"],
            capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode == 0:
        return done.stdout.strip()
    return "" if "Invalid job id" in done.stderr else None
