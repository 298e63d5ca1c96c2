"""Write the table of benchmarks/results/interruptions.json into docs/internals/proofs.md.

python -m benchmarks.figures.interruptions
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.figures.marks import replace_between

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "interruptions.json"
DOCUMENT = ROOT / "docs" / "internals" / "proofs.md"
BEGIN, END = "<!-- interruptions: make figures -->", "<!-- end of interruptions -->"
KINDS = ("pretraining", "LoRA")
COLUMNS = (
    *("interruption", "run", "exit code", "what follows", "steps done again", "seconds"),
    *("equal", "log"),
)


def with_table(document: str) -> str:
    """Return the document with the table between the two marks made anew."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    return replace_between(document, BEGIN, END, "\n".join(table(result)))


def table(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the table: a row for each interruption and kind of run."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for name, kinds in result["rows"].items():
        for kind in KINDS:
            if kind in kinds:
                yield row(name, kind, kinds[kind])
    made = result["hardware"]
    yield f"\n{result['date']}, commit {result['commit']}, {made['cpu']}."


def row(name: str, kind: str, outcome: Mapping[str, Any]) -> str:
    """Return the line of one outcome; nothing where nothing was measured."""
    equal = {True: "yes", None: ""}[outcome["equal"]]
    figures = [outcome[key] for key in ("exit_code", "then", "lost_steps", "seconds")]
    cells = ["" if figure is None else str(figure) for figure in figures]
    says = outcome["says"].replace("|", "\\|").replace("<", "&lt;")
    return f"| {' | '.join([name, kind, *cells, equal, says])} |"


def main() -> None:
    """Rewrite docs/internals/proofs.md in place."""
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
