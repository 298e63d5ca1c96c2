"""The table of interruptions: how each is caused, and how the job has to end.

A job of two nodes with one rank each waits at a step (or has not begun) while `provoke` acts. Then
the job continues to train, starts its ranks again, is requeued, resumes with the same command, or
is refused.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from unittest.mock import ANY

import psutil
import pytest
import tiny
from launching import ROOT, wait_until
from slurm_cluster import Job
from training_jobs import SETTINGS, JobProcesses, TrainingJobs, raw_journal

TWO_NODES = ("--nodes=2", "--gpus-per-node=2")
SAVE_STEPS = int(str(SETTINGS["save_steps"]))
STEP = 13  # three steps after a save


class Then(StrEnum):
    """The consequence of an interruption, in the words of docs/slurm.md."""

    TRAINS_ON = "the job continues"
    RESTARTED = "restarted inside the job"
    REQUEUED = "requeued"
    RESUBMITTED = "resumes when submitted again"
    REFUSED = "refused before training"


@dataclass
class Scene:
    """A job that is interrupted: its run, and the commands and folders that only its nodes see."""

    jobs: TrainingJobs
    directory: Path
    script: str = "pretrain.py"
    submitted: list[Job] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    restarts: str = "0"  # the job's restarts when it reached the step of the interruption
    other: Job | None = None  # a second job in the run directory

    def __post_init__(self) -> None:
        self.disk = self.directory / "disk"  # where an interruption may mount a file system
        self.run = self.disk / "run"
        self.hold, self.events = self.directory / "hold", self.directory / "events"
        for folder in (self.disk, self.hold):
            folder.mkdir()
        tell = self.directory / "tell"
        tell.write_text(f'#!/bin/sh\necho "$code" >>{shlex.quote(str(self.events))}\n')
        tell.chmod(0o755)
        # A job script that requeues its job has the exit code only in a shell variable.
        exported = self.directory / "exported.sh"
        exported.write_text("declare -x code\n")
        self.env |= {"STOKER_ON_EVENT": str(tell), "BASH_ENV": str(exported)}
        self.env |= {"STOKER_TEST_HOLD": str(self.hold), "STOKER_PROCESSES_PER_NODE": "1"}
        # Ranks look for requests once a second, so the job must run longer than that.
        self.env |= {"STOKER_TEST_STEP_DELAY_S": "0.2"}

    @property
    def job(self) -> Job:
        return self.submitted[-1]

    @property
    def slurm(self):
        return self.jobs.slurm

    def submit(self, row: "Interruption | None" = None) -> None:
        """Submit the job with the same command each time."""
        options, settings, env = (row.options, row.settings, row.env) if row else ((), {}, {})
        self.submitted.append(
            self.jobs.submit(
                self.run,
                *TWO_NODES,
                *options,
                training=self.script,
                env=self.env | env,
                **settings,
            )
        )

    def reach(self, step: int) -> None:
        """Wait until the ranks wait after this step."""
        self.jobs.wait_for_step(self.run, step, self.job)
        self.restarts = self.slurm.fields(self.job)["Restarts"]

    def trained_in(self, start: int) -> int:
        """Return the last step that this start of the run has logged, 0 before."""
        events = [line for line in raw_journal(self.run) if line["event"] != "save"]
        began = [at for at, line in enumerate(events) if line["event"] in ("started", "resumed")]
        own = events[began[start - 1] :] if len(began) >= start else []
        return max((line["step"] for line in own if line["event"] == "train"), default=0)

    def release(self) -> None:
        """Let waiting ranks continue."""
        for path in self.hold.iterdir():
            path.unlink()

    def codes(self) -> list[int]:
        """Return the exit code of each start whose job script reached its last line."""
        lines = self.events.read_text().splitlines() if self.events.exists() else []
        return [int(line) for line in lines]

    def became(self) -> Then:
        """Return the consequence of the interruption, after the end of the job."""
        fields = self.slurm.fields(self.job)
        if fields["JobState"] != "COMPLETED":
            return Then.RESUBMITTED if (self.run / "provenance.json").exists() else Then.REFUSED
        if fields["Restarts"] != "0":
            return Then.REQUEUED
        return Then.RESTARTED if len(tiny.starts(self.run)) > 1 else Then.TRAINS_ON

    def exit_code(self) -> int | None:
        """Return the exit code of the interrupted start; None if Slurm ended its script."""
        fields = self.slurm.fields(self.other or self.job)
        codes = [code for code in self.codes() if code]
        if fields["JobState"] == "COMPLETED":
            return codes[0] if codes else None
        code = int(fields["ExitCode"].partition(":")[0])
        return code or None

    def log(self) -> str:
        """Return the logs of all jobs."""
        others = [self.other] if self.other else []
        return "\n".join(job.output() for job in [*self.submitted, *others])

    def readable(self, line: str) -> str:
        """Return a log line without the time, the job's number and this machine's folders."""
        line = re.sub(r"^\d\d:\d\d:\d\d +| AT \S+T\S+", "", line)
        line = line.replace(self.submitted[0].id, "N")
        names = {self.run: "RUN", self.disk: "DISK", self.jobs.files: "FILES", ROOT: "REPOSITORY"}
        for path, name in names.items():
            line = line.replace(str(path), name)
        return textwrap.shorten(line.strip(" -"), 160, placeholder=" ...")

    def umount(self) -> None:
        """Unmount the file system of the run, if it has one."""
        if self.disk.is_mount():
            subprocess.run(["umount", "--lazy", str(self.disk)], check=True)

    def wait_for_log(self, text: str) -> None:
        wait_until(lambda: text in self.job.output(), f"the log lacks {text!r}", self.job.output)

    def wait_for_requeue(self) -> None:
        """Wait until Slurm has put the job back into the queue."""
        wait_until(
            lambda: self.slurm.fields(self.job).get("Restarts", self.restarts) != self.restarts,
            "not requeued", self.job.output,
        )  # fmt: skip

    def processes(self) -> JobProcesses:
        return JobProcesses(self.job)


Provoke = Callable[[Scene], object]


def nothing(scene: Scene) -> None:
    """Do nothing: the fault is in the row's options, settings or environment."""


