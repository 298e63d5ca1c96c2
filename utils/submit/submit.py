"""Finds the options of an sbatch command: in the job script's head, the environment, the words.

Slurm's precedence: the command line wins over SBATCH_* variables, those over the #SBATCH head, and
of one option given twice the later one counts. The table is sbatch's of Slurm 22.05 to 25.05; an
option it does not hold is taken for a flag, or for whatever `--name=value` says.
"""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from utils.config.batch import LAUNCHER_VARIABLES
from utils.config.errors import ConfigurationError, ExitCode
from utils.launch.accelerate_command import Strategy, choose_strategy
from utils.launch.script import run_script
from utils.launch.slurm import PROCESSES, REQUEST, JobRequest, StopSignal, on_cpu

if TYPE_CHECKING:
    from utils.submit.sweep import Sweep


# What has to be known of an option is whether the next word belongs to it.
_WITH_VALUE = (
    "account", "acctg-freq", "array", "batch", "bb", "bbf", "begin", "chdir",
    "cluster-constraint", "clusters", "comment", "consolidate-segments", "constraint",
    "container", "container-id", "core-spec", "cores-per-socket", "cpu-freq", "cpus-per-gpu",
    "cpus-per-task", "deadline", "delay-boot", "dependency", "distribution", "error", "exclude",
    "export", "export-file", "extra", "extra-node-info", "gid", "gpu-bind", "gpu-freq", "gpus",
    "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres", "gres-flags", "hint", "input",
    "job-name", "kill-on-invalid-dep", "licenses", "mail-type", "mail-user", "mcs-label", "mem",
    "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nodefile", "nodelist",
    "nodes", "ntasks", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node",
    "ntasks-per-socket", "open-mode", "oom-kill-step", "output", "partition", "power", "prefer",
    "priority", "profile", "qos", "reservation", "resv-ports", "segment", "signal",
    "sockets-per-node", "spread-segments", "stepmgr", "switches", "thread-spec",
    "threads-per-core", "time", "time-min", "tmp", "tres-bind", "tres-per-job", "tres-per-node",
    "tres-per-socket", "tres-per-task", "uid", "wait-all-nodes", "wckey", "wrap",
)  # fmt: skip
# Those take a value only as --name=value.
_OPTIONAL_VALUE = ("exclusive", "get-user-env", "nice", "no-kill", "propagate")
_FLAGS = (
    "contiguous", "help", "hold", "ignore-pbs", "no-requeue", "overcommit", "oversubscribe",
    "parsable", "quiet", "reboot", "requeue", "spread-job", "test-only", "usage",
    "use-min-nodes", "verbose", "version", "wait",
)  # fmt: skip
_LETTERS = {
    "A": "account", "a": "array", "B": "extra-node-info", "b": "begin", "C": "constraint",
    "c": "cpus-per-task", "D": "chdir", "d": "dependency", "e": "error", "F": "nodefile",
    "G": "gpus", "H": "hold", "h": "help", "i": "input", "J": "job-name", "k": "no-kill",
    "L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes", "n": "ntasks",
    "O": "overcommit", "o": "output", "p": "partition", "Q": "quiet", "q": "qos",
    "S": "core-spec", "s": "oversubscribe", "t": "time", "u": "usage", "V": "version",
    "v": "verbose", "W": "wait", "w": "nodelist", "x": "exclude",
}  # fmt: skip
_NAMES = [*_WITH_VALUE, *_OPTIONAL_VALUE, *_FLAGS]
# The input variables that matter here; sbatch reads the others itself.
_VARIABLES = {
    "SBATCH_ARRAY_INX": "array",
    "SBATCH_EXPORT": "export",
    "SBATCH_GPUS": "gpus",
    "SBATCH_GPUS_PER_NODE": "gpus-per-node",
    "SBATCH_GPUS_PER_TASK": "gpus-per-task",
    "SBATCH_GRES": "gres",
    "SBATCH_JOB_NAME": "job-name",
    "SBATCH_NO_REQUEUE": "no-requeue",
    "SBATCH_OUTPUT": "output",
    "SBATCH_REQUEUE": "requeue",
    "SBATCH_SIGNAL": "signal",
    "SBATCH_TIMELIMIT": "time",
}
_HEAD_WORD = re.compile(
    r"""\s+|\#.*|(?P<word>(?:[^\s'"\\]|\\.|'[^']*'|"(?:[^"\\]|\\.)*")+)""", re.DOTALL
)


