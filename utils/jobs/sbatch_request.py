"""Reads from sbatch's options what the run depends on: nodes, GPUs, time limit, signal, array."""

import math
import re
import signal
from collections.abc import Callable, Mapping
from typing import TypeVar

from utils.cluster.job_request import JobRequest, StopSignal
from utils.config.errors import ConfigurationError
from utils.jobs.allocation import PROCESSES, on_cpu
from utils.jobs.sbatch_options import GivenOption, Submission
from utils.jobs.strategy import Strategy, choose_strategy

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
