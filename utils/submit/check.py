"""The dry run of a job that Slurm holds in the queue. submit.sh releases the job after exit code 0.

    python -m utils.submit.check DIRECTORY FIELDS ANSWER REFUSAL PARTITIONS NODES QOS
        COUNT OPTIONS... JOB_SCRIPT ARGUMENTS...

DIRECTORY       where sbatch was called
FIELDS          names of squeue's fields, joined by commas
ANSWER          squeue's output for the job; each value is padded to FIELD_BYTES bytes, so that text
                in a value cannot look like another field
REFUSAL to QOS  see SlurmAnswers
COUNT           the number of OPTIONS
"""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from utils.config.errors import ConfigurationError, UnfitClusterError
from utils.config.launch_settings import LAUNCHER_VARIABLES, strategy_variables
from utils.config.preparation import check_preparation, parse_preparation
from utils.config.strategy import SUBMITTING, StrategyConfig
from utils.launch.ledger import bad_nodes, read_ledger
from utils.launch.node import plan_launch
from utils.launch.opening import early_settings
from utils.launch.script import run_script
from utils.launch.slurm import PROCESSES, Allocation, expand_hosts, time_limit_s
from utils.launch.verdict import note_submitted
from utils.prepare.hub_datasets import check_datasets_cached
from utils.submit.limits import SlurmAnswers, check_request, count_gpus
from utils.submit.sweep import read_sweep

FIELD_BYTES = 1024
ONE_NODE = {
    "train_job.sh": "slurm/multinode_job.sh takes the same arguments",
    "sweep_job.sh": "each point of a sweep has one node",
    "prepare_job.sh": "use a job array (--array=0-15)",
}
_SIGNAL = re.compile(r"R?BR?:(?:SIG)?(?:USR1|10)(?:@(\d+))?", re.I)
_DEFAULT_LEAD_S = 60  # Slurm's default if --signal has no time


def main(argv: Sequence[str] | None = None) -> int:
    """Check a job that Slurm holds in the queue; return the exit code of its dry run.

    Raises ConfigurationError if the job could never run with its resources and settings.
    """
    directory, fields, answer, *words = sys.argv[1:] if argv is None else argv
    answers, (count, *words) = SlurmAnswers(*words[:4]), words[4:]
    options, (job_script, *arguments) = words[: int(count)], words[int(count) :]
    job = job_fields(fields, answer)
    log = job["StdOut"].replace("%x", job["Name"]).replace("%A", job["JobID"])
    log = log.replace("%j", job["JobID"])
    kind, gpus = Path(job_script).name, gpus_per_node(job)
    if kind in ONE_NODE and job["NumNodes"] != "1":
        raise ConfigurationError(
            f"{kind} is for one node, not {job['NumNodes']}: {ONE_NODE[kind]}, or leave out --nodes"
        )
    command = [] if kind == "prepare_job.sh" else dry_run_command(kind, arguments)
    for note in check_request(job, gpus, answers):
        _say(f"note:    {note}")
    note_bad_nodes(options, kind, job["Partition"])
    if kind == "prepare_job.sh":
        settings = parse_preparation(arguments)
        check_preparation(settings)
        if os.environ.get("HF_HUB_OFFLINE") != "0":
            check_datasets_cached(settings)
        _say(f"prepare_data.py: valid settings, the job writes {settings.output_dir}")
        make_log_folder(log)
        return 0
    is_sweep = kind == "sweep_job.sh"
    # For a sweep, check the first point's launch. Later each point's dry run uses its own strategy.
    first = next(iter(read_sweep(arguments[0]).points.values())) if is_sweep else arguments
    allocation, config = plan_job(job, gpus, answers, first[1:])
    launch = {} if is_sweep else strategy_variables(config.content)
    if allocation.gpus is None and os.environ.get("DS_ACCELERATOR") != "cpu":
        launch["ACCELERATE_USE_CPU"] = "true"
    _say(
        f"job:     {job['Name']}, {len(allocation.hosts)} node(s) of "
        f"{f'{gpus} GPU(s), ' * bool(gpus)}{allocation.processes} process(es); strategy by "
        f"{config.path}, by {config.chosen_by}"
    )
    report_end(job, options, Path(directory, job_script))
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES} | launch
    environment |= {"WORLD_SIZE": str(allocation.world_size), SUBMITTING: "1"}
    environment["LOCAL_WORLD_SIZE"] = str(allocation.processes)
    code = subprocess.run([sys.executable, *command], env=environment, check=False).returncode
    if code == 0:
        make_log_folder(log)
        output_dir = early_settings(first[1:]).get("output_dir")
        if output_dir and not is_sweep:
            with contextlib.suppress(OSError):  # only status.py reads this note
                note_submitted(job["JobID"], Path(str(output_dir.value)), log)
    return code