@dataclass(frozen=True)
class GivenOption:
    """An option with its value (None for a flag) and where it was given."""

    name: str
    value: str | None
    source: str


@dataclass(frozen=True)
class Submission:
    """An sbatch command taken apart: its options in order, the job script and what follows it."""

    options: list[GivenOption]
    job_script: str
    arguments: list[str]


def read_submission(
    words: Sequence[str], environment: Mapping[str, str], directory: str = "."
) -> Submission:
    """Take `sbatch`'s words apart and add what environment and head say, the weakest first.

    The job script's path is from `directory`. Raises ConfigurationError when there is no job
    script, or one that cannot be read.
    """
    given, rest = read_words(words)
    if any(option.name == "wrap" for option in given):
        raise ConfigurationError(
            "--wrap hands in a command: give a job script, as slurm/train_job.sh"
        )
    if not rest:
        raise ConfigurationError(
            "no job script: slurm/submit.sh [sbatch options] slurm/train_job.sh SCRIPT ARGS..."
        )
    job_script = rest[0]
    options = [*read_head(job_script, directory), *read_environment(environment), *given]
    return Submission(options, job_script, rest[1:])


def read_words(words: Sequence[str], source: str = "") -> tuple[list[GivenOption], list[str]]:
    """Split words into options and what follows the last of them, as getopt does for sbatch.

    `source` says where the words are from; "" is the command line, where the words say it.
    """
    given: list[GivenOption] = []
    position = 0
    while position < len(words):
        word = words[position]
        if word == "--":
            return given, list(words[position + 1 :])
        if word == ":":
            raise ConfigurationError("a heterogeneous job (`:`) cannot run one training")
        if not word.startswith("-") or word == "-":
            break
        following = words[position + 1] if position + 1 < len(words) else None
        read = _long_option if word.startswith("--") else _letters
        options, used = read(word, following)
        shown = word if used == 1 else f"{word} {following}"
        given += [GivenOption(name, value, source or shown) for name, value in options]
        position += used
    return given, list(words[position:])


def _long_option(word: str, following: str | None) -> tuple[list[tuple[str, str | None]], int]:
    written, attached, value = word[2:].partition("=")
    name = _full_name(written)
    if attached:
        return [(name, value)], 1
    if name not in _WITH_VALUE:
        return [(name, None)], 1
    return [(name, _needed(word, following))], 2


def _full_name(written: str) -> str:
    """Complete an abbreviated name; one that is unknown stays as it is, for sbatch to judge."""
    if written in _NAMES:
        return written
    meant = [name for name in _NAMES if name.startswith(written)]
    if len(meant) > 1:
        raise ConfigurationError(f"--{written} may be {' or '.join(f'--{n}' for n in meant)}")
    return meant[0] if meant else written


def _letters(word: str, following: str | None) -> tuple[list[tuple[str, str | None]], int]:
    """Read `-N4`, `-N 4` and flags in one word, `-Hv`."""
    options: list[tuple[str, str | None]] = []
    for place, letter in enumerate(word[1:], start=2):
        name = _LETTERS.get(letter)
        if name is None:
            raise ConfigurationError(f"sbatch has no option -{letter} (in {word})")
        if name in _WITH_VALUE:
            attached = word[place:]
            value = attached or _needed(f"-{letter}", following)
            return [*options, (name, value)], 1 if attached else 2
        options.append((name, None))
        if name in _OPTIONAL_VALUE:
            break  # what follows in the word is its value
    return options, 1


def _needed(option: str, value: str | None) -> str:
    if value is None:
        raise ConfigurationError(f"{option} is the last word, but needs a value")
    return value


