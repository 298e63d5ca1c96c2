"""A real Slurm on this machine: slurmctld and a slurmd for each node, of two cores and two GPUs.

The default partition `main` has n1 and n2. The partition `other` has n3 and n4. A second job can
run there at the same time. A job in `urgent` takes n1 and n2 away from a job in `main` at once, and
from a job in `patient` after two minutes of grace.

The GPUs are empty files, so Slurm counts and allocates them, but nothing can be computed on them.
Keys, state and logs are all in one directory; munged, slurmctld and slurmd are processes of the
test that started them, and end with it.
"""

import contextlib
import dataclasses
import getpass
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from launching import wait_until

NODES = ("n1", "n2", "n3", "n4")
PATIENCE_S = 900.0  # a test gives up after this time; machines have busy minutes
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")

_CONFIG = """\
ClusterName=stoker
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
# Two clusters at once share the repository: a job's notes and port follow its id.
FirstJobId={controller_port}00
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A requeued job starts again after cred_expire seconds (120 by default).
AuthInfo=socket={directory}/munge.socket,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# Look for jobs to start every second or two, not twice a minute.
SchedulerParameters=sched_min_interval=100000,sched_interval=2,bf_interval=2
GresTypes=gpu
ReturnToService=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# A cancelled job has this time for its last lines, also on a busy machine.
KillWait=60
# On a busy machine a node lost once answers late: slurmctld then sends what it meant for the job's
# old start again every minute, which ends each new start, as both have the job's id.
SlurmdTimeout=30
MessageTimeout=60
InactiveLimit=0
NodeName=DEFAULT CPUs=2 RealMemory=4000 Gres=gpu:2
{nodes}
PartitionName=DEFAULT MaxTime=INFINITE State=UP OverSubscribe=NO
PartitionName=main Nodes=n1,n2 Default=YES
PartitionName=patient Nodes=n1,n2 GraceTime=120
PartitionName=urgent Nodes=n1,n2 PriorityTier=2 PreemptMode=OFF
PartitionName=other Nodes=n3,n4 MaxTime=04:00:00
"""


