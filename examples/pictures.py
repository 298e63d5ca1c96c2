"""Draw the README's picture from a real run: a Slurm job that is killed twice and resumes.

    python examples/pictures.py run     # trains on a Slurm of its own (root, slurm-wlm, munge)
    python examples/pictures.py draw    # benchmarks/results/interrupted_run.json to an SVG

The job is `slurm/train_job.sh` with the demo's pretraining recipe, whose data `make demo` prepares.
"""

import json
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/slurm"), str(ROOT / "tests/integration")]

RECORD = ROOT / "benchmarks" / "results" / "interrupted_run.json"
PICTURE = ROOT / "docs" / "images" / "loss.svg"
RUN, PLAIN = ROOT / "runs" / "picture", ROOT / "runs" / "picture-uninterrupted"
SETTINGS = ("--logging_steps", "4", "--save_steps", "60", "--eval_steps", "60")
# The step at which something happens, and what.
EVENTS = ((105, "a process is killed (SIGKILL)"), (225, "the node fails"))
COLOURS = ("#4269d0", "#ff725c", "#3ca951")  # a colour for each start of the job
STYLE = """
text { font: 13px sans-serif; fill: #333 } .small { font-size: 12px; fill: #666 }
.axis { stroke: #999 } .grid { stroke: #e6e6e6 } .plain { stroke: #ccc; stroke-width: 9 }
@media (prefers-color-scheme: dark) {
text { fill: #ddd } .small { fill: #aaa } .grid { stroke: #333 } .plain { stroke: #555 } }
"""


def main() -> None:
    """Train, or draw what was recorded."""
    if sys.argv[1:] == ["run"]:
        train()
    elif sys.argv[1:] == ["draw"]:
        PICTURE.parent.mkdir(exist_ok=True)
        PICTURE.write_text(drawn(json.loads(RECORD.read_text())))
    else:
        sys.exit(__doc__)


def train() -> None:
    """Run the recipe once undisturbed and once as a job that is killed, and record the losses."""
    from slurm_cluster import SlurmCluster
    from training_jobs import raw_journal

    with tempfile.TemporaryDirectory() as directory:
        cluster = SlurmCluster(Path(directory) / "slurm")
        cluster.start()
        try:
            finish(cluster, submit(cluster, PLAIN))
            job = submit(cluster, RUN)
            ends = [*disturb(cluster, job), "done"]
            finish(cluster, job)
        finally:
            cluster.stop()
    starts = [
        {
            "resumed_from": begin["step"],
            "end": end,
            "losses": [[line["step"], line["time"], line["loss"]] for line in lines],
        }
        for end, (begin, *lines) in zip(ends, starts_of(raw_journal(RUN)), strict=True)
    ]
    plain = {line["step"]: line["loss"] for line in raw_journal(PLAIN) if line["event"] == "train"}
    for start in starts:
        assert all(plain[step] == loss for step, _, loss in start["losses"]), "other losses"
    facts = {
        "command": "make pictures",
        "date": date.today().isoformat(),
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}",
        "uninterrupted": sorted(plain.items()),
        "starts": starts,
    }
    RECORD.write_text(json.dumps(facts) + "\n")


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


def disturb(cluster: Any, job: Any) -> list[str]:
    """Bring about EVENTS in the job that trains RUN; return what happened, in order."""
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
    return [what for _, what in EVENTS]


def reached(raw_journal: Any, step: int) -> bool:
    """Tell whether the run has logged this step."""
    return any(line.get("step", 0) >= step for line in raw_journal(RUN))


def starts_of(journal: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Split the journal at its starts: of each the first line and the lines with losses."""
    starts: list[list[dict[str, Any]]] = []
    for line in journal:
        if line["event"] in ("started", "resumed"):
            starts.append([{"step": line.get("step", 0), "time": line["time"]}])
        elif line["event"] == "train":
            starts[-1].append(line)
    return starts


def drawn(facts: dict[str, Any]) -> str:
    """Return an SVG of 860 x 410: loss by step, a colour for each start, and the starts in time."""
    steps, losses = zip(*facts["uninterrupted"], strict=True)
    last, low, high = max(steps), int(min(losses)), int(max(losses)) + 1

    def at(step: float, loss: float) -> tuple[float, float]:
        return 60 + 780 * step / last, 300 - 260 * (loss - low) / (high - low)

    def curve(points: Iterable[tuple[float, float]], style: str) -> str:
        places = " ".join("{:.1f},{:.1f}".format(*at(*point)) for point in points)
        return f'<polyline fill="none" points="{places}" {style}/>'

    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 410">']
    parts.append(f"<style>{STYLE}</style>")
    for loss in range(low, high + 1):
        y = at(0, loss)[1]
        parts.append(f'<path class="grid" d="M60,{y:.0f}H840"/>{small(44, y + 4, str(loss))}')
    parts += [small(at(step, low)[0] - 10, 318, str(step)) for step in range(0, last + 1, 60)]
    parts.append(
        small(60, 28, "loss by optimizer step; wide and grey: the same run, never stopped")
    )
    parts.append(curve(facts["uninterrupted"], 'class="plain"'))
    begin, end = (facts["starts"][number]["losses"][number][1] for number in (0, -1))
    for number, start in enumerate(facts["starts"]):
        colour = COLOURS[number % len(COLOURS)]
        points = [(step, loss) for step, _, loss in start["losses"]]
        width = max(1.5, 5 - 1.5 * number)  # steps that were done again show both colours
        parts.append(curve(points, f'stroke="{colour}" stroke-width="{width}"'))
        if start["end"] != "done":
            x, y = at(*points[-1])
            resumed = facts["starts"][number + 1]["resumed_from"]
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>')
            parts.append(f'<path class="axis" d="M{x:.1f},{y - 8:.1f}v-44"/>')
            parts.append(f'<text x="{x - 4:.1f}" y="{y - 76:.1f}">step {points[-1][0]}: ')
            parts.append(f"{start['end']}</text>")
            parts.append(small(x - 4, y - 59, f"requeued, resumed from checkpoint-{resumed}"))
        left, right = (
            60 + 780 * (start["losses"][place][1] - begin) / (end - begin) for place in (0, -1)
        )
        parts.append(f'<path d="M{left:.1f},368H{right:.1f}" stroke="{colour}" stroke-width="14"/>')
        parts.append(small(left, 392, f"start {number + 1}"))
    minutes = f"{(end - begin) / 60:.1f} minutes"
    parts.append(small(60, 350, f"the starts of the Slurm job in time, {minutes} in all"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def small(x: float, y: float, text: str) -> str:
    """Return a line of small text."""
    return f'<text class="small" x="{x:.1f}" y="{y:.1f}">{text}</text>'


if __name__ == "__main__":
    main()
