"""Dry-runs a job that Slurm holds in the queue; slurm/submit.sh releases it on exit code 0.

    python -m utils.submit.check DIRECTORY FIELDS ANSWER COUNT OPTIONS... JOB_SCRIPT ARGUMENTS...

DIRECTORY is where sbatch was called, ANSWER what squeue says of the job: the FIELDS (joined by
commas), each WIDTH bytes wide, so that no value can look like another field. COUNT is the number of
OPTIONS.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from utils.config.errors import ConfigurationError, UnfitClusterError
from utils.config.precision import LAUNCHER_VARIABLES
from utils.config.preparation import check_preparation, parse_preparation
from utils.launch.accelerate_command import choose_config, read_config, strategy_variables
from utils.launch.processes import requested_strategy
from utils.launch.script import run_script
from utils.launch.slurm import REQUEST, Allocation, JobRequest, read_allocation
from utils.submit.sweep import read_sweep

WIDTH = 1024
_SIGNAL = re.compile(r"R?BR?:(?:SIG)?(?:USR1|10)(?:@(\d+))?", re.I)
_DEFAULT_LEAD_S = 60  # Slurm's, for a --signal without a time
_TIME = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")


def main(argv: Sequence[str] | None = None) -> int:
    """Check the job; returns the exit code of the dry run. Raises ConfigurationError."""
    directory, fields, answer, count, *words = sys.argv[1:] if argv is None else argv
    options, (job_script, *arguments) = words[: int(count)], words[int(count) :]
    job = read_answer(fields, answer)
    log = job["StdOut"].replace("%x", job["Name"]).replace("%A", job["JobID"])
    print(f"log:     {log.replace('%j', job['JobID'])}", flush=True)  # noqa: T201 - for the user
    kind = Path(job_script).name
    if kind == "prepare_job.sh":
        settings = parse_preparation(arguments)
        check_preparation(settings)
        print(f"prepare_data.py: valid settings, the job writes {settings.output_dir}")  # noqa: T201 - for the user
        return 0
    command = _dry_run(kind, arguments)
    allocation = planned_allocation(job, os.environ)
    path = choose_config(os.environ, allocation)
    launch = strategy_variables(read_config(path, allocation))
    if allocation.gpus is None and os.environ.get("DS_ACCELERATOR") != "cpu":
        launch["ACCELERATE_USE_CPU"] = "true"
    strategy = requested_strategy(launch, allocation.world_size)
    request = JobRequest(
        job_script=job_script,
        job_name=job["Name"],
        nodes=len(allocation.hosts),
        processes_per_node=allocation.processes,
        gpus_per_node=gpus_per_node(job),
        strategy=strategy,
        strategy_file=str(path),
        time_limit_s=time_limit_s(job["TimeLimit"]),
        signal_lead_s=signal_lead_s(given_signal(options, Path(directory, job_script))),
        requeue=job["Requeue"] == "1",
    )
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES} | launch
    environment |= {"WORLD_SIZE": str(allocation.world_size), REQUEST: request.to_json()}
    return subprocess.run([sys.executable, *command], env=environment, check=False).returncode


def read_answer(fields: str, answer: str) -> dict[str, str]:
    """Take squeue's answer apart. Raises UnfitClusterError if there is none."""
    names, text = fields.split(","), os.fsencode(answer)
    if len(text) < (len(names) - 1) * WIDTH:
        raise UnfitClusterError(f"squeue does not know the job that sbatch accepted: {answer!r}")
    values = [text[at * WIDTH : (at + 1) * WIDTH].strip() for at in range(len(names))]
    return {name: os.fsdecode(value) for name, value in zip(names, values, strict=True)}