@dataclasses.dataclass
class Job:
    """A submitted job: its id and the file with its output."""

    id: str
    log: Path

    def output(self) -> str:
        """Return everything in the log so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class SlurmCluster:
    """The daemons of a cluster; call `start` before the first job and `stop` at the end."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.config = directory / "slurm.conf"
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start all daemons and wait until all nodes are idle; raises TimeoutError."""
        self._write_configuration()
        socket_path = self.directory / "munge.socket"
        self._spawn(
            "munged", "--foreground", "--force", f"--key-file={self.directory}/munge.key",
            f"--socket={socket_path}", f"--pid-file={self.directory}/munged.pid",
            f"--log-file={self.directory}/munged.log", f"--seed-file={self.directory}/munged.seed",
        )  # fmt: skip
        wait_until(socket_path.exists, "munged does not open its socket")
        self._spawn("slurmctld", "-D")
        for node in NODES:
            self.start_node(node)
        self.wait_for_nodes()

    def stop(self) -> None:
        """End all jobs, then the daemons."""
        if "slurmctld" in self.daemons:
            with contextlib.suppress(TimeoutError):  # the job of a dead node stays
                self.cancel_all()
        for name in sorted(self.daemons, reverse=True):  # slurmd, slurmctld, munged
            self.daemons[name].terminate()
        for process in self.daemons.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def cancel_all(self) -> None:
        """End all jobs, also those in the queue; raises TimeoutError."""
        if self._no_job_is_left():
            return
        user = getpass.getuser()
        self.run("scancel", f"--user={user}", check=False)
        self.run("scancel", f"--user={user}", "--signal=KILL", "--full", check=False)
        wait_until(self._no_job_is_left, "jobs are left", self._state)

    def start_node(self, node: str, hidden: Path | None = None) -> None:
        """Start a node's slurmd. Jobs there see an empty file system in place of `hidden`."""
        if hidden is None:
            self._spawn("slurmd", "-D", "-N", node, name=f"slurmd {node}")
            return
        cover = 'mount -t tmpfs none "$1" && exec slurmd -D -N "$2"'
        self._spawn(
            "unshare", "--mount", "sh", "-c", cover, "sh", str(hidden), node, name=f"slurmd {node}"
        )

    def stop_node(self, node: str) -> None:
        """End a node's slurmd as a restart of the service does."""
        self.daemons[f"slurmd {node}"].terminate()
        self.daemons[f"slurmd {node}"].wait(15)

    def kill_node(self, node: str) -> None:
        """Kill a node's slurmd and all its processes, as a power cut does."""
        slurmd = self.daemons[f"slurmd {node}"]
        processes = [slurmd.pid, *self._of_node(node)]
        # Stop all processes first, or one could report that another was killed.
        for blow in (signal.SIGSTOP, signal.SIGKILL):
            for pid in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, blow)
        slurmd.wait()

    def wait_for_nodes(self) -> None:
        """Wait until all nodes are idle; raises TimeoutError."""
        wait_until(self._nodes_are_idle, "the nodes do not become idle", self._state)

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment for Slurm's commands, without variables of an outer job."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "SBATCH_", "STOKER_", "ACCELERATE_"))
        }
        inherited["PATH"] += os.pathsep + "/usr/sbin"
        return inherited | {"SLURM_CONF": str(self.config)} | dict(extra or {})

    def run(
        self, *command: str, check: bool = True, env: Mapping[str, str] | None = None,
        cwd: Path | None = None, timeout_s: float = PATIENCE_S,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run one of Slurm's commands against this cluster."""
        return subprocess.run(
            command, env=self.environment(env), cwd=cwd, text=True, timeout=timeout_s, check=check,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def submit(
        self, *arguments: str, cwd: Path, log: Path, env: Mapping[str, str] | None = None
    ) -> Job:
        """Submit a job with sbatch; its output goes to `log`."""
        done = self.run(
            "sbatch", "--parsable", f"--output={log}", *arguments, cwd=cwd, env=env, check=False
        )
        assert done.returncode == 0, done.stdout
        return Job(done.stdout.split()[-1].split(";")[0], log)

    def state(self, job: Job) -> str:
        """Return the job's state in Slurm's words: PENDING, RUNNING, COMPLETED, FAILED ..."""
        return self.fields(job).get("JobState", "UNKNOWN")

    def fields(self, job: Job) -> dict[str, str]:
        """Return the fields of `scontrol show job`, by name."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job.id, check=False).stdout
        pairs = (word.split("=", 1) for word in shown.split() if "=" in word)
        return {pair[0]: pair[1] for pair in pairs}

    def wait(self, job: Job, timeout_s: float = PATIENCE_S) -> str:
        """Wait until the job ended and return its state."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        what = f"job {job.id} does not end"
        wait_until(lambda: self.state(job) in ends, what, job.output, timeout_s)
        return self.state(job)

    def _write_configuration(self) -> None:
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.directory / name).mkdir(parents=True)
        key = self.directory / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        gpus = self.directory / "fakegpu"
        for number in range(2):
            Path(f"{gpus}{number}").touch()
        (self.directory / "gres.conf").write_text(f"Name=gpu File={gpus}[0-1]\n")
        controller, *ports = free_ports(1 + len(NODES))
        nodes = zip(NODES, ports, strict=True)
        here = f"NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1"
        text = _CONFIG.format(
            host=socket.gethostname(), user=getpass.getuser(), directory=self.directory,
            controller_port=controller,
            nodes="\n".join(f"NodeName={node} {here} Port={port}" for node, port in nodes),
        )  # fmt: skip
        self.config.write_text(text)

    def _spawn(self, program: str, *arguments: str, name: str | None = None) -> None:
        name = name or program
        with (self.directory / f"{name.replace(' ', '-')}.out").open("ab") as output:
            self.daemons[name] = subprocess.Popen(
                [program, *arguments],
                env=self.environment(), stdout=output, stderr=output, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def _of_node(self, node: str) -> set[int]:
        """Return the job processes of a node: tasks, their children, Slurm's step daemons."""
        # Another cluster on this machine has a node of the same name.
        marks = {f"SLURMD_NODENAME={node}".encode(), f"SLURM_CONF={self.config}".encode()}
        found = set()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                environment = (process / "environ").read_bytes().split(b"\0")
                parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                is_step = Path(f"/proc/{parent}/cmdline").read_bytes().startswith(b"slurmstepd")
            except OSError:
                continue  # ended meanwhile
            if marks <= set(environment):
                found |= {int(process.name), parent} if is_step else {int(process.name)}
        return found

    def _nodes_are_idle(self) -> bool:
        shown = self.run("sinfo", "--noheader", "--Node", "--format=%N %t", check=False)
        # A line for each node and partition.
        return set(shown.stdout.splitlines()) == {f"{node} idle" for node in NODES}

    def _no_job_is_left(self) -> bool:
        return not self.run("squeue", "--noheader", check=False).stdout.strip()

    def _state(self) -> str:
        parts = [self.run("sinfo", "--Node", "--long", check=False).stdout]
        parts += [path.read_text()[-1500:] for path in sorted(self.directory.glob("*.log"))]
        return "\n".join(parts)


def free_ports(count: int) -> list[int]:
    """Return ports that are free now."""
    with contextlib.ExitStack() as stack:
        listeners = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [listener.getsockname()[1] for listener in listeners]
