"""An hour of runs on a real Slurm with a kill every minute; all results are bitwise equal.

    make soak                                      into benchmarks/results/exactness/soak.json
    make soak SOAK_ARGS="--minutes 3 --every 20"   a trial; the file is not written

Pretraining and fine-tuning with LoRA alternate, on two nodes of one rank and one data worker each.
When the time is over, the last run ends undisturbed. Needs root, slurm-wlm and munge. If work was
lost or a person would have been needed, the exit code is 1 and the runs and logs are kept.
"""

import argparse
import collections
import datetime
import itertools
import json
import os
import platform
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import tiny
import torch
import transformers
from launching import ROOT, processes_of, wait_until
from slurm_cluster import Job, SlurmCluster
from training_jobs import JobProcesses, TrainingJobs, cycles, raw_journal

from benchmarks.hardware.circumstances import current_commit
from utils.checkpoints.discovery import checkpoint_problems, numbered_checkpoints
from utils.checkpoints.files import MANIFEST

RESULT = ROOT / "benchmarks/results/exactness/soak.json"
TAIL = 1500  # characters of a log, beside a problem
FROZEN_S = 5.0
STEPS, SAVE_STEPS = 240, 2
MOST_STEPS = 8  # a start is ended after at most this many steps, and never before its first one
SLOWLY = {"STOKER_TEST_STEP_DELAY_S": "0.4"}
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
SETTINGS: dict[str, object] = {
    "max_steps": STEPS, "save_steps": SAVE_STEPS, "eval_steps": 40, "save_total_limit": 3,
    "dataloader_num_workers": 1, "weight_decay": 0.1,
}  # fmt: skip
COMPARED = ("loss", "grad_norm", "learning_rate", "tokens_seen", "epoch")
FIGURES = ("kills", "starts_again", "by_hand", "lost_steps", "lost_s")
SCRIPTS = {"pretraining": "pretrain.py", "LoRA": "sft_train.py"}
Find = Callable[[JobProcesses], list[psutil.Process]]


@dataclass
class Run:
    """A run directory, and the jobs that were submitted for it."""

    kind: str
    directory: Path
    jobs: list[Job] = field(default_factory=list)
    checkpoints: int = 0  # committed checkpoints that were verified after a kill

    @property
    def job(self) -> Job:
        return self.jobs[-1]

    @property
    def finished(self) -> bool:
        return (self.directory / "final/model.safetensors").exists()

    def steps(self) -> int:
        """Return how many steps were logged so far, repeated ones included."""
        return sum(line["event"] == "train" for line in raw_journal(self.directory))

    def newest(self) -> int:
        """Return the step of the newest committed checkpoint, reading only manifests."""
        found = numbered_checkpoints(self.directory)
        return next((step for step, path in found if (path / MANIFEST).exists()), 0)

    def verify(self, at_least: int) -> None:
        """Verify every committed checkpoint. The newest step must be at least `at_least`."""
        if not at_least:
            return
        run_id = json.loads((self.directory / "provenance.json").read_text())["run_id"]
        whole = []
        for step, path in numbered_checkpoints(self.directory):
            if not (path / MANIFEST).exists():
                continue
            problems = checkpoint_problems(path, step, run_id)
            if path.exists():  # otherwise rotation has deleted it
                assert not problems, f"{path}: {problems}"
                whole.append(step)
        assert whole, f"{self.directory}: checkpoint-{at_least} is gone"
        assert whole[0] >= at_least, f"{self.directory}: {at_least} is lost, there are {whole}"
        self.checkpoints += len(whole)


class RunOver(Exception):
    """The run ended before its process could be killed."""