def read_head(job_script: str, directory: str = ".") -> list[GivenOption]:
    """Return the options of the `#SBATCH` lines before the script's first command."""
    try:
        text = Path(directory, job_script).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigurationError(
            f"the job script {job_script} cannot be read: {error.strerror}. (Was an option before "
            "it meant to have a value? Write --name=value.)"
        ) from error
    given: list[GivenOption] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            source = f"{job_script}:{number}"
            try:
                words = _head_words(line.removeprefix("#SBATCH"))
            except ValueError as error:
                raise ConfigurationError(f"{source}: {error}") from error
            options, rest = read_words(words, source)
            if rest:
                raise ConfigurationError(f"{source}: {rest[0]} is no option")
            given += options
    return given


def _head_words(text: str) -> list[str]:
    """Split as sbatch does: shell quotes, and a comment from a word that starts with #."""
    words, position = [], 0
    while match := _HEAD_WORD.match(text, position):
        position = match.end()
        if match["word"]:
            words += shlex.split(match["word"])
    if position < len(text):
        raise ValueError(f"a quote is not closed: {text[position:].strip()}")
    return words


def read_environment(environment: Mapping[str, str]) -> list[GivenOption]:
    """Return the options that SBATCH_* variables set."""
    given = []
    for variable, name in _VARIABLES.items():
        value = environment.get(variable)
        if value is None:
            continue
        if name not in _FLAGS:
            given.append(GivenOption(name, value, variable))
        elif value in ("", "yes") or (value.isdigit() and int(value)):
            given.append(GivenOption(name, None, variable))
    return given


# Reads from sbatch's options what the run depends on: nodes, GPUs, time limit, signal, array.

Value = TypeVar("Value")
# Slurm sends the signal this long before the limit when --signal names no time.
DEFAULT_SIGNAL_LEAD_S = 60
_NO_LIMIT = ("-1", "0", "infinite", "unlimited")
_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?"
    r"|(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)|(?P<only_minutes>\d+)(?::(?P<and_seconds>\d+))?)"
)
_SIGNAL = re.compile(r"(?:(?P<to>[RB]{1,2}):)?(?:SIG)?(?P<name>\w+)(?:@(?P<lead>\d+))?", re.I)
_INDICES = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


def read_request(
    submission: Submission, environment: Mapping[str, str]
) -> tuple[JobRequest, Strategy]:
    """Return what the job asks for and the strategy it will train with.

    Raises ConfigurationError with every fault of the request.
    """
    reading = _Reading(submission.options)
    nodes = reading.read("nodes", _node_count)
    tasks = reading.read("ntasks", _count)
    per_node = reading.read("ntasks-per-node", _count)
    if nodes is None:  # Slurm spreads the tasks
        nodes = math.ceil((tasks or 1) / (per_node or 1))
    if per_node is None:
        per_node = math.ceil((tasks or nodes) / nodes)
    gpus = _gpus_per_node(reading, nodes, per_node)
    limit = reading.read("time", time_limit_s)
    stop_signal = reading.read("signal", stop_signal_of)
    array = reading.read("array", array_indices)
    processes = _processes_per_node(gpus, environment, reading.problems)
    strategy = None
    if not reading.problems:
        try:
            devices = None if on_cpu(environment) else processes
            strategy = choose_strategy(environment, nodes, processes, devices)
        except ConfigurationError as error:
            reading.problems += error.problems
    if reading.problems:
        raise ConfigurationError(reading.problems)
    assert strategy is not None
    job_name = reading.text("job-name") or submission.job_script.rpartition("/")[2]
    default_log = "slurm-%j.out" if array is None else "slurm-%A_%a.out"
    request = JobRequest(
        job_script=submission.job_script,
        nodes=nodes,
        gpus_per_node=gpus,
        processes_per_node=processes,
        tasks_per_node=max(per_node, math.ceil((tasks or 1) / nodes)),
        strategy=strategy.name,
        strategy_file=strategy.file,
        time_limit_s=limit or None,
        signal=stop_signal,
        requeue=_requeue(submission.options),
        array=array,
        job_name=job_name,
        log=reading.text("output") or default_log,
        sources={option.name: option.source for option in submission.options},
    )
    return request, strategy


