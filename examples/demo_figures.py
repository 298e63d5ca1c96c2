"""Write the figures of the demo and of the run on real text into docs/demo.md.

    python examples/demo_figures.py
    python examples/demo_figures.py --record runs/real-text     # keep another run's figures first

They come from demo_cpu.json and real_text/ in benchmarks/results.
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

DEMO, REAL = (ROOT / "benchmarks" / "results" / name for name in ("demo_cpu.json", "real_text"))
BEGIN, END = "<!-- {} figures: make figures -->", "<!-- end of {} figures -->"
SPLITS = ("novels", "python")
# The recorded keys of a journal line and of a start.
KEYS = {
    *("event", "step", "max_steps", "time", "loss", "grad_norm", "learning_rate", "tokens_seen"),
    *("tokens_per_s", "step_time_s", "split", "samples", "train_runtime", "resumed_at"),
    *(f"eval_{split}_loss" for split in SPLITS),
}
START_KEYS = ("time", "resumed_from", "launch", "changed")
SHOWN = 40  # characters of a sample


def with_figures(document: str) -> str:
    """Return the document with the tables between the marks made anew."""
    tables = {"demo": table(json.loads(DEMO.read_text())), "real": real_table()}
    for name, text in tables.items():
        document = replace_between(document, BEGIN.format(name), END.format(name), text)
    return document


def real_table() -> str:
    """Write the losses and samples of an early, a middle and the last evaluation as Markdown."""
    lines = read_journal(REAL / "metrics.jsonl")
    steps: dict[int, dict[str, Any]] = {}
    for line in lines:
        steps.setdefault(line["step"], {"tokens_seen": 0}).update(line)
    evaluated = [found for found in steps.values() if "samples" in found]
    header = ["step", "tokens", *SPLITS, *(each["prompt"] for each in evaluated[0]["samples"])]
    rows = [header, ["---"] * len(header)]
    for found in (evaluated[1], evaluated[len(evaluated) // 2], evaluated[-1]):
        losses = [f"{found[f'eval_{split}_loss']:.2f}" for split in SPLITS]
        samples = [" ".join(each["completion"].split()) for each in found["samples"]]
        samples = [re.sub(r"(\S+)( \1){2,}$", r"\1 ...", sample)[:SHOWN] for sample in samples]
        texts = [text.replace("|", "\\|").replace("`", "'") for text in samples]
        rows.append(
            [str(found["step"]), f"{found['tokens_seen']:,}", *losses, *(f"`{t}`" for t in texts)]
        )
    starts = len(json.loads((REAL / "provenance.json").read_text())["starts"])
    minutes = sum(line.get("train_runtime", 0) for line in lines) / 60
    table_lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*table_lines, "", f"{minutes:.0f} minutes of training in {starts} starts."])


def record(run: Path) -> None:
    """Copy the run's settings, and the recorded keys of its journal and its starts."""
    REAL.mkdir(exist_ok=True)
    lines = [chosen(line, KEYS) for line in read_lines(run / "metrics.jsonl")[0]]
    (REAL / "metrics.jsonl").write_text("".join(f"{strict_json(line)}\n" for line in lines))
    starts = json.loads((run / "provenance.json").read_text())["starts"]
    kept = {"starts": [chosen(start, START_KEYS) for start in starts]}
    for start in kept["starts"]:
        start["launch"]["hosts"] = ["localhost"]
    (REAL / "provenance.json").write_text(strict_json(kept, indent=1) + "\n")
    (REAL / "config.yaml").write_text((run / "config.yaml").read_text())


def chosen(entry: dict[str, Any], keys: Container[str]) -> dict[str, Any]:
    """Return the part of a mapping that has these keys."""
    return {key: value for key, value in entry.items() if key in keys}


def main() -> None:
    """Rewrite docs/demo.md in place."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, help="directory of a run on real text")
    if run := parser.parse_args().record:
        record(run)
    path = ROOT / "docs" / "demo.md"
    path.write_text(with_figures(path.read_text()))


if __name__ == "__main__":
    main()