class Soak:
    """Disturbs runs by one kind of kill after another. Each round has a new random order."""

    def __init__(self, jobs: TrainingJobs, chance: random.Random, every_s: float):
        self.jobs, self.slurm, self.chance, self.every_s = jobs, jobs.slurm, chance, every_s
        one_of = self.kill_one_of
        self.kinds: dict[str, Callable[[Run], None]] = {
            "kill -9 of a rank": one_of(JobProcesses.ranks),
            "kill -9 of a data worker": one_of(JobProcesses.data_workers),
            "kill -9 of the first node's launcher": one_of(lambda job: job.launchers(0)),
            "kill -9 of the second node's launcher": one_of(lambda job: job.launchers(1)),
            "kill -9 of srun": one_of(JobProcesses.sruns),
            "kill -9 of the batch script": one_of(JobProcesses.job_scripts),
            "node lost": self.lose_a_node,
            "slurmd restarted": self.restart_slurmd,
            "a rank frozen for 5 s": self.freeze,
            "scancel --signal=TERM": lambda run: self.scancel(run, "--signal=TERM"),
            "USR1, as at the time limit": lambda run: self.scancel(run, "--batch", "--signal=USR1"),
            "touch STOP": lambda run: (run.directory / "STOP").touch(),
            "scontrol requeue": self.requeue,
        }
        self.figures = {name: collections.Counter(dict.fromkeys(FIGURES, 0)) for name in self.kinds}
        self.worst: dict[str, int] = dict.fromkeys(self.kinds, 0)
        self.problems: list[str] = []
        self.next_kill = time.monotonic() + every_s

    def run_to_its_end(self, run: Run, kinds: Iterator[str], deadline: float) -> None:
        """Submit the run and disturb it once a minute until it is finished or time is over."""
        self.submit(run)
        while self.comes_so_far(run, deadline):
            name = next(kinds)
            known, newest, starts = len(cycles(run.directory)), run.newest(), self.starts(run)
            self.next_kill = time.monotonic() + self.every_s
            self.say(f"{name}: {run.directory.name}, checkpoint-{newest}")
            try:
                self.kinds[name](run)
                self.verify(run, name, newest)
            except RunOver:
                self.say(f"{run.directory.name} was over before the kill, which does not count")
                continue
            except (AssertionError, TimeoutError, OSError) as error:
                self.problem(f"{name}: {error}\n{run.job.output()[-TAIL:]}")
            self.await_progress(run, name)
            found = cycles(run.directory)[known:]
            figures = self.figures[name]
            figures["kills"] += 1
            figures["starts_again"] += self.starts(run) - starts
            figures["lost_steps"] += sum(cycle.lost_steps for cycle in found)
            figures["lost_s"] += round(sum(cycle.seconds for cycle in found))
            self.worst[name] = max([self.worst[name], *(cycle.lost_steps for cycle in found)])

    def comes_so_far(self, run: Run, deadline: float) -> bool:
        """Wait until the next kill is due and some steps are done; return whether the run runs."""
        wanted = run.steps() + self.chance.randrange(1, MOST_STEPS)

        def due() -> bool:
            return time.monotonic() > self.next_kill and run.steps() >= wanted

        def over() -> bool:
            return time.monotonic() > deadline

        def ended() -> bool:
            return self.slurm.state(run.job) in ENDED

        wait_until(lambda: ended() or due() or over(), "no step", run.job.output, 900)
        if over() or ended():
            state = self.slurm.wait(run.job, 900)
            if state != "COMPLETED" or not run.finished:
                self.problem(f"{run.directory.name} ended as {state}\n{run.job.output()[-TAIL:]}")
            return False
        return True

    def verify(self, run: Run, name: str, newest: int) -> None:
        """Check the run's checkpoints. If this kill ends all processes, wait for that first."""
        ends_job = name not in ("slurmd restarted", "a rank frozen for 5 s")
        # The job may start the ranks again at once.
        if ends_job and not re.search("kill -9 of a .*|kill -9 of the .* launcher", name):
            wait_until(lambda: not processes_of(run.directory), "processes are left")
        run.verify(newest)

    def await_progress(self, run: Run, name: str) -> None:
        """Wait for a new step; submit the command again if the job cannot make one."""
        steps = run.steps()

        def settled() -> bool:
            return run.steps() > steps or self.slurm.state(run.job) in ENDED

        try:
            wait_until(settled, f"after {name}: no new step", run.job.output, 600)
        except TimeoutError as error:
            self.problem(str(error))
            self.slurm.run("scancel", run.job.id)
            self.slurm.wait(run.job)
        if run.steps() > steps or run.finished:
            return
        self.figures[name]["by_hand"] += 1
        if name != "kill -9 of the batch script":  # nobody is left to requeue it
            state = self.slurm.state(run.job)
            self.problem(f"after {name}: {state}, not requeued\n{run.job.output()[-TAIL:]}")
        self.submit(run)
        wait_until(settled, f"after {name}, submitted again: no new step", run.job.output, 600)

    def submit(self, run: Run) -> None:
        """Submit the run's command once more."""
        env = {
            "STOKER_PROCESSES_PER_NODE": "1", "XDG_CACHE_HOME": str(self.jobs.files / "cache"),
        } | ({} if run.directory.name.startswith("whole") else SLOWLY)  # fmt: skip
        job = self.jobs.submit(
            run.directory, "--nodes=2", "--gpus-per-node=1", training=SCRIPTS[run.kind], env=env,
            **SETTINGS | ({"async_save": True} if run.kind == "pretraining" else {}),
        )  # fmt: skip
        run.jobs.append(job)

    def kill_one_of(self, find: Find) -> Callable[[Run], None]:
        return lambda run: self.pick(run, find).kill()

    def pick(self, run: Run, find: Find) -> psutil.Process:
        found: list[psutil.Process] = []

        def some() -> bool:
            found[:] = find(JobProcesses(run.job))
            return bool(found) or run.finished

        wait_until(some, "no such process")
        if not found:
            raise RunOver
        return self.chance.choice(found)

    def lose_a_node(self, run: Run) -> None:
        node = self.chance.choice(("n1", "n2"))
        restarts = self.restarts(run)
        self.slurm.kill_node(node)
        wait_until(lambda: self.restarts(run) > restarts, "not requeued", run.job.output)
        self.slurm.start_node(node)

    def restart_slurmd(self, _: Run) -> None:
        node = self.chance.choice(("n1", "n2"))
        self.slurm.stop_node(node)
        self.slurm.start_node(node)

    def freeze(self, run: Run) -> None:
        rank = self.pick(run, JobProcesses.ranks)
        rank.suspend()
        time.sleep(FROZEN_S)
        rank.resume()

    def scancel(self, run: Run, *options: str) -> None:
        self.slurm.run("scancel", *options, run.job.id)

    def requeue(self, run: Run) -> None:
        self.slurm.run("scontrol", "requeue", run.job.id)

    def restarts(self, run: Run) -> int:
        return int(self.slurm.fields(run.job).get("Restarts", 0))

    def starts(self, run: Run) -> int:
        return len(tiny.starts(run.directory))

    def problem(self, text: str) -> None:
        self.problems.append(text)
        self.say(f"PROBLEM {text}")

    def say(self, text: str) -> None:
        print(f"{datetime.datetime.now():%H:%M:%S}  {text}", flush=True)


