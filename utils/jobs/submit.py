"""Checks a job before it queues; slurm/submit.sh calls it and hands the job in if it returns 0.

    python -m utils.jobs.submit DIRECTORY FACTS SBATCH_WORDS...

DIRECTORY is where sbatch will be called, FACTS a directory for what submit.sh needs to know then:
`options`, further words for sbatch (NUL-terminated), and `help`, the lines to print with %JOB% in
place of the job's number.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from utils.cluster.job_request import REQUEST, JobRequest
from utils.cluster.script import run_script
from utils.config.errors import ConfigurationError, ExitCode
from utils.config.planned_launch import LAUNCHER_VARIABLES
from utils.jobs.sbatch_options import Submission, read_submission
from utils.jobs.sbatch_request import read_request
from utils.jobs.strategy import Strategy

if TYPE_CHECKING:
    from utils.jobs.sweep import Sweep

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
    from utils.jobs.sweep import read_sweep

    sweep = read_sweep(submission.arguments[0])
    _check_script(sweep.script, [])
    options = _array_option(sweep, request)
    if options is None:
        say(f"{sweep.file}: all {len(sweep.points)} points are finished, nothing is handed in")
        _leave(facts, None, [])
        return ExitCode.DONE
    environment = dry_run_environment(request, strategy)
    done = subprocess.run(
        [sys.executable, "-m", "utils.jobs.sweep", "check", sweep.file],
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
    from utils.config.preparation import PreparationArguments, check_preparation
    from utils.config.reading.parsing import parse_arguments

    (arguments,) = parse_arguments((PreparationArguments,), submission.arguments)
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