@dataclass(frozen=True)
class Interruption:
    """A row of the table.

    code: the exit code of the job script; None if the job continues to train; ANY if Slurm ends the
    script, perhaps before its last line. says: a pattern of the log line for the user. lost: how
    many steps may be repeated. before: acts before the job is submitted. mend: undoes the fault
    before the same command is submitted again. fine_tuning: test the row with LoRA as well.
    """

    name: str
    provoke: Provoke | None
    code: object
    then: Then
    says: str
    lost: int = 0
    at_step: int = STEP
    before: Provoke = nothing
    mend: Provoke = nothing
    options: tuple[str, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    fine_tuning: bool = False


# Kills


def kill(find: Callable[[JobProcesses], list[psutil.Process]], index: int = 0) -> Provoke:
    """Kill one of these processes; the remaining ranks continue to train."""
    return lambda scene: find(scene.processes())[index].kill()


def lose_node(scene: Scene) -> None:
    """Cut the power of the second node, and bring the node back once the job is requeued."""
    scene.slurm.kill_node("n2")
    scene.wait_for_requeue()
    scene.slurm.start_node("n2")


def restart_slurmd(scene: Scene) -> None:
    """End the slurmd of the second node, as an update of the package does, and start it again."""
    scene.slurm.stop_node("n2")
    scene.slurm.start_node("n2")


def freeze_and_thaw(scene: Scene) -> None:
    """Stop a rank until the other one waits in a collective, then let it continue."""
    rank = scene.processes().ranks()[1]
    rank.suspend()
    scene.release()
    wait_until(lambda: rank.status() == psutil.STATUS_STOPPED, "the rank is not stopped")
    rank.resume()


def freeze(scene: Scene) -> None:
    """Stop a rank for good."""
    scene.processes().ranks()[1].suspend()


def kill_again_and_again(scene: Scene) -> None:
    """Kill a rank at one step, until the second start of the job from this checkpoint is lost."""
    for start in (1, 2, 3):
        wait_until(lambda at=start: scene.trained_in(at) >= STEP, "no restart", scene.job.output)
        rank = scene.processes().ranks()[1]
        rank.kill()
        rank.wait()


# Requests to stop


def send(name: str, *options: str) -> Provoke:
    """Send a signal to the job, as `scancel --signal` does; wait until the launchers have it."""

    def provoke(scene: Scene) -> None:
        scene.slurm.run("scancel", f"--signal={name}", *options, scene.job.id)
        scene.wait_for_log("asking the processes to stop")

    return provoke


def send_int(scene: Scene) -> None:
    scene.slurm.run("scancel", "--signal=INT", scene.job.id)


def touch_stop(scene: Scene) -> None:
    (scene.run / "STOP").touch()


def reach_the_limit(scene: Scene) -> None:
    """Wait for the signal that Slurm sends before the time limit."""
    scene.wait_for_log("asking the processes to stop")


def preempt(scene: Scene) -> None:
    """Let a job of a partition with a higher priority take both nodes, until ours is requeued."""
    urgent = scene.slurm.submit(
        "--partition=urgent", "--nodes=2", "--exclusive", "--time=5", "--wrap=sleep 300",
        cwd=scene.directory, log=scene.directory / "urgent.log",
    )  # fmt: skip
    if "patient" in scene.slurm.fields(scene.job)["Partition"]:
        scene.wait_for_log("asking the processes to stop")
        scene.release()
    scene.wait_for_requeue()
    scene.slurm.run("scancel", urgent.id)


def scontrol_requeue(scene: Scene) -> None:
    scene.slurm.run("scontrol", "requeue", scene.job.id)


def scancel(scene: Scene) -> None:
    scene.slurm.run("scancel", scene.job.id)


def submit_again(scene: Scene) -> None:
    """Submit the same command to the idle partition `other` while the first job runs."""
    scene.other = scene.jobs.submit(
        scene.run, *TWO_NODES, "--partition=other", training=scene.script,
        env={"STOKER_PROCESSES_PER_NODE": "1"},
    )  # fmt: skip
    assert scene.slurm.wait(scene.other) == "FAILED", scene.other.output()


# Storage


def mount(*options: str) -> Provoke:
    def provoke(scene: Scene) -> None:
        given = ",".join(options)
        command = ["mount", "-t", "tmpfs", "-o", given, "none", str(scene.disk)]
        subprocess.run(command, check=True)

    return provoke


def mount_image(scene: Scene) -> None:
    """Mount a file with an ext4 file system, which a test can let fail."""
    image = scene.directory / "disk.img"
    with image.open("wb") as file:
        file.truncate(2**30)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(scene.disk)], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no image of a file system can be mounted here: {error}")


