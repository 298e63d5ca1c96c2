"""Submits training jobs with the shipped scripts, and reads their results."""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import tiny
import torch
from launching import CPU_ENVIRONMENT, ROOT, quiet_environment, wait_until
from slurm_cluster import Job, SlurmCluster
from transformers import AutoConfig, AutoModelForCausalLM

# Forty steps with evaluations; without a delay four ranks take two seconds.
STEPS = 40
SMALL = "--cpus-per-task=2", "--mem=3G", "--time=60"  # the resources of a node of the tests' Slurm
SETTINGS: dict[str, object] = {
    "sequence_length": 64,
    "global_batch_size": 4,
    "per_device_train_batch_size": 1,
    "max_steps": STEPS,
    "learning_rate": 1e-3,
    "bf16": False,
    "logging_steps": 1,
    "save_steps": 10,
    "eval_strategy": "steps",
    "eval_steps": 10,
}
LORA: dict[str, object] = {
    "use_peft": True,
    "lora_r": 4,
    "lora_dropout": 0.1,
    "lora_target_modules": "all-linear",
}


@dataclass(frozen=True)
class Cycle:
    """The cost of an interruption, from the journal: repeated steps, seconds without a new step."""

    lost_steps: int
    seconds: float


def job_environment(env: Mapping[str, str] | None = None, config: str = "cpu") -> dict[str, str]:
    """Return a user's environment for two processes per node, with a strategy on CPUs."""
    fixed = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "STOKER_PROCESSES_PER_NODE": "2",
        "STOKER_MAIN_ADDRESS": "127.0.0.1",  # the host names n1 and n2 do not exist
        "STOKER_MEET_TIMEOUT_S": "600",  # a busy machine starts nodes one after the other
        # The tests provoke many faults on these nodes.
        "STOKER_LEAVE_OUT_AFTER": "0",
        "STOKER_LEDGER": "/dev/null",
    }
    return quiet_environment(fixed | CPU_ENVIRONMENT[config] | dict(env or {}))


class TrainingJobs:
    """Jobs on two nodes of two CPU processes each, by default.

    Makes a tokenizer, data and a model in `files`; `model` changes the model's configuration.
    """

    def __init__(self, slurm: SlurmCluster, files: Path, **model: object):
        self.slurm = slurm
        self.files = files
        self.handed_in: list[Job] = []
        tiny.make_tokenizer(files / "tokenizer")
        tiny.make_model_config(files / "model.json", **model)
        tiny.save(files / "documents", {"input_ids": tiny.documents(400, seed=0)})
        tiny.save(files / "chats", tiny.masked(tiny.documents(400, seed=2)))
        tiny.save(files / "heldout", {"input_ids": tiny.documents(31, seed=1)})

    def flags(
        self, output_dir: Path, training: str = "pretrain.py", **changes: object
    ) -> list[str]:
        """Return the command line of `pretrain.py`, or of `sft_train.py` with LoRA."""
        data = {
            "model_config": self.files / "model.json",
            "train_data": self.files / "documents",
            "eval_data": f"heldout={self.files / 'heldout'}",
            "tokenizer_name_or_path": self.files / "tokenizer",
            "output_dir": output_dir,
        }
        if training == "sft_train.py":
            data |= {"train_data": self.files / "chats", "model_name_or_path": self.base()}
            data |= LORA | {"model_config": None, "tokenizer_name_or_path": None}
        return tiny.flags(**(SETTINGS | data | changes))

    def base(self) -> Path:
        """Make a model with random weights for fine-tuning."""
        directory = self.files / "base"
        if not directory.exists():
            torch.manual_seed(0)
            config = AutoConfig.from_pretrained(self.files / "model.json")
            AutoModelForCausalLM.from_config(config).save_pretrained(directory)
            tiny.make_tokenizer(directory)
        return directory

    def submit(
        self, output_dir: Path, *options: str, script: str = "slurm/multinode_job.sh",
        training: str = "pretrain.py", config: str = "multi_gpu",
        env: Mapping[str, str] | None = None, **changes: object,
    ) -> Job:  # fmt: skip
        """Submit a training script with a separate log file."""
        log = self.files / f"job-{len(self.handed_in)}.log"
        chosen = {"ACCELERATE_CONFIG": f"accelerate_configs/{config}.yaml"} | dict(env or {})
        job = self.slurm.submit(
            *SMALL, *options, script, training, *self.flags(output_dir, training, **changes),
            cwd=ROOT, log=log, env=job_environment(chosen, config),
        )  # fmt: skip
        self.handed_in.append(job)
        return job

    def remove_notes(self) -> None:
        """Remove the reports that failed jobs wrote into the repository."""
        for job in self.handed_in:
            for notes in (ROOT / ".stoker").glob(f"job-{job.id}.*"):
                shutil.rmtree(notes)

    def finished(
        self, config: str = "multi_gpu", per_node: int = 2, training: str = "pretrain.py"
    ) -> Path:
        """Return an undisturbed run on two nodes of `per_node` ranks; run each only once."""
        run = self.files / training / config / str(per_node)
        if not run.exists():
            job = self.submit(
                run, "--nodes=2", "--gpus-per-node=2", training=training, config=config,
                env={"STOKER_PROCESSES_PER_NODE": str(per_node)},
            )  # fmt: skip
            assert self.slurm.wait(job) == "COMPLETED", job.output()
        return run

    def wait_for_step(self, output_dir: Path, step: int, job: Job) -> None:
        """Wait until the journal has this step; raises with the log if it never does."""

        def reached() -> bool:
            state = self.slurm.state(job)
            assert state in ("PENDING", "RUNNING", "COMPLETING"), job.output()
            return any(line.get("step", 0) >= step for line in raw_journal(output_dir))

        wait_until(reached, f"step {step} is not reached", job.output)


