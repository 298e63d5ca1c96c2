"""Write the speed and the losses of fp8 beside bf16 into docs/internals/benchmarks.md.

python -m benchmarks.figures.float8
"""

import json
from typing import Any

from benchmarks.figures.marks import replace_between
from benchmarks.hardware.circumstances import ROOT

RESULT = ROOT / "benchmarks" / "results" / "gpu" / "fp8.json"
DOCUMENT = ROOT / "docs" / "internals" / "benchmarks.md"
BEGIN, END = "<!-- fp8 figures: make figures -->", "<!-- end of fp8 figures -->"
NAMES = {"bf16": "bf16", "rowwise": "`fp8: true`", "tensorwise": "`fp8: tensorwise`"}
SPEED = "tokens_per_second_of_32_layers"


def with_figures(document: str) -> str:
    """Return the document with the table between the two marks made anew."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    header = [
        "",
        "ms per layer",
        "tokens/s",
        "relative to bf16",
        "loss of step 300",
        "held-out loss",
    ]
    rows = [header, ["---"] * len(header)]
    for name, shown in NAMES.items():
        found, losses = result["speed"][name], result["losses"][name]
        rows.append(
            [
                shown,
                f"{found['layer_ms']:.1f}",
                f"{found[SPEED]:,.0f}",
                f"{gain(result, name):.2f}",
                f"{losses[-1]:.3f}",
                f"{result['evaluations'][name][-1]:.3f}",
            ]
        )
    made = f"{result['hardware']['gpu']}, {result['date']}, commit {result['commit']}."
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return replace_between(document, BEGIN, END, "\n".join([*lines, "", made]))


def gain(result: dict[str, Any], name: str) -> float:
    """Return the speed of an 8B Llama's training relative to bf16."""
    return float(result["speed"][name][SPEED] / result["speed"]["bf16"][SPEED])


def main() -> None:
    """Rewrite docs/internals/benchmarks.md in place."""
    DOCUMENT.write_text(with_figures(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
