"""Write the demo's figures from benchmarks/results/demo_cpu.json into the README.

python examples/readme_figures.py
"""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from run_demo import ROOT, table

RESULT = ROOT / "benchmarks" / "results" / "demo_cpu.json"
BEGIN, END = "<!-- demo figures: make figures -->", "<!-- end of demo figures -->"


def with_figures(readme: str) -> str:
    """Return the README with the table between the two marks made anew."""
    figures = table(json.loads(RESULT.read_text()))
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", flags=re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n{figures}\n{END}", readme)


def main() -> None:
    """Rewrite README.md in place."""
    path = ROOT / "README.md"
    path.write_text(with_figures(path.read_text()))


if __name__ == "__main__":
    main()