class JobProcesses:
    """The living processes of a job, by the job id in their environment."""

    def __init__(self, job: Job):
        self.known: dict[int, psutil.Process] = {}
        self.commands: dict[int, list[str]] = {}
        self.environments: dict[int, dict[str, str]] = {}
        self.parents: dict[int, int] = {}
        # psutil would leave out a process whose id an earlier process of its cache had.
        psutil.process_iter.cache_clear()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # the process has ended
                environment = process.environ()
                if environment.get("SLURM_JOB_ID") == job.id:
                    self.commands[process.pid] = process.cmdline()
                    self.parents[process.pid] = process.ppid()
                    self.environments[process.pid] = environment
                    self.known[process.pid] = process

    def job_scripts(self) -> list[psutil.Process]:
        """Return the shell of the job script, without its subshells."""
        shells = [pid for pid in self.known if "slurm_script" in " ".join(self.commands[pid][:2])]
        return [self.known[pid] for pid in shells if self.parents[pid] not in shells]

    def sruns(self) -> list[psutil.Process]:
        """Return the srun of the job script, without the helper that srun forks."""
        shells = [process.pid for process in self.job_scripts()]
        found = [pid for pid in self.known if self.commands[pid][:1] == ["srun"]]
        return [self.known[pid] for pid in found if self.parents[pid] in shells]

    def launchers(self, *nodes: int) -> list[psutil.Process]:
        """Return the launchers of these nodes: 0 is the first one."""
        found = [pid for pid in self.known if "utils.launch.node" in self.commands[pid]]
        indices = [str(node) for node in nodes]
        own = [pid for pid in found if self.environments[pid].get("SLURM_NODEID") in indices]
        return [self.known[pid] for pid in own]

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of all ranks in the order of the ranks."""
        launchers = [process.pid for process in self.launchers(0, 1)]
        found = [pid for pid in self.known if self.parents[pid] in launchers]
        ranks = {int(self.environments[pid].get("RANK", -1)): self.known[pid] for pid in found}
        return [ranks[rank] for rank in sorted(ranks) if rank >= 0]

    def data_workers(self) -> list[psutil.Process]:
        """Return the data workers, which are forks of the ranks, in the order of the ranks."""
        return [
            process
            for rank in self.ranks()
            for pid, process in self.known.items()
            if self.parents[pid] == rank.pid and self.commands[pid] == self.commands[rank.pid]
        ]


def raw_journal(output_dir: Path) -> list[dict]:
    """Return every complete line of the journal, including rolled-back ones."""
    path = output_dir / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    found = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):  # the disk became full within a line
            found.append(json.loads(line))
    return found


def cycles(output_dir: Path) -> list[Cycle]:
    """Return the cost of each interruption of a run."""
    found, last = [], {"step": 0, "time": 0.0}
    resumed_at: int | None = None
    for line in raw_journal(output_dir):
        if line["event"] in ("started", "resumed"):
            resumed_at = line["step"]
        elif line["event"] == "train":
            if resumed_at is not None and last["time"]:
                seconds = round(line["time"] - last["time"], 1)
                found.append(Cycle(last["step"] - resumed_at, seconds))
            resumed_at, last = None, line
    return found