def fail_disk(scene: Scene) -> None:
    """Make the kernel put the file system into read-only mode, as after an error of the disk."""
    subprocess.run(["mount", "-o", "remount,abort", str(scene.disk)], check=True)


def repair_disk(scene: Scene) -> None:
    """Check the file system and mount it again."""
    image = str(scene.directory / "disk.img")
    subprocess.run(["umount", str(scene.disk)], check=True)
    subprocess.run(["e2fsck", "-p", image], check=False)  # 1: it corrected something
    subprocess.run(["mount", "-o", "loop", image, str(scene.disk)], check=True)


def fill(scene: Scene) -> None:
    """Leave the run's file system without a free block."""
    status = os.statvfs(scene.disk)
    with (scene.disk / "others_file").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize)


def free(scene: Scene) -> None:
    (scene.disk / "others_file").unlink()


# A second node that differs from the first one


def hide(*, path: Callable[[Scene], Path]) -> Provoke:
    """Let the second node see an empty folder in place of `path`."""

    def provoke(scene: Scene) -> None:
        scene.slurm.stop_node("n2")
        scene.slurm.start_node("n2", hidden=path(scene))
        scene.slurm.wait_for_nodes()

    return provoke


def bring_back(scene: Scene) -> None:
    scene.slurm.stop_node("n2")
    scene.slurm.start_node("n2")
    scene.slurm.wait_for_nodes()


