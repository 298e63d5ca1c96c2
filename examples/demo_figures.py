"""Write the demo's figures from benchmarks/results/demo_cpu.json into docs/demo.md.

python examples/demo_figures.py
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from run_demo import ROOT, table

from benchmarks.figures.marks import replace_between

RESULT = ROOT / "benchmarks" / "results" / "demo_cpu.json"
BEGIN, END = "<!-- demo figures: make figures -->", "<!-- end of demo figures -->"


def with_figures(document: str) -> str:
    """Return the document with the table between the two marks made anew."""
    return replace_between(document, BEGIN, END, table(json.loads(RESULT.read_text())))


def main() -> None:
    """Rewrite docs/demo.md in place."""
    path = ROOT / "docs" / "demo.md"
    path.write_text(with_figures(path.read_text()))


if __name__ == "__main__":
    main()