def plan_job(
    job: Mapping[str, str], gpus: int, answers: SlurmAnswers, arguments: Sequence[str]
) -> tuple[Allocation, StrategyConfig]:
    """Return the nodes and processes that the job will have, and the job's accelerate config.

    gpus: GPUs per node. Raises UnfitClusterError if the job asks for no GPU, but its settings do
    not choose the CPU.
    """
    first_node = {  # the variables that Slurm will set on the job's first node
        "SLURM_JOB_ID": job["JobID"],
        "SLURM_STEP_NUM_TASKS": job["NumTasks"],
        "SLURM_STEP_NODELIST": f"node[1-{job['NumNodes']}]",
        "SLURM_NODEID": "0",
        "SLURM_GPUS_ON_NODE": str(gpus),
    }
    # Nodes may have GPUs even if Slurm counts no GPUs in the whole cluster (no GRES).
    slurm_counts_gpus = any(count_gpus(line.split("|")[3]) for line in answers.nodes.splitlines())
    devices = 0 if slurm_counts_gpus else 1
    allocation, config = plan_launch(arguments, {**os.environ, **first_node}, devices)
    if allocation.gpus and not gpus:
        _say(
            f"note:    {PROCESSES}={allocation.gpus} counts as GPUs, because Slurm counts none; to "
            "train on CPUs, put ACCELERATE_USE_CPU=true in front of the command"
        )
    return allocation, config


def job_fields(fields: str, answer: str) -> dict[str, str]:
    """Return {field: value} of the job. fields, answer: see the module's docstring.

    Raises UnfitClusterError if squeue does not know the job.
    """
    job, text = {}, os.fsencode(answer)
    for at, name in enumerate(fields.split(",")):
        job[name] = os.fsdecode(text[at * FIELD_BYTES : (at + 1) * FIELD_BYTES].strip())
    if not job["JobID"].isdecimal():
        raise UnfitClusterError(f"squeue does not know the job that sbatch accepted: {answer!r}")
    return job


def note_bad_nodes(options: Sequence[str], kind: str, partition: str) -> None:
    """Print which nodes of a partition are bad (see `bad_nodes`), and the option to exclude them.

    options: sbatch's options. Nothing is printed if they choose the nodes by --nodelist. kind: the
    name of the job script.
    """
    text = " ".join(options)
    if re.search(r"(^| )(--nodelist|-w)", text):
        return
    excluded = expand_hosts(",".join(re.findall(r"(?:^| )(?:--exclude[= ]|-x ?)(\S+)", text)))
    bad: list[str] = []
    with contextlib.suppress(OSError):  # submit the job even without a ledger or sinfo
        if faults := bad_nodes(read_ledger()[0]):
            command = ["sinfo", "--noheader", "--Node", "--format=%N", f"--partition={partition}"]
            output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            bad = sorted({*output.split()} & {*faults} - {*excluded})
    if bad:
        nodes = ", ".join(f"{node} ({faults[node]} faults)" for node in bad)
        _say(f"note:    {nodes} in 7 days: python status.py --nodes")
        _say(f"note:    --exclude={','.join([*excluded, *bad])} before {kind} leaves them out")


def make_log_folder(log: str) -> None:
    """Make the folder of the log file, and print the path of the log file.

    Without this folder, Slurm ends the job at once and prints no message. A folder with "%" in its
    name is not made, because Slurm replaces such patterns. Raises ConfigurationError if the folder
    cannot be made.
    """
    folder = Path(log).parent
    if "%" not in str(folder) and not folder.is_dir():
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise ConfigurationError(
                f"the folder of the log, {folder}, is not there and cannot be made "
                f"({error.strerror}): Slurm would end the job at once. Give another --output=FILE"
            ) from error
        _say(f"made:    {folder}, the folder of the log")
    _say(f"log:     {log}")


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - before the output of the dry run


