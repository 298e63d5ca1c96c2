"""`slurm/submit.sh --when`: start and end of a training for several node counts and time limits.

    python -m utils.submit.when DIRECTORY GPU COUNT OPTIONS... JOB_SCRIPT ARGUMENTS...

Slurm forecasts when the jobs start (sbatch --test-only). Nothing is submitted. A dry run for each
number of nodes checks batch size and memory. If the run has already trained, the forecast uses the
measured speed. Otherwise the dry run forecasts the speed on a GPU model, such as H100-80GB (see
--assume). GPU is the name of this model, or empty. COUNT is the number of OPTIONS for sbatch, which
runs in DIRECTORY.
"""

import datetime
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from utils.config.errors import ConfigurationError
from utils.config.launch_settings import LAUNCHER_VARIABLES
from utils.config.strategy import SUBMITTING
from utils.host.journal_file import duration
from utils.host.redaction import redact
from utils.launch.script import run_script
from utils.launch.slurm import PROCESSES, time_limit_s
from utils.observe.history import read_run
from utils.submit.check import ONE_NODE, dry_run_command, signal_lead_s
from utils.submit.limits import count_gpus

STARTUP_S = 300.0  # from a job's start to its first step, if no earlier job measured this time
REQUEUE_S = 120.0  # Slurm's delay before a requeued job starts again
FAR_S = 300 * 24 * 3600.0  # if a job would wait longer, jobs without a time limit are ahead
SAME = "All rows are the same training: the global batch does not depend on the number of GPUs."
NOT_SAME = "The rows are different trainings: give global_batch_size, then all have the same batch."
FORECAST_LIMITS = """\
Slurm knows neither which jobs will end early nor who will submit with a higher priority. After
each requeue the job is assumed to wait as long as now. Nothing was submitted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print start and end of the training for each node count and time limit, and the best command.

    The best command has the earliest end. Raises ConfigurationError if the job cannot be forecast.
    """
    directory, gpu, count, *words = sys.argv[1:] if argv is None else argv
    options, script = words[: int(count)], words[int(count) :]
    kind, now_s = Path(script[0]).name, time.time()
    dry_run, job = dry_run_command(kind, script[1:]), requested_job(words, directory, kind, gpu)
    gpus, counts = job.gpus, {max(1, job.nodes * part // 4) for part in (1, 2, 4, 8, 16)}
    options = [each for each in options if not each.startswith(("--nodes=", "--time="))]
    lead_s = signal_lead_s(options, Path(directory, script[0])) or 0
    unit = f"{'GPU' if gpus else 'node'}-hours"
    rows = [f"{'nodes':>5} {'limit':>9}  {'start':<16}  {'end':<16}  {unit:>10}  job starts"]
    ends, sources = list[tuple[int, float, int, str]](), dict[str, None]()
    trainings = set[tuple[int, int]]()
    for nodes in sorted({job.nodes} if kind in ONE_NODE else counts):
        start_text = ""
        try:  # ask Slurm before the dry run, which takes longer
            asked = [*options, f"--nodes={nodes}", f"--time={job.time}", *script]
            start_text = f"starts {date(start_s(asked, directory, now_s))}, "
            run_s, startup_s, source, training = work_left(dry_run, nodes, gpus, gpu)
            sources[source] = None
            trainings.add(training)
            for limit_s in candidate_time_limits(job.limit_s, lead_s + startup_s, run_s):
                limit = f"{limit_s // 3600}:{limit_s % 3600 // 60:02}:00"
                choice = [*options, f"--nodes={nodes}", f"--time={limit}", *script]
                wait_s = start_s(choice, directory, now_s) - now_s
                starts, busy_s, end_s = forecast_jobs(wait_s, run_s, limit_s - lead_s, startup_s)
                cost = busy_s * nodes * (gpus or 1) / 3600
                rows.append(
                    f"{nodes:>5} {limit:>9}  {date(now_s + wait_s)}  {date(now_s + end_s)}  "
                    f"{cost:>10,.1f}  {starts:>10}"
                )
                # If two choices end in the same minute, the cheaper one is better.
                ends.append((round(end_s / 60), cost, limit_s, shlex.join(choice)))
        except ConfigurationError as error:
            rows.append(f"{nodes:>5}  {start_text}{error.problems[0]}")
    if ends:
        rows.append(f"earliest end: slurm/submit.sh {min(ends)[3]}")
    note = SAME if len(trainings) < 2 else NOT_SAME
    sys.stdout.write(redact("\n".join([*rows, *sources, note, FORECAST_LIMITS])))
    return 0


@dataclass(frozen=True)
class Request:
    """The resources that a job requests. time: --time as text. gpus: GPUs per node."""

    nodes: int
    time: str
    limit_s: int
    gpus: int


def requested_job(words: Sequence[str], directory: str, kind: str, gpu: str) -> Request:
    """Return the nodes, time limit and GPUs that the job requests.

    words: sbatch's options and the job script. kind: the name of the job script. Raises
    ConfigurationError for a job that cannot be forecast, such as a sweep.
    """
    output = test_only(words, directory)
    job = dict(re.findall(r"^sbatch: (\S+) *: (.*)$", output, re.MULTILINE))
    limit_s = time_limit_s(job.get("time", ""))
    if kind == "sweep_job.sh" or not limit_s or "gpus" in job:
        raise ConfigurationError(
            "--when is for one training with a --time limit and GPUs per node; sbatch says: "
            + output.rpartition("\n")[2]
        )
    given = [f"gpu:{job.get(f'gpus-per-{each}', 0)}" for each in ("node", "task")]
    gpus = next(filter(None, map(count_gpus, [job.get("gres", ""), *given])), 0)
    if gpu and not gpus:
        raise ConfigurationError(
            f"--when={gpu} forecasts for GPUs, and the job asks for none: give --gpus-per-node, or "
            "--when alone"
        )
    nodes = int(re.findall(r"\d+", job.get("nodes", "1"))[0])
    return Request(nodes, job["time"], limit_s, gpus)


def candidate_time_limits(asked_s: int, overhead_s: float, run_s: float) -> list[int]:
    """Return a list of time limits to compare, in seconds, the longest first.

    The limits are `asked_s`, a half, a quarter and an eighth of `asked_s`, and the shortest limit
    in which the training ends. overhead_s: the seconds of a job in which it does not train. run_s:
    seconds of training. Limits below twice `overhead_s` are left out. Raises ConfigurationError if
    `asked_s` itself is too short.
    """
    enough_s = math.ceil(1.1 * (run_s + overhead_s) / 600) * 600
    found = {min(asked_s, enough_s), *(asked_s // part // 60 * 60 for part in (1, 2, 4, 8))}
    if overhead_s > asked_s / 2:
        raise ConfigurationError(
            f"the time limit is too short: {duration(overhead_s)} of each start are not training"
        )
    return sorted((limit for limit in found if overhead_s <= limit / 2), reverse=True)


def forecast_jobs(
    wait_s: float, run_s: float, until_signal_s: float, startup_s: float
) -> tuple[int, float, float]:
    """Return (number of job starts, seconds of all starts together, seconds until training ends).

    The job is requeued until the training ends. Before each start the job waits `wait_s`. After
    `startup_s` the job trains until Slurm's stop signal. run_s: seconds of the whole training.
    until_signal_s: seconds from a start to the stop signal.
    """
    starts = math.ceil(run_s / (until_signal_s - startup_s))
    busy_s = run_s + starts * startup_s
    return starts, busy_s, wait_s + busy_s + (starts - 1) * max(wait_s, REQUEUE_S)


def date(unix_s: float) -> str:
    """Return a unix time as local date and time, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))


def command_output(command: Sequence[str], env: Mapping[str, str], directory: str = ".") -> str:
    """Return stdout and stderr of a command as one text. directory: where the command runs."""
    done = subprocess.run(
        command, env=env, cwd=directory, text=True, errors="replace", check=False,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.stdout.strip()


def test_only(words: Sequence[str], directory: str) -> str:
    """Return the output of sbatch --test-only: the options that it read, and a start forecast."""
    env = {**os.environ, "SLURM_TIME_FORMAT": "standard"}
    return command_output(["sbatch", "--verbose", "--test-only", *words], env, directory)


def start_s(words: Sequence[str], directory: str, now_s: float) -> float:
    """Return the job's start that sbatch forecasts: unix time in seconds, at least `now_s`.

    Raises ConfigurationError with sbatch's message if there is no forecast.
    """
    output = test_only(words, directory)
    found = re.findall(r"^sbatch: Job \d+ to start at (\S+) ", output, re.MULTILINE)
    if not found:
        raise ConfigurationError(output.rpartition("\n")[2])
    start = datetime.datetime.fromisoformat(found[0]).timestamp()
    if start > now_s + FAR_S:
        raise ConfigurationError("Slurm cannot tell: jobs without a time limit are ahead")
    return max(start, now_s)


def work_left(
    command: Sequence[str], nodes: int, gpus: int, gpu: str
) -> tuple[float, float, str, tuple[int, int]]:
    """Return (seconds of training left, seconds of a start-up, source of both, totals).

    The source is a text such as "measured". The totals are the steps and tokens of the whole
    training. command: the dry run. gpus: GPUs per node. gpu: a GPU's name, or "". Raises
    ConfigurationError if the dry run fails, or if the speed is not known.
    """
    ranks = nodes * (gpus or int(os.environ.get(PROCESSES, "1")))
    env = {name: text for name, text in os.environ.items() if name not in LAUNCHER_VARIABLES}
    if gpu:
        command = [*command, "--assume", f"{nodes}x{gpus}x{gpu}"]
    else:
        env |= {"WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks // nodes}", SUBMITTING: "1"}
        env |= {} if gpus else {"ACCELERATE_USE_CPU": "true"}
    output = command_output([sys.executable, *command], env)
    problems = re.findall(r"^  - (.*)", output, re.MULTILINE)
    if problems or "tokens with padding" not in output:
        raise ConfigurationError(problems or output.rpartition("\n")[2])
    counts = (r"run: ([\d,]+) steps", r"= ([\d,]+) tokens with padding")
    steps, tokens = (int(re.findall(each, output)[0].replace(",", "")) for each in counts)
    resumed = re.findall(r"would resume from (.+)/checkpoint-(\d+)$", output, re.MULTILINE)
    folder = re.findall(r"run directory: (.+) \(\w+\)$", output, re.MULTILINE)[0]
    folder, done_steps = resumed[0] if resumed else (folder, 0)
    run, left = read_run(Path(folder), whole=False), steps - int(done_steps)
    if left <= 0 or "a start would have nothing to do" in output:
        raise ConfigurationError("nothing is left to train")
    # Skip interactive jobs, which may have run other commands first. They have no restart count.
    first = [start for start in run.starts if str(start.job.get("restart_in_job")) == "0"]
    began = [(start.trained, start.job.get("start_time")) for start in first]
    times = [trained - job for trained, job in began if trained and isinstance(job, float)]
    startup_s = statistics.median(times) if times else STARTUP_S
    source = f"start-up {duration(startup_s)} ({'measured' if times else 'assumed'})"
    logged = run.last_trained.lines if run.last_trained else ()
    logs = [(line["step"], line["time"]) for line in logged if line["event"] == "train"]
    if len(logs) > 1 and logs[-1][0] > logs[0][0]:
        pace_s = (logs[-1][1] - logs[0][1]) / (logs[-1][0] - logs[0][0])
        launch = run.last_trained.entry.get("launch") or {} if run.last_trained else {}
        logged_ranks = int(launch.get("world_size") or ranks)
        pace = f"{pace_s:.3g} s a step on {logged_ranks} ranks (measured), in proportion on others"
        run_s = left * pace_s * logged_ranks / ranks
        return run_s, startup_s, f"{pace}; {source}", (steps, tokens)
    if speed := re.findall(r"forecast: ([\d,]+) .*tokens/s", output):
        run_s = tokens * left / steps / int(speed[0].replace(",", ""))
        source = f"forecast, without evaluations and saves; {source}"
        return run_s, startup_s, source, (steps, tokens)
    raise ConfigurationError("the speed is not known: name the GPU, as in --when=H100-80GB")


if __name__ == "__main__":
    sys.exit(run_script(main))