class _Reading:
    """The options that count, by name, and the faults found in them."""

    def __init__(self, options: list[GivenOption]) -> None:
        self.options = {option.name: option for option in options}  # the later one counts
        self.problems: list[str] = []

    def text(self, name: str) -> str | None:
        option = self.options.get(name)
        return None if option is None else option.value or ""

    def source(self, name: str) -> str:
        """Name an option as the user gave it: `--nodes=2` or `--nodes=2 (slurm/job.sh:7)`."""
        option = self.options[name]
        written = f"--{name}={option.value}"
        return option.source if option.source.startswith("-") else f"{written} ({option.source})"

    def read(self, name: str, parse: Callable[[str], Value]) -> Value | None:
        text = self.text(name)
        if text is None:
            return None
        try:
            return parse(text)
        except ValueError as error:
            self.problems.append(f"{self.source(name)}: {error}")
            return None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("expected a number of at least 1")
    return int(text)


def _node_count(text: str) -> int:
    """Read `4`, `4-4` and `1k`; a range is refused."""
    numbers = re.fullmatch(r"(\d+)([kKmM]?)(?:-(\d+)([kKmM]?))?", text)
    if numbers is None:
        raise ValueError("expected one number of nodes; the run is planned for exactly that many")
    least, unit, most, unit_of_most = numbers.groups()
    factor = {"": 1, "k": 1024, "m": 1024**2}
    low = int(least) * factor[unit.lower()]
    high = low if most is None else int(most) * factor[(unit_of_most or "").lower()]
    if low != high:
        raise ValueError(
            "a range lets Slurm choose, but global batch and processes are worked out for a fixed "
            f"number of nodes: give --nodes={low} or --nodes={high}"
        )
    if low < 1:
        raise ValueError("expected a number of at least 1")
    return low


def time_limit_s(text: str) -> int:
    """Read a time limit in Slurm's formats, rounded up to minutes as Slurm does; 0 is none.

    >>> time_limit_s("90"), time_limit_s("1:30"), time_limit_s("2-12"), time_limit_s("UNLIMITED")
    (5400, 120, 216000, 0)
    """
    if text.lower() in _NO_LIMIT:
        return 0
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(
            "no time in Slurm's formats: MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, "
            "DAYS-HOURS, DAYS-HOURS:MINUTES or DAYS-HOURS:MINUTES:SECONDS"
        )
    part = {name: int(value or 0) for name, value in match.groupdict().items()}
    hours = part["days"] * 24 + part["hours"] + part["h"]
    minutes = part["minutes"] + part["m"] + part["only_minutes"]
    seconds = part["seconds"] + part["s"] + part["and_seconds"]
    return math.ceil((hours * 3600 + minutes * 60 + seconds) / 60) * 60


def stop_signal_of(text: str) -> StopSignal:
    """Read `[{R|B}:]SIGNAL[@SECONDS]`."""
    match = _SIGNAL.fullmatch(text)
    if match is None:
        raise ValueError("expected [B:]SIGNAL[@SECONDS], as B:USR1@300")
    name = match["name"].upper()
    if name.isdigit():
        try:
            name = signal.Signals(int(name)).name.removeprefix("SIG")
        except ValueError:
            raise ValueError(f"there is no signal {name}") from None
    elif f"SIG{name}" not in signal.Signals.__members__:
        raise ValueError(f"there is no signal {name}")
    lead = DEFAULT_SIGNAL_LEAD_S if match["lead"] is None else int(match["lead"])
    return StopSignal(name, lead, "B" in (match["to"] or "").upper())


