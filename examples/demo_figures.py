"""Write the figures of the demo and of the runs on real text into docs/demo.md.

    python examples/demo_figures.py
    python examples/demo_figures.py --record runs/real-text real_text   # first keep a new run

The figures come from demo_cpu.json and the folders real_text and gpu/real_text in
benchmarks/results.
"""

import argparse
import json
import re
import sys
from collections.abc import Container
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from run_demo import ROOT, table

from benchmarks.figures.marks import replace_between
from utils.host.journal_file import read_journal, read_lines, strict_json

RESULTS = ROOT / "benchmarks" / "results"
# By the name of the table: the folder in RESULTS, and the shown characters of a sample.
RUNS = {"real": ("real_text", 40), "real gpu": ("gpu/real_text", 120)}
BEGIN, END = "<!-- {} figures: make figures -->", "<!-- end of {} figures -->"
SPLITS = ("novels", "python")
SHOWN = slice(0, None, 2)  # of three samples, the first (a novel) and the last (Python's tutorial)
# The recorded keys of a journal line and of a start.
KEYS = {
    *("event", "step", "max_steps", "time", "loss", "grad_norm", "learning_rate", "tokens_seen"),
    *("tokens_per_s", "step_time_s", "split", "samples", "train_runtime", "resumed_at"),
    *(f"eval_{split}_loss" for split in SPLITS),
}
START_KEYS = ("time", "resumed_from", "launch", "changed")


def with_figures(document: str) -> str:
    """Return the document with the tables between the marks made anew."""
    tables = {"demo": table(json.loads((RESULTS / "demo_cpu.json").read_text()))}
    for name, (folder, characters) in RUNS.items():
        tables[name] = real_table(RESULTS / folder, characters)
    for name, text in tables.items():
        document = replace_between(document, BEGIN.format(name), END.format(name), text)
    return document


def real_table(recorded: Path, characters: int) -> str:
    """Write the losses and samples of an early and of the last evaluation as Markdown."""
    lines = read_journal(recorded / "metrics.jsonl")
    steps: dict[int, dict[str, Any]] = {}
    for line in lines:
        steps.setdefault(line["step"], {"tokens_seen": 0}).update(line)
    evaluated = [found for found in steps.values() if "samples" in found]
    prompts = [each["prompt"] for each in evaluated[0]["samples"][SHOWN]]
    header = ["step", "tokens", *SPLITS, *prompts]
    rows = [header, ["---"] * len(header)]
    for found in (evaluated[1], evaluated[-1]):
        losses = [f"{found[f'eval_{split}_loss']:.2f}" for split in SPLITS]
        samples = [" ".join(each["completion"].split()) for each in found["samples"][SHOWN]]
        samples = [re.sub(r"(\S+)( \1){2,}$", r"\1 ...", sample)[:characters] for sample in samples]
        texts = [text.replace("|", "\\|").replace("`", "'") for text in samples]
        rows.append(
            [str(found["step"]), f"{found['tokens_seen']:,}", *losses, *(f"`{t}`" for t in texts)]
        )
    starts = len(json.loads((recorded / "provenance.json").read_text())["starts"])
    minutes = sum(line.get("train_runtime", 0) for line in lines) / 60
    table_lines = [f"| {' | '.join(row)} |" for row in rows]
    plural = "s" if starts > 1 else ""
    ending = f"{minutes:.0f} minutes of training in {starts} start{plural}."
    return "\n".join([*table_lines, "", ending])


def record(run: Path, folder: Path) -> None:
    """Copy the run's settings, and the recorded keys of its journal and its starts."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [chosen(line, KEYS) for line in read_lines(run / "metrics.jsonl")[0]]
    (folder / "metrics.jsonl").write_text("".join(f"{strict_json(line)}\n" for line in lines))
    starts = json.loads((run / "provenance.json").read_text())["starts"]
    kept = {"starts": [chosen(start, START_KEYS) for start in starts]}
    for start in kept["starts"]:
        start["launch"]["hosts"] = ["localhost"]
    (folder / "provenance.json").write_text(strict_json(kept, indent=1) + "\n")
    (folder / "config.yaml").write_text((run / "config.yaml").read_text())


def chosen(entry: dict[str, Any], keys: Container[str]) -> dict[str, Any]:
    """Return the part of a mapping that has these keys."""
    return {key: value for key, value in entry.items() if key in keys}


def main() -> None:
    """Rewrite docs/demo.md in place."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", nargs=2, metavar=("RUN", "FOLDER"), help="keep these figures")
    if recorded := parser.parse_args().record:
        record(Path(recorded[0]), RESULTS / recorded[1])
    path = ROOT / "docs" / "demo.md"
    path.write_text(with_figures(path.read_text()))


if __name__ == "__main__":
    main()