def report_end(job: Mapping[str, str], options: Sequence[str], job_script: Path) -> None:
    """Print the time limit, the stop signal, and whether a stopped job is queued again.

    Raises ConfigurationError if the signal would come at the start of the job.
    """
    lead_s, name = signal_lead_s(options, job_script), job_script.name
    limit, requeues = job["TimeLimit"], job["Requeue"] == "1"
    limit_s = time_limit_s(limit)
    if limit_s and lead_s and lead_s >= limit_s:
        raise ConfigurationError(
            f"the time limit is {limit}, but Slurm's stop signal comes {lead_s} s before it: the "
            "job would stop as it starts. Give a longer --time, or a smaller "
            "--signal=B:USR1@SECONDS"
        )
    stop = f"Slurm's stop signal comes {lead_s} s before it"
    if lead_s is None:
        stop = (
            "no stop signal to the batch shell before it (add #SBATCH --signal=B:USR1@300 to "
            f"{name}), the run stops only by its own look at the clock"
        )
    again = "queued again and resumes"
    if not requeues:
        again = "not queued again (--no-requeue, JobRequeue=0)"
    _say(f"limit:   {limit}{f'; {stop}' if limit_s else ''}; a job that stopped is {again}")
    if requeues and sbatch_option("open-mode", "SBATCH_OPEN_MODE", options, job_script) != "append":
        _say(f"WARNING  each start overwrites the log: add #SBATCH --open-mode=append to {name}")


def gpus_per_node(job: Mapping[str, str]) -> int:
    """Return the number of GPUs per node, even if the job requests GPUs per task or per job."""
    nodes = int(job["NumNodes"])
    return (
        count_gpus(job["tres-per-node"])
        or count_gpus(job["tres-per-task"]) * (int(job["NumTasks"]) // nodes)
        or count_gpus(job["tres-per-job"]) // nodes
    )


def sbatch_option(name: str, variable: str, options: Sequence[str], job_script: Path) -> str:
    """Return the value of an sbatch option that squeue does not show; "" if the option is not set.

    `options` override the environment variable `variable`, which overrides #SBATCH lines.
    """
    lines = job_script.read_text(encoding="utf-8", errors="replace").splitlines()
    head = [line for line in lines if line.startswith("#SBATCH")]
    text = " ".join([*head, f"--{name}={os.environ.get(variable, '')}", *options])
    return "".join(re.findall(rf"(?<!\S)--{name}[= ](\S+)", text)[-1:])


def signal_lead_s(options: Sequence[str], job_script: Path) -> int | None:
    """Return the seconds from the stop signal to the time limit; None if no signal reaches the run.

    Only --signal=B:USR1@SECONDS reaches the run (60 s without @SECONDS). "B:" sends the signal to
    the job script, which passes the signal on to all nodes.
    """
    match = _SIGNAL.fullmatch(sbatch_option("signal", "SBATCH_SIGNAL", options, job_script))
    return int(match[1] or _DEFAULT_LEAD_S) if match else None


def dry_run_command(kind: str, arguments: Sequence[str]) -> list[str]:
    """Return the arguments of `python` for the dry run of a job. kind: the name of the job script.

    Raises ConfigurationError for a script without --dry_run, which would start training.
    """
    if kind == "sweep_job.sh":
        if len(arguments) != 1:
            raise ConfigurationError("sweep_job.sh takes one sweep file, which holds all settings")
        script = read_sweep(arguments[0]).script
        command = ["-m", "utils.submit.sweep", "check", arguments[0]]
    elif arguments:
        script, command = arguments[0], [*arguments, "--dry_run"]
    else:
        raise ConfigurationError(
            "no script given: name it after the job script, as in pretrain.py --config ..."
        )
    if script[:1] == "-" or re.fullmatch(r"python[\d.]*", Path(script).name):
        raise ConfigurationError(
            f"{script} is no training script: name it first after the job script, as in "
            f"{kind} pretrain.py --config my_run.yaml, without python. Options of sbatch (--time, "
            f"--gpus-per-node) come before {kind}"
        )
    if not Path(script).is_file():
        raise ConfigurationError(
            f"no file {script} in {Path.cwd()} (paths are from the repository's root)"
        )
    text = Path(script).read_text(encoding="utf-8", errors="replace")
    if not any(name in text for name in ("parse_pretraining", "parse_fine_tuning", "dry_run")):
        raise ConfigurationError(
            f"{script} does not know --dry_run, so it cannot be checked: submit it with sbatch"
        )
    return command


if __name__ == "__main__":
    sys.exit(run_script(main))