def python_folder(scene: Scene, name: str, *options: str) -> Path:
    """Make a folder with a command `python`."""
    folder = scene.directory / name
    folder.mkdir()
    (folder / "python").write_text(
        f'#!/bin/sh\nexec {shlex.join([sys.executable, *options])} "$@"\n'
    )
    (folder / "python").chmod(0o755)
    return folder


def without_python(scene: Scene) -> None:
    folder = python_folder(scene, "environment")
    scene.env["PATH"] = os.pathsep.join([str(folder), "/usr/bin", "/bin"])
    assert shutil.which("python", path="/usr/bin:/bin") is None, "a Python of the system's"
    hide(path=lambda _: folder)(scene)


def without_torch(scene: Scene) -> None:
    """Let the second node find a Python without packages."""
    folder, bare = python_folder(scene, "environment"), python_folder(scene, "bare", "-S")
    scene.env["PATH"] = os.pathsep.join([str(folder), str(bare), "/usr/bin", "/bin"])
    hide(path=lambda _: folder)(scene)


TABLE = [
    Interruption(
        "`kill -9` of a rank", kill(JobProcesses.ranks, 1), None, Then.RESTARTED,
        r"rank 1 on \w+ was killed by SIGKILL; restart 1 of at most 3", lost=SAVE_STEPS - 1,
        fine_tuning=True,
    ),
    Interruption(
        "`kill -9` of a rank, `restarts_in_job: 0`", kill(JobProcesses.ranks, 1), 76, Then.REQUEUED,
        r"rank 1 on \w+ was killed by SIGKILL; requeued", lost=SAVE_STEPS - 1,
        settings={"restarts_in_job": 0},
    ),
    Interruption(
        "`kill -9` of a rank, in two starts from one checkpoint", kill_again_and_again, 76,
        Then.REQUEUED, r"rank 1 on \w+ was killed by SIGKILL; requeued", lost=SAVE_STEPS - 1,
    ),
    Interruption(
        "`kill -9` of a data worker", kill(JobProcesses.data_workers, 1), None, Then.RESTARTED,
        r"rank 1 on \w+.*worker.*; restart 1 of at most 3", lost=SAVE_STEPS - 1,
        settings={"dataloader_num_workers": 1},
    ),
    Interruption(
        "`kill -9` of the first node's launcher", kill(lambda job: job.launchers(0)), None,
        Then.RESTARTED, r"job \d+: .*(?:lost|killed).*; restart 1 of at most 3",
        lost=SAVE_STEPS - 1, fine_tuning=True,
    ),
    Interruption(
        "`kill -9` of another node's launcher", kill(lambda job: job.launchers(1)), None,
        Then.RESTARTED, r"job \d+: .*(?:lost|killed).*; restart 1 of at most 3",
        lost=SAVE_STEPS - 1,
    ),
    Interruption(
        "`kill -9` of `srun`", kill(JobProcesses.sruns), None, Then.RESTARTED,
        r"job \d+: .*killed by signal 9.*; restart 1 of at most 3", lost=SAVE_STEPS - 1,
    ),
    Interruption(
        "`kill -9` of the job script", kill(JobProcesses.job_scripts), None, Then.RESUBMITTED,
        r"", lost=SAVE_STEPS - 1,
    ),
    Interruption(
        "a node lost and back", lose_node, ANY, Then.REQUEUED,
        r"JOB \d+ .*DUE TO", lost=SAVE_STEPS - 1, fine_tuning=True,
    ),
    Interruption("`slurmd` restarted", restart_slurmd, None, Then.TRAINS_ON, r""),
    Interruption(
        "a rank frozen and thawed (SIGSTOP, SIGCONT)", freeze_and_thaw, None, Then.TRAINS_ON, r"",
    ),
    Interruption(
        "a rank frozen for good", freeze, None, Then.RESTARTED,
        r"rank 1 on \w+ gave no sign of life",
        lost=SAVE_STEPS - 1, settings={"hang_timeout_s": 20},
    ),
    Interruption(
        "`touch RUN/STOP`", touch_stop, 75, Then.REQUEUED, r"stopped with a checkpoint",
    ),
    Interruption(
        "`scancel --signal=TERM`", send("TERM"), 75, Then.REQUEUED, r"stopped with a checkpoint",
        fine_tuning=True,
    ),
    Interruption(
        "`scancel --signal=USR1`", send("USR1"), 75, Then.REQUEUED, r"stopped with a checkpoint",
    ),
    Interruption(
        "`scancel --signal=INT`", send_int, 130, Then.RESUBMITTED, r"interrupted by the user",
        lost=SAVE_STEPS - 1,
    ),
    Interruption(
        "time limit, with Slurm's signal", reach_the_limit, 75, Then.REQUEUED,
        r"stopped with a checkpoint", options=("--time=4", "--signal=B:USR1@60"), fine_tuning=True,
    ),
    Interruption(
        "time limit, without a signal", nothing, 75, Then.REQUEUED,
        r"stopped with a checkpoint", at_step=1, options=("--time=2", "--signal=B:URG@1"),
        env={"STOKER_TEST_STEP_DELAY_S": "2.8"},
    ),
    Interruption(
        "preemption", preempt, ANY, Then.REQUEUED, r"JOB \d+ .*DUE TO PREEMPTION",
        lost=SAVE_STEPS - 1,
    ),
    Interruption(
        "preemption with a grace time", preempt, 75, Then.REQUEUED,
        r"stopped with a checkpoint", options=("--partition=patient",),
    ),
    Interruption(
        "`scontrol requeue`", scontrol_requeue, ANY, Then.REQUEUED,
        r"JOB \d+ .*DUE TO JOB REQUEUE", lost=SAVE_STEPS - 1, fine_tuning=True,
    ),
    Interruption(
        "`scancel`", scancel, ANY, Then.RESUBMITTED, r"JOB \d+ .*CANCELLED", lost=SAVE_STEPS - 1,
    ),
    Interruption(
        "a second job in the run directory", submit_again, 2, Then.TRAINS_ON, r"is in use by",
    ),
    Interruption(
        "disk full, then freed", fill, 74, Then.RESUBMITTED, r"No space left|are missing",
        lost=SAVE_STEPS - 1, before=mount("size=1g"), mend=free, fine_tuning=True,
    ),
    Interruption(
        "file system read-only after an error, then repaired", fail_disk, 74, Then.RESUBMITTED,
        r"[Rr]ead-only", lost=SAVE_STEPS - 1, before=mount_image, mend=repair_disk,
    ),
    Interruption(
        "file system read-only from the start", None, 74, Then.REFUSED,
        r"n[12].*run cannot be", before=mount("ro"),
    ),
    Interruption(
        "a clock that is 100 s off", None, 69, Then.REFUSED,
        r"the clock of n2 is \+100 s off", env={"STOKER_TEST_CLOCK_OFF_S": "100"},
    ),
    Interruption(
        "a node without Python", None, 69, Then.REFUSED, r"n2: there is no python on PATH",
        before=without_python, mend=bring_back,
    ),
    Interruption(
        "a node without torch", None, 69, Then.REFUSED, r"n2.*has no torch",
        before=without_torch, mend=bring_back,
    ),
    Interruption(
        "a node without the data", None, 2, Then.REFUSED, r"documents: not a",
        before=hide(path=lambda scene: scene.jobs.files / "documents"), mend=bring_back,
    ),
]  # fmt: skip
