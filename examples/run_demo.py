"""Run the demo's commands, say what came out and keep the figures as JSON (`--record FILE`).

    python examples/run_demo.py

From the standard library's source to a fine-tuned model, on a CPU, from the repository root.
Commands whose result is there already say so and do nothing.
"""

import argparse
import json
import os
import platform
import resource
import shlex
import signal
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
    "answer": ["chat.py", "runs/demo-sft", "--greedy", "--max_new_tokens", "40"],
}
ASKED = 50  # questions in wordings that are not trained on
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
    # Ctrl-C is for the command that runs, which saves a checkpoint. The demo waits for its end.
    signal.signal(signal.SIGINT, lambda *_: None)
    seconds = {}
    for name, command in COMMANDS.items():
        say(f"\n$ python {shlex.join(command)}")
        started = time.perf_counter()
        # chat.py reads a question from each line of stdin. /reset ends the conversation.
        chats = held_out_chats() if name == "answer" else []
        done = subprocess.run(
            [sys.executable, *command],
            input="".join(f"{question}\n/reset\n" for question, _ in chats),
            stdout=subprocess.PIPE if chats else None,
            cwd=ROOT, text=True, check=False,
        )  # fmt: skip
        if done.returncode in (75, 130):  # stopped by its user
            say("\nThe demo continues from here with the same command")
        if done.returncode:
            return done.returncode
        seconds[name] = round(time.perf_counter() - started, 1)
    answers = done.stdout.splitlines()
    asked = [*zip(chats, answers, strict=False)]
    right = [one for one in asked if one[0][1] == one[1]]
    wrong = [one for one in asked if one not in right]
    say("\nThree right answers and a wrong one:" if wrong else "\nThree right answers:")
    for (question, original), answer in right[:3] + wrong[:1]:
        say(f"\nquestion  {question}\nanswer    {answer}\noriginal  {original}")
    figures = {**figures_of(seconds), "answers": {"asked": ASKED, "right": len(right)}}
    say("\n" + table(figures))
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(figures, indent=2) + "\n")
    say(NEXT)
    return 0


def held_out_chats() -> list[tuple[str, str]]:
    """Return some of the held-out questions with their answers, from all over the file."""
    with HELD_OUT.open(encoding="utf-8") as lines:
        chats = [json.loads(line)["messages"] for line in lines]
    chosen = [chats[number * len(chats) // ASKED] for number in range(ASKED)]
    return [(question["content"], answer["content"]) for question, answer in chosen]


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
    rows = ["| step | seconds | held-out split | loss before | after |", "|---|---|---|---|---|"]
    for name, taken in figures["seconds"].items():
        splits = figures["evaluations"].get(name) or {"": None}
        for number, (split, losses) in enumerate(splits.items()):
            shown = (name, f"{taken:.0f}") if number == 0 else ("", "")
            both = [f"{losses[key]:.2f}" for key in ("first", "best")] if losses else ["", ""]
            rows.append(f"| {' | '.join([*shown, split, *both])} |")
    answers = figures["answers"]
    rows.append(
        f"\n{answers['right']} of {answers['asked']} held-out questions are answered word for word."
    )
    rows.append(
        f"\n{figures['total_s']:.0f} seconds and at most {figures['peak_memory_gib']:.1f} GiB on "
        f"{figures['hardware']} ({figures['date']})."
    )
    return "\n".join(rows)


def say(text: str) -> None:
    """Write a line between the output of the commands."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
