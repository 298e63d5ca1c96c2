"""Run the demo's commands, say what came out and keep the figures as JSON (`--record FILE`).

    python examples/run_demo.py

From the standard library's source to a fine-tuned model, on a CPU, from the repository root.
Commands whose result is there already say so and do nothing.
"""

import argparse
import json
import math
import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils.host.journal_file import read_journal  # noqa: E402 - the scripts' folder is not ROOT
from utils.host.machine import cpu_fact  # noqa: E402

COMMANDS = {
    "collect": ["examples/make_stdlib_corpus.py", "--output_dir", "data/stdlib"],
    "tokenizer": [
        "examples/train_tokenizer.py",
        *("--vocabulary", "8192", "--output_dir", "data/stdlib/tokenizer"),
        "data/stdlib/pretrain.jsonl",
    ],
    "prepare text": ["prepare_data.py", "--config", "recipes/data/demo_pretrain.yaml"],
    "prepare chats": ["prepare_data.py", "--config", "recipes/data/demo_chats.yaml"],
    "pretrain": ["pretrain.py", "--config", "recipes/pretrain/demo_cpu.yaml"],
    "fine-tune": ["sft_train.py", "--config", "recipes/sft/demo_cpu.yaml"],
}
# Sampled: the greedy answer of a model this small repeats itself.
ASK = ["chat.py", "runs/demo-sft", "--temperature", "0.7", "--top_p", "0.9"]
ASK += ["--max_new_tokens", "120", "--prompt"]
NEXT = """
Next:
  python chat.py runs/demo-sft                      talk to it
  docs/tutorial.md                                  a real model, Qwen3-8B, on a public set of chats
  docs/recipes.md                                   recipes for other models, sizes and data
  recipes/data/local_jsonl.yaml                     your own chats"""
HELD_OUT = ROOT / "data" / "stdlib" / "chats_heldout.jsonl"
RUNS = {"pretrain": "runs/demo-pretrain", "fine-tune": "runs/demo-sft"}


def main() -> int:
    """Run the commands one after the other; the first that fails ends the demo."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--record", type=Path, default=ROOT / "runs" / "demo.json", help="file for the figures"
    )
    record = parser.parse_args().record
    seconds = {}
    for name in (*COMMANDS, "complete"):
        command = COMMANDS.get(name) or [*ASK, held_out_chat()[0]["content"]]
        say(f"\n$ python {shlex.join(command)}")
        started = time.perf_counter()
        exit_code = subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode
        if exit_code:
            return exit_code
        seconds[name] = round(time.perf_counter() - started, 1)
    say(f"\nThe original:\n{held_out_chat()[1]['content']}")
    figures = figures_of(seconds)
    say("\n" + table(figures))
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(figures, indent=2) + "\n")
    say(NEXT)
    return 0


def held_out_chat() -> list[dict[str, str]]:
    """Return the first held-out instruction and its answer, as messages."""
    with HELD_OUT.open(encoding="utf-8") as lines:
        return json.loads(next(lines))["messages"]


def figures_of(seconds: dict[str, float]) -> dict[str, Any]:
    """Collect times, losses and memory; peak memory is that of the largest process."""
    peak_gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    return {
        "date": date.today().isoformat(),
        "hardware": f"{os.cpu_count()} cores, {cpu_fact('model name') or platform.machine()}",
        "python": platform.python_version(),
        "seconds": seconds,
        "total_s": round(sum(seconds.values()), 1),
        "peak_memory_gib": round(peak_gib, 2),
        "evaluations": {name: evaluations(ROOT / run) for name, run in RUNS.items()},
    }


def evaluations(run: Path) -> dict[str, dict[str, float]]:
    """Return the first and the best loss of each split of a run, in nats per token."""
    losses: dict[str, list[float]] = {}
    for line in read_journal(run / "metrics.jsonl"):
        if line["event"] == "eval":
            losses.setdefault(line["split"], []).append(line[f"eval_{line['split']}_loss"])
    return {split: {"first": found[0], "best": min(found)} for split, found in losses.items()}


def table(figures: dict[str, Any]) -> str:
    """Write the figures as a Markdown table, as the README shows them."""
    rows = ["| step | seconds | held-out split | loss before | after | perplexity before | after |"]
    rows.append("|---|---|---|---|---|---|---|")
    for name, taken in figures["seconds"].items():
        splits = figures["evaluations"].get(name) or {"": None}
        for number, (split, losses) in enumerate(splits.items()):
            shown = (name, f"{taken:.0f}") if number == 0 else ("", "")
            rows.append(f"| {' | '.join([*shown, split, *_before_and_after(losses)])} |")
    rows.append(
        f"\n{figures['total_s']:.0f} seconds and at most {figures['peak_memory_gib']:.1f} GiB on "
        f"{figures['hardware']} ({figures['date']})."
    )
    return "\n".join(rows)


def _before_and_after(losses: dict[str, float] | None) -> list[str]:
    if losses is None:
        return ["", "", "", ""]
    first, best = losses["first"], losses["best"]
    return [f"{first:.2f}", f"{best:.2f}", f"{math.exp(first):,.0f}", f"{math.exp(best):,.1f}"]


def say(text: str) -> None:
    """Write a line between the output of the commands."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