def gpus_per_node(job: Mapping[str, str]) -> int:
    """Return the GPUs of a node by whichever option asked for them."""
    nodes = int(job["NumNodes"])
    return (
        _gpus(job["tres-per-node"])
        or _gpus(job["tres-per-task"]) * (int(job["NumTasks"]) // nodes)
        or _gpus(job["tres-per-job"]) // nodes
    )


def _gpus(tres: str) -> int:
    """Read gres:gpu:h100:4, gres/gpu=4 or gpu; Slurm gives the last of several entries."""
    entries = [entry for entry in tres.split(",") if "gpu" in entry]
    number = re.search(r"[:=](\d+)(?:\(|$)", entries[-1]) if entries else None
    return int(number[1]) if number else len(entries[:1])


def time_limit_s(text: str) -> int | None:
    """Read DAYS-HOURS:MINUTES:SECONDS as squeue writes it; None for UNLIMITED."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def signal_lead_s(text: str | None) -> int | None:
    """Return the seconds between the stop signal and the limit; None if the run would not see it.

    Without the B: Slurm signals the steps only, and the job script cannot pass it on to all nodes.
    """
    match = _SIGNAL.fullmatch(text or "")
    return int(match[1] or _DEFAULT_LEAD_S) if match else None


def given_signal(options: Sequence[str], job_script: Path) -> str | None:
    """Return --signal, which squeue does not show: given last, in SBATCH_SIGNAL or in the head."""
    lines = job_script.read_text(encoding="utf-8", errors="replace").splitlines()
    head = "\n".join(line for line in lines if line.startswith("#SBATCH"))
    for text in (" ".join(options), f"--signal={os.environ.get('SBATCH_SIGNAL', '')}", head):
        if found := re.findall(r"(?<!\S)--signal[= ](\S+)", text):
            return str(found[-1])
    return None


def _dry_run(kind: str, arguments: Sequence[str]) -> list[str]:
    """Return the words after `python` that dry-run what a job script of this kind starts."""
    if kind == "sweep_job.sh":
        if len(arguments) != 1:
            raise ConfigurationError("sweep_job.sh takes one sweep file, which holds all settings")
        _check_script(read_sweep(arguments[0]).script)
        return ["-m", "utils.submit.sweep", "check", arguments[0]]
    if not arguments:
        raise ConfigurationError(
            "no script given: name it after the job script, as in pretrain.py --config ..."
        )
    _check_script(arguments[0])
    return [*arguments, "--dry_run"]


def _check_script(script: str) -> None:
    """Refuse what a dry run would start for real."""
    if not Path(script).is_file():
        raise ConfigurationError(f"no file {script} (paths are from the repository's root)")
    text = Path(script).read_text(encoding="utf-8", errors="replace")
    if not any(name in text for name in ("parse_pretraining", "parse_fine_tuning", "dry_run")):
        raise ConfigurationError(
            f"{script} does not know --dry_run, so it cannot be checked: submit it with sbatch"
        )


def planned_allocation(job: Mapping[str, str], environment: Mapping[str, str]) -> Allocation:
    """Return what the launcher will find on the job's first node. Raises ConfigurationError."""
    nodes, tasks = int(job["NumNodes"]), int(job["NumTasks"])
    if tasks != nodes:
        raise ConfigurationError(
            f"the job starts {tasks} tasks on {nodes} node(s), but slurm/launch_node.sh is one "
            "task per node and starts the processes itself: give --ntasks-per-node=1"
        )
    on_the_node = {
        "SLURM_JOB_ID": job["JobID"],
        "SLURM_STEP_NUM_TASKS": str(nodes),
        "SLURM_STEP_NODELIST": f"node[1-{nodes}]",
        "SLURM_NODEID": "0",
        "SLURM_GPUS_ON_NODE": str(gpus_per_node(job)),
    }
    try:
        return read_allocation({**environment, **on_the_node}, devices_here=lambda: 0)
    except UnfitClusterError as error:  # not the nodes' fault, but the request's
        raise ConfigurationError(error.problems) from error


if __name__ == "__main__":
    sys.exit(run_script(main))
