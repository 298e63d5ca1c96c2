"""Record the run of the README's picture: a Slurm job that is killed twice and resumes.

    python examples/interrupted_run.py     # on a Slurm of its own (root, slurm-wlm, munge)

The job is `slurm/train_job.sh` with the demo's pretraining recipe, whose data `make demo` prepares.
`make figures` draws the picture from the record.
"""

import json
import os
import platform
import shutil
import signal
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/slurm"), str(ROOT / "tests/integration")]

RECORD = ROOT / "benchmarks" / "results" / "interrupted_run"
RUN, PLAIN = ROOT / "runs" / "picture", ROOT / "runs" / "picture-uninterrupted"
# Both events are to requeue the job.
SETTINGS = (
    *("--logging_steps", "4", "--save_steps", "60", "--eval_steps", "60"),
    *("--restarts_in_job", "0"),
)
# The step at which something happens, and what.
EVENTS = ((105, "a process is killed (SIGKILL)"), (225, "the node fails"))
# The recorded keys of a journal line and of a start.
KEYS = ("event", "step", "max_steps", "time", "loss"), ("time", "slurm")


def main() -> None:
    """Run the recipe once undisturbed and once as a job that is killed, and record the losses."""
    from slurm_cluster import SlurmCluster
    from training_jobs import raw_journal

    with tempfile.TemporaryDirectory() as directory:
        cluster = SlurmCluster(Path(directory) / "slurm")
        cluster.start()
        try:
            finish(cluster, submit(cluster, PLAIN))
            job = submit(cluster, RUN)
            disturb(cluster, job)
            finish(cluster, job)
        finally:
            cluster.stop()
    plain = {line["step"]: line["loss"] for line in raw_journal(PLAIN) if line["event"] == "train"}
    kinds = ("started", "resumed", "train", "summary")
    lines = [line for line in raw_journal(RUN) if line["event"] in kinds]
    trained = [line for line in lines if line["event"] == "train"]
    assert all(plain[line["step"]] == line["loss"] for line in trained), "other losses"
    starts = json.loads((RUN / "provenance.json").read_text())["starts"]
    RECORD.mkdir(exist_ok=True)
    for old in RECORD.glob("*.log"):
        old.unlink()
    (RECORD / "metrics.jsonl").write_text("".join(f"{chosen(line, KEYS[0])}\n" for line in lines))
    record = ",\n".join(chosen(start, KEYS[1]) for start in starts)
    (RECORD / "provenance.json").write_text(f'{{"starts": [\n{record}\n]}}\n')
    causes = [line for line in job.output().splitlines() if "; requeued, start" in line]
    (RECORD / f"train-{job.id}.log").write_text("".join(f"{line}\n" for line in causes))
    facts = {
        "command": "make interrupted-run",
        "date": date.today().isoformat(),
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}",
        "losses": sorted(plain.items()),
    }
    (RECORD / "uninterrupted.json").write_text(json.dumps(facts) + "\n")


def chosen(line: dict[str, Any], keys: tuple[str, ...]) -> str:
    """Return these keys of a line as JSON."""
    return json.dumps({key: line[key] for key in keys if key in line})


def submit(cluster: Any, run: Path) -> Any:
    """Submit the recipe as a job of one process on one node, into a new directory."""
    from training_jobs import job_environment

    shutil.rmtree(run, ignore_errors=True)
    command = ("pretrain.py", "--config", "recipes/pretrain/demo_cpu.yaml", *SETTINGS)
    return cluster.submit(
        *("--gpus-per-node=0", "--cpus-per-task=2", "--mem=3G", "--time=60"),
        "slurm/train_job.sh", *command, "--output_dir", str(run),
        cwd=ROOT, log=run.with_suffix(".log"),
        env=job_environment({"STOKER_PROCESSES_PER_NODE": "1", "OMP_NUM_THREADS": "2"}),
    )  # fmt: skip


def finish(cluster: Any, job: Any) -> None:
    """Wait for the end of a job that succeeds."""
    if cluster.wait(job, timeout_s=1800) != "COMPLETED":
        sys.exit(job.output())


def disturb(cluster: Any, job: Any) -> None:
    """Bring about EVENTS in the job that trains RUN."""
    from launching import processes_of, wait_until
    from training_jobs import raw_journal

    for step, what in EVENTS:
        wait_until(lambda at=step: reached(raw_journal, at), f"step {step}", job.output, 900)
        if "SIGKILL" in what:
            commands = {p: (p / "cmdline").read_bytes().split(b"\0") for p in processes_of(RUN)}
            (trains,) = (p for p, words in commands.items() if words[1] == b"pretrain.py")
            os.kill(int(trains.name), signal.SIGKILL)
        else:
            node = cluster.fields(job)["NodeList"]
            cluster.kill_node(node)
        wait_until(lambda: cluster.state(job) == "PENDING", "not requeued", job.output)
        if "node" in what:
            cluster.start_node(node)


def reached(raw_journal: Any, step: int) -> bool:
    """Tell whether the run has logged this step."""
    return any(line.get("step", 0) >= step for line in raw_journal(RUN))


if __name__ == "__main__":
    main()
