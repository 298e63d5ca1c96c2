"""Made-up run directories: a run with three starts, and a run with a slow GPU of eight."""

import datetime
import json
import math
import os
import random
from pathlib import Path

BEGIN = 1_800_000_000.0
# Starts: begin, step at which it resumes (None: a new run), last step, last event.
STARTS = ((0, None, 60, None), (1000, 40, 100, "stopped"), (2000, 100, 160, "summary"))
SPIKE = 130


def loss(step: int) -> float:
    """Return a falling loss with a little noise and one spike."""
    return 9.0 if step == SPIKE else 2 + 3 * math.exp(-step / 40) + 0.01 * math.sin(7 * step)


def train_line(step: int, time: float, **more: object) -> dict[str, object]:
    return {
        "event": "train", "step": step, "time": time, "loss": loss(step), "grad_norm": 1.0,
        "learning_rate": 1e-3, "tokens_seen": 4096 * step, "tokens_per_s": 2048.0,
        "step_time_s": 2.0, "data_wait_s": 0.5, "memory_peak_gib": 11.0,
        "tokens_share/web": 0.75, "tokens_share/code": 0.25,
        "memory_by_rank": [{"rank": 0, "host": "n1", "memory_peak_gib": 11.0}],
    } | more  # fmt: skip


def lines_of(begin: float, done: int | None, last: int, end: str | None) -> list[dict]:
    """Return a start's lines: a step takes 2 s, the first 5 s, an evaluation 7 s, a save 1 s."""
    event = "started" if done is None else "resumed"
    lines = [{"event": event, "step": done or 0, "max_steps": 160, "time": begin + 10}]
    time = begin + 10
    for step in range((done or 0) + 1, last + 1):
        first = step == (done or 0) + 1
        time += 5 if first else 2
        lines.append(train_line(step, time, **({"first_step_time_s": 5.0} if first else {})))
        if step % 20 == 0:
            time += 7
            lines += [
                {"event": "eval", "split": "web", "step": step, "eval_web_loss": loss(step) + 0.1,
                 "eval_web_runtime": 7.0, "time": time},
                {"event": "samples", "step": step, "time": time,
                 "samples": [{"prompt": "Is 1 < 2?", "completion": "<script>alert(1)</script>"}]},
                {"event": "save", "step": step, "size_bytes": 1000, "stall_s": 1.0,
                 "write_s": 0.0, "time": time + 1},
            ]  # fmt: skip
            time += 1
    if end:
        lines.append({"event": end, "step": last, "train_runtime": 1.0, "time": time + 1})
    return lines


def iso(time: float) -> str:
    return datetime.datetime.fromtimestamp(time, datetime.UTC).isoformat(timespec="seconds")


def write_run(run: Path) -> Path:
    """Write a run directory as three starts leave it."""
    (run / ".lock").mkdir(parents=True)
    (run / "final").mkdir()
    entries, text = [], ""
    for index, (after, done, last, end) in enumerate(STARTS):
        lines = lines_of(BEGIN + after, done, last, end)
        text += "".join(json.dumps(line) + "\n" for line in lines)
        entries.append(
            {
                "time": iso(BEGIN + after), "resumed_from": done and f"{run}/checkpoint-{done}",
                "script": "pretrain.py", "argv": ["pretrain.py", "--run_name", "made-up"],
                "python": "3.11.7", "git": {"commit": "c0ffee", "dirty": False},
                "launch": {"strategy": "ddp", "world_size": 2, "hosts": ["n1"],
                           "devices": ["H100", "H100"]},
                "slurm": {"job_id": "77", "job_name": "train", "restart_count": str(index)},
                "versions": {"torch": "2.13.0", "flash-attn": None},
                "given": {"learning_rate": "recipes/mine.yaml:3", "max_steps": "--max_steps"},
            }
        )  # fmt: skip
        who = {"since": iso(BEGIN + after), "host": "n1", "pid": 7, "job": "77", "machine": "m"}
        owner = {"owner": who, "beat": 1, "left": end is not None}
        lock = run / ".lock" / f"owner-{index + 1}"
        lock.write_text(json.dumps(owner))
        beat = lines[-1]["time"] + 4
        os.utime(lock, (beat, beat))
    (run / "metrics.jsonl").write_text(text)
    (run / "provenance.json").write_text(json.dumps({"run_id": "r", "starts": entries}))
    settings = {
        "learning_rate": 0.001, "lr_scheduler_type": "cosine", "max_steps": 160,
        "train_data": ["web"], "global_batch_size": 8, "sequence_length": 512,
    }  # fmt: skip
    (run / "config.yaml").write_text(json.dumps(settings))
    spoilt = {
        "step": 61, "losses": [{"rank": 1, "micro_batch": 0, "loss": "NaN"}],
        "gradient_norm": None, "weights": [], "documents_of": "the micro-batches",
        "documents": [{"dataset": "web", "document": 4711, "start": 0, "stop": 99}],
    }  # fmt: skip
    path = run / "nonfinite-step-61.json"
    path.write_text(json.dumps(spoilt))
    os.utime(path, (BEGIN + 160, BEGIN + 160))
    return run