def outcome(run: Path) -> list[object]:
    """Return the results that must be equal: logged figures of every step, evaluations, weights."""
    lines = [[line[name] for name in COMPARED] for line in tiny.train_lines(run)]
    return [lines, tiny.evaluations(run, "heldout"), tiny.weights(run)]


def endings(runs: list[Run]) -> collections.Counter[str]:
    """Count the ways in which starts ended, by the last line of each in the jobs' logs."""
    ways = {
        "75": r"stop[^;]*; requeued, start", "76": r"; requeued, start",
        "Slurm's own requeue": "Slurm has requeued it itself", "0": r"job \d+: done",
    }  # fmt: skip
    found: collections.Counter[str] = collections.Counter()
    for log in (job.output() for run in runs for job in run.jobs):
        for start in re.split(r"(?m)^.*job \d+, start \d+: ", log)[1:]:
            refused = re.findall(r"failed with exit code (\d+)", start)
            way = next((way for way, mark in ways.items() if re.search(mark, start)), None)
            found[refused[0] if refused else way or "no last line"] += 1
    return found


def soak(
    jobs: TrainingJobs, minutes: float, every_s: float, seed: int
) -> tuple[dict[str, object], list[str]]:
    """Return the figures and the failures."""
    chance = random.Random(seed)
    work = Soak(jobs, chance, every_s)
    whole = {}
    for kind in SCRIPTS:
        run = Run(kind, jobs.files / f"whole-{kind}")
        work.submit(run)
        assert jobs.slurm.wait(run.job) == "COMPLETED", run.job.output()
        whole[kind] = outcome(run.directory)
    rounds = (chance.sample(sorted(work.kinds), len(work.kinds)) for _ in itertools.count())
    kinds = itertools.chain.from_iterable(rounds)
    begun, runs, equal = time.monotonic(), [], 0
    work.next_kill = begun + every_s
    for number, kind in enumerate(itertools.cycle(SCRIPTS)):
        if time.monotonic() > begun + minutes * 60:
            break
        run = Run(kind, jobs.files / f"run{number}-{kind}")
        runs.append(run)
        work.run_to_its_end(run, kinds, begun + minutes * 60)
        if run.finished and outcome(run.directory) == whole[kind]:
            equal += 1
        else:
            work.problem(f"{run.directory.name} did not end as the undisturbed one")
        work.say(f"{run.directory.name}: finished, {equal} of {len(runs)} runs are equal")
    rows = {
        name: dict(figures) | {"most_lost_steps": work.worst[name]}
        for name, figures in work.figures.items()
    }
    totals = {
        "minutes": round((time.monotonic() - begun) / 60, 1), "seed": seed,
        "kills": sum(row["kills"] for row in rows.values()),
        "starts": sum(work.starts(run) for run in runs), "runs": len(runs),
        "runs_that_ended_as_the_undisturbed_one": equal,
        "steps_of_a_run": STEPS, "save_steps": SAVE_STEPS,
        "committed_checkpoints_verified_after_kills": sum(run.checkpoints for run in runs),
        "problems": len(work.problems),
    }  # fmt: skip
    totals |= {f"starts_that_ended_with_{way}": n for way, n in endings(runs).most_common()}
    jobs.remove_notes()
    return rows | totals, work.problems


def main() -> int:
    """Run the soak; write its figures only after a whole hour."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--every", type=float, default=60, help="seconds between kills")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="stoker-soak-"))
    slurm = SlurmCluster(directory / "slurm")
    commit = current_commit()
    (directory / "slurm").mkdir()
    (directory / "files").mkdir()
    try:
        slurm.start()
        jobs = TrainingJobs(slurm, directory / "files", attention_dropout=0.1)
        figures, problems = soak(jobs, arguments.minutes, arguments.every, arguments.seed)
    finally:
        slurm.stop()
    record = {
        "made_by": "make soak",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": " to ".join(dict.fromkeys([commit, current_commit()])),
        "hardware": f"{os.cpu_count()} CPU cores ({platform.machine()})",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **figures,
    }
    text = json.dumps(record, indent=2) + "\n"
    print(text)
    if arguments.minutes >= 60:
        RESULT.write_text(text)
    if problems:
        print(f"{len(problems)} problem(s), see above; runs and logs: {directory}")
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