def array_indices(text: str) -> tuple[int, ...]:
    """Read `0-15`, `1,3,5-9:2` with or without a limit such as `%4`."""
    listed, _, limit = text.partition("%")
    if limit and not limit.isdecimal():
        raise ValueError("expected a number after %, as 0-15%4")
    indices: set[int] = set()
    for entry in listed.split(","):
        match = _INDICES.fullmatch(entry)
        if match is None:
            raise ValueError("expected numbers and ranges, as 0-15%4 or 1,3,5-9:2")
        first, last, step = match.groups()
        indices.update(range(int(first), int(last or first) + 1, int(step or 1) or 1))
    return tuple(sorted(indices))


def gpus_of(text: str) -> int:
    """Read `4`, `h100:4` and `a100:2,v100:1`."""
    total = 0
    for entry in text.split(","):
        number = entry.rpartition(":")[2]
        if not number.isdecimal():
            raise ValueError("expected a number of GPUs, as 4 or h100:4")
        total += int(number)
    return total


def gpus_of_gres(text: str) -> int | None:
    """Read the GPUs of `gpu:4`, `gpu:h100:4`, `gpu` (one) or `tmpfs:1G` (None: it asks for none).

    Of one type named twice the last counts, different types add up.
    """
    by_type: dict[str, int] = {}
    for entry in text.split(","):
        kind, *rest = entry.split("(")[0].removeprefix("gres:").removeprefix("gres/").split(":")
        if kind != "gpu":
            continue
        if rest and not rest[-1].isdecimal():
            rest = [*rest, "1"]
        by_type[":".join(rest[:-1])] = int(rest[-1]) if rest else 1
    return sum(by_type.values()) if by_type else None


def _gpus_per_node(reading: _Reading, nodes: int, tasks_per_node: int) -> int:
    """Return the GPUs of a node by whichever option asks for them; sbatch refuses conflicts.

    --gres beside --gpus-per-node is none to Slurm: it takes --gres (seen with 22.05), which is how
    a --gres on the command line overrides the head.
    """
    per_task = reading.read("gpus-per-task", gpus_of) or 0
    for per_node in (
        reading.read("gres", gpus_of_gres),
        reading.read("gpus-per-node", gpus_of),  # 0 takes back what the head asks for
        per_task * tasks_per_node,
    ):
        if per_node:
            return per_node
    total = reading.read("gpus", gpus_of) or 0
    if total % nodes:
        reading.problems.append(
            f"{reading.source('gpus')}: {total} GPUs do not divide over {nodes} nodes, and every "
            "node runs equally many processes: give --gpus-per-node"
        )
    return total // nodes


def _processes_per_node(gpus: int, environment: Mapping[str, str], problems: list[str]) -> int:
    """Return what slurm/launch_node.sh will start on each node: one process a GPU."""
    cpu = on_cpu(environment)
    given = environment.get(PROCESSES, "")
    if given and not (given.isdecimal() and int(given)):
        problems.append(f"{PROCESSES} is {given!r}: expected a number of at least 1")
    elif given and gpus and not cpu and int(given) != gpus:
        problems.append(
            f"{PROCESSES} is {given}, but the job asks for {gpus} GPUs a node, which take one "
            f"process each: unset {PROCESSES} (it is for CPU runs)"
        )
    elif not (given or gpus or cpu):
        problems.append(
            "the job asks for no GPUs: add --gpus-per-node=N. To train on CPUs set "
            f"ACCELERATE_USE_CPU=true; where Slurm does not count the GPUs of a node, set "
            f"{PROCESSES} to their number."
        )
    elif given:
        return int(given)
    return gpus if gpus and not cpu else 1


def _requeue(options: list[GivenOption]) -> bool | None:
    given = [option.name for option in options if option.name in ("requeue", "no-requeue")]
    return given[-1] == "requeue" if given else None


# Checks a job before it queues; slurm/submit.sh calls it and hands the job in if it returns 0.

ROOT_VARIABLE = "STOKER_ROOT"
LAUNCHER = "slurm/launch_node.sh"
STDERR = 2  # stdout is sbatch's alone