SLOW, FULL = 5, 2  # ranks of eight


def memory(noise: random.Random, peak: float) -> list[dict[str, object]]:
    """Return the memory of eight ranks on two hosts; FULL needs 6 GiB more."""
    ranks = []
    for rank in range(8):
        gib = peak + 0.4 * noise.random() + 6 * (rank == FULL)
        sizes = {"memory_peak_gib": gib, "memory_headroom_gib": 79.1 - gib, "host_rss_gib": 9.5}
        ranks.append({"rank": rank, "host": f"gpu{rank // 4 + 11}", **sizes})
    return ranks


def write_run_of_ranks(run: Path, logs: int = 400) -> Path:
    """Write a mixture run on eight GPUs in two starts, with ten steps per log."""
    noise, run = random.Random(0), write_run(run)
    half, lines, time = logs // 2, [], BEGIN + 10
    for index in range(1, logs + 1):
        step = 10 * index
        if index in (1, half + 1):
            time += 300 * (index > 1)
            lines.append({"event": "resumed", "step": step - 10, "max_steps": 10 * logs})
            lines[-1] |= {"event": "started"} if index == 1 else {}
            lines[-1]["time"] = time
        time += 12.5
        loss = 2.1 + 5 * math.exp(-index / 30) + 0.06 * noise.gauss(0, 1)
        loss += 1.5 * (index == 3 * logs // 5)
        slow = SLOW if noise.random() < 0.8 else noise.randrange(8)
        by_rank = memory(noise, 58 + 4 * (index > half))
        lines.append(
            train_line(
                step, time, loss=loss, grad_norm=0.4 + 0.2 * noise.random(), mfu=0.41,
                learning_rate=3e-4 * min(1, index / 20) * (1 - 0.9 * index / logs),
                tokens_seen=524288 * step, tokens_per_s=4.2e5 + 4e3 * noise.gauss(0, 1),
                step_time_s=1.25, data_wait_s=0.004, memory_by_rank=by_rank,
                memory_peak_gib=max(rank["memory_peak_gib"] for rank in by_rank),
                memory_headroom_gib=min(rank["memory_headroom_gib"] for rank in by_rank),
                slowest_rank=slow, slowest_host=f"gpu{slow // 4 + 11}",
                slowest_cost=(0.06 if slow == SLOW else 0.01) + 0.01 * noise.random(),
                **{"loss/web": loss + 0.3, "loss/code": loss - 0.9},
            )
        )  # fmt: skip
        if index % 50 == 0:
            time += 20
            lines += [
                {"event": "eval", "split": "web", "step": step, "eval_web_loss": loss + 0.35,
                 "eval_web_accuracy": 0.62 - 0.06 * loss, "eval_web_runtime": 20.0, "time": time,
                 "memory_by_rank": memory(noise, 45)},
                {"event": "samples", "step": step, "time": time, "samples": [
                    {"prompt": "The sky is blue because", "completion": " the air scatters blue "
                     "light more than red light."}]},
                {"event": "save", "step": step, "size_bytes": 48 * 10**9, "stall_s": 2.0,
                 "write_s": 30.0, "time": time + 2, "memory_by_rank": memory(noise, 66)},
            ]  # fmt: skip
            time += 2
    lines.append({"event": "summary", "step": 10 * logs, "train_runtime": 1.0, "time": time + 1})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    entries = json.loads((run / "provenance.json").read_text())["starts"][:2]
    resumed = next(line["time"] for line in lines if line["event"] == "resumed")
    for entry, began, queued in zip(entries, (BEGIN, resumed - 20), (900, 200), strict=True):
        hosts, devices = ["gpu11", "gpu12"], ["NVIDIA H100 80GB HBM3"] * 4
        entry |= {"time": iso(began), "launch": {"strategy": "fsdp2", "world_size": 8,
                  "hosts": hosts, "devices": devices}}  # fmt: skip
        entry["slurm"] |= {"submit_time": began - queued - 15, "start_time": began - 15}
    (run / "provenance.json").write_text(json.dumps({"run_id": "r", "starts": entries}))
    for path in (run / "nonfinite-step-61.json", *(run / ".lock").iterdir()):
        path.unlink()
    stopped = {"event": "stopped", "step": 10 * half, "time": resumed - 310}
    text = (run / "metrics.jsonl").read_text()
    head, mark, tail = text.partition('{"event": "resumed"')
    (run / "metrics.jsonl").write_text(f"{head}{json.dumps(stopped)}\n{mark}{tail}")
    return run
