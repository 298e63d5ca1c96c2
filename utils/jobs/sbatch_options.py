"""Finds the options of an sbatch command: in the job script's head, the environment, the words.

Slurm's precedence: the command line wins over SBATCH_* variables, those over the #SBATCH head, and
of one option given twice the later one counts. The table is sbatch's of Slurm 22.05 to 25.05; an
option it does not hold is taken for a flag, or for whatever `--name=value` says.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from utils.config.errors import ConfigurationError

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