def main(argv: Sequence[str] | None = None) -> int:
    """Check the submission that the words make; returns the exit code of the dry run."""
    directory, facts, *words = sys.argv[1:] if argv is None else argv
    submission = read_submission(words, os.environ, directory)
    _check_root(submission, Path(directory))
    kind = Path(submission.job_script).name
    if kind == "prepare_job.sh":
        return _check_preparation(submission, Path(facts))
    request, strategy = read_request(submission, os.environ)
    for warning in _lost_variables(submission, os.environ):
        say(f"WARNING  {warning}")
    if kind == "sweep_job.sh":
        return _check_sweep(submission, request, strategy, Path(facts))
    return _check_training(submission, request, strategy, Path(facts))


def say(line: str) -> None:
    """Print a line for the user; stdout is sbatch's, which other programs read."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _check_root(submission: Submission, directory: Path) -> None:
    """Refuse a job that will not find this repository, or will find another one.

    The job scripts look where STOKER_ROOT says, then in the job's directory.
    """
    here = Path.cwd().resolve()
    named = os.environ.get(ROOT_VARIABLE)
    chdir = next((option.value for option in submission.options if option.name == "chdir"), None)
    candidates = [Path(named)] if named else [directory / (chdir or "."), directory]
    found = next((path for path in candidates if (path / LAUNCHER).is_file()), None)
    if found is None:
        raise ConfigurationError(
            f"the job will not find the repository: there is no {LAUNCHER} in {candidates[0]}. "
            f"Call slurm/submit.sh in {here}, or export {ROOT_VARIABLE}={shlex.quote(str(here))}."
        )
    if found.resolve() != here:
        raise ConfigurationError(
            f"the job will run the repository in {found.resolve()}, but this is {here}: call the "
            f"slurm/submit.sh of that one, or set {ROOT_VARIABLE}."
        )


def _lost_variables(submission: Submission, environment: Mapping[str, str]) -> list[str]:
    """Say which of our variables --export keeps from the job."""
    exported = next(
        (option for option in reversed(submission.options) if option.name == "export"), None
    )
    if exported is None or "ALL" in (exported.value or "").split(","):
        return []
    passed = {entry.partition("=")[0] for entry in (exported.value or "").split(",")}
    lost = [
        name
        for name in sorted(environment)
        if name == "ACCELERATE_CONFIG" or name.startswith(("STOKER_", "ACCELERATE_USE_"))
        if name not in passed
    ]
    if not lost:
        return []
    return [
        f"--export={exported.value} ({exported.source}) keeps {', '.join(lost)} from the job: "
        "name them there, or use --export=ALL"
    ]


def _check_training(
    submission: Submission, request: JobRequest, strategy: Strategy, facts: Path
) -> int:
    """Dry-run the script with the launch and the request in its environment."""
    if not submission.arguments:
        raise ConfigurationError(
            f"{submission.job_script} runs a script: give it one, as pretrain.py --config ..."
        )
    script, *arguments = submission.arguments
    _check_script(script, arguments)
    found = facts / "run.json"
    environment = dry_run_environment(replace(request, facts_file=str(found)), strategy)
    done = subprocess.run(
        [sys.executable, script, *arguments, "--dry_run"],
        env=environment,
        stdout=STDERR,
        check=False,
    )
    if done.returncode == ExitCode.DONE:
        output_dir = json.loads(found.read_text(encoding="utf-8"))["output_dir"]
        stop = shlex.quote(f"{output_dir}/STOP")
        _leave(
            facts,
            [],
            [
                *_watching(request.job_name, request.log, request.array is not None),
                f"stop:    touch {stop}",
            ],
        )
    return done.returncode


def _check_script(script: str, arguments: Sequence[str]) -> None:
    """Refuse what a dry run would start for real, or would not find."""
    try:
        text = Path(script).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigurationError(
            f"{script} cannot be read: {error.strerror} (paths are from the repository's root)"
        ) from error
    if not any(name in text for name in ("parse_pretraining", "parse_fine_tuning", "dry_run")):
        raise ConfigurationError(
            f"{script} does not know --dry_run, so nothing can be checked: hand the job in with "
            "sbatch itself"
        )
    if any(word.split("=")[0] in ("--dry_run", "--dry-run") for word in arguments):
        raise ConfigurationError(
            "--dry_run: the job would wait in the queue and then only check. Leave it out; "
            "slurm/submit.sh --check ... checks without handing in."
        )


def dry_run_environment(request: JobRequest, strategy: Strategy) -> dict[str, str]:
    """Return the environment in which a dry run stands for the job's processes."""
    environment = {
        name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES
    }
    environment |= strategy.variables
    environment["WORLD_SIZE"] = str(request.processes)
    environment[REQUEST] = request.to_json()
    return environment


