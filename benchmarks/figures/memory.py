"""Write memory as predicted beside memory as measured into docs/internals/benchmarks.md.

python -m benchmarks.figures.memory
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.cells.gpu import GPU_CELLS
from benchmarks.cells.kinds import OURS, OURS_TUNED
from benchmarks.figures.marks import replace_between
from benchmarks.hardware.circumstances import ROOT

RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "internals" / "benchmarks.md"
BEGIN, END = "<!-- memory figures: make figures -->", "<!-- end of memory figures -->"
MIB = 2**20


def with_figures(document: str, results: Path = RESULTS) -> str:
    """Return the document with the table between the two marks made anew."""
    lines = ["| run | predicted, MiB | measured, MiB | measured / predicted |", "|---|---|---|---|"]
    for path in sorted((results / "memory").glob("*.json")):
        lines += _predictions(json.loads(path.read_text(encoding="utf-8")))
    for cell in GPU_CELLS:
        path = results / "gpu" / f"{cell.name}.json"
        if path.exists():
            lines += _training(json.loads(path.read_text(encoding="utf-8")))
    return replace_between(document, BEGIN, END, "\n".join(lines))


def _predictions(result: dict[str, Any]) -> Iterator[str]:
    """Yield a row for each run of `python -m benchmarks.memory`."""
    for shape, choices in result["cells"].items():
        for choice, found in choices.items():
            name = f"{_device(result)}: {shape.replace('_', ' ')}, {choice}"
            yield _row(name, found["predicted"], found["measured"])


def _training(result: dict[str, Any]) -> Iterator[str]:
    """Yield a row for Stoker, and compiled, in a training cell that noted what was predicted."""
    for name, suffix in ((OURS, ""), (OURS_TUNED, "; compiled")):
        ours = result.get("compared", {}).get(name, {})
        predicted = ours.get("notes", {}).get("predicted_memory_bytes")
        if predicted:
            run = f"{_device(result)}: {result['title']}{suffix}, commit {result['commit']}"
            yield _row(run, predicted, ours["peak_memory_bytes"])


def _device(result: dict[str, Any]) -> str:
    hardware = result["hardware"]
    return hardware.get("gpu") or f"{hardware['cores']} cores"


def _row(name: str, predicted: int, measured: int) -> str:
    ratio = measured / predicted
    return f"| {name} | {predicted / MIB:,.0f} | {measured / MIB:,.0f} | {ratio:.2f} |"


def main() -> None:
    """Rewrite docs/internals/benchmarks.md in place."""
    DOCUMENT.write_text(with_figures(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