def _check_sweep(
    submission: Submission, request: JobRequest, strategy: Strategy, facts: Path
) -> int:
    """Dry-run every point; hand in those that are not finished."""
    if len(submission.arguments) != 1:
        raise ConfigurationError(
            f"{submission.job_script} takes one sweep file, as recipes/sweep/demo_cpu.yaml: what "
            "differs from the recipes stands there"
        )
    from utils.submit.sweep import read_sweep

    sweep = read_sweep(submission.arguments[0])
    _check_script(sweep.script, [])
    options = _array_option(sweep, request)
    if options is None:
        say(f"{sweep.file}: all {len(sweep.points)} points are finished, nothing is handed in")
        _leave(facts, None, [])
        return ExitCode.DONE
    environment = dry_run_environment(request, strategy)
    done = subprocess.run(
        [sys.executable, "-m", "utils.submit.sweep", "check", sweep.file],
        env=environment,
        stdout=STDERR,
        check=False,
    )
    if done.returncode == ExitCode.DONE:
        stop = shlex.quote(f"{sweep.output_dir}/NAME/STOP")
        _leave(
            facts,
            options,
            [
                *_watching(request.job_name, request.log, True),
                f"stop:    touch {stop}",
            ],
        )
    return done.returncode


def _array_option(sweep: "Sweep", request: JobRequest) -> list[str] | None:
    """Return the --array to add: the unfinished points; None if none is left, [] if one is given.

    Raises ConfigurationError for a given one that goes beyond the last point.
    """
    if request.array is not None:
        for index in request.array:
            sweep.point(str(index))
        return []
    left = [point.index for point in sweep.points if sweep.state(point) != "finished"]
    if not left:
        return None
    say(f"{sweep.file}: {len(left)} of {len(sweep.points)} points are left to run")
    return [f"--array={','.join(map(str, left))}"]


def _check_preparation(submission: Submission, facts: Path) -> int:
    """Check the settings of prepare_data.py; the job gives each task its share."""
    from utils.config.preparation import check_preparation, parse_preparation

    arguments = parse_preparation(submission.arguments)
    check_preparation(arguments)
    say(f"prepare_data.py: the settings are in order; writes {arguments.output_dir}")
    given = {option.name: option.value for option in submission.options}
    is_array = "array" in given
    log = given.get("output") or ("slurm-%A_%a.out" if is_array else "slurm-%j.out")
    name = given.get("job-name") or Path(submission.job_script).name
    _leave(facts, [], _watching(name, log, is_array))
    return ExitCode.DONE


def _watching(job_name: str, log: str, is_array: bool) -> list[str]:
    """Return the lines on watching and ending a job, %JOB% standing for its number."""
    log = log.replace("%x", job_name)
    if is_array and "%j" in log:  # each task of an array has a job number of its own
        log = f"{log.replace('%j', 'N')} (N: the number of each task's own job)"
    log = log.replace("%A", "%JOB%").replace("%j", "%JOB%").replace("%a", "INDEX")
    return ["watch:   squeue --job=%JOB%", f"log:     {log}", "end it:  scancel %JOB%"]


def _leave(facts: Path, options: list[str] | None, lines: list[str]) -> None:
    """Leave what submit.sh needs after the check; no options file means nothing is to be done."""
    if options is not None:
        (facts / "options").write_text("".join(f"{o}\0" for o in options), encoding="utf-8")
    (facts / "help").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_script(main))
