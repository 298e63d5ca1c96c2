"""Measure Stoker beside other toolkits; one JSON a cell into benchmarks/results/.

    python -m benchmarks cpu                      all cells for a CPU
    python -m benchmarks cpu --cells pretrain_bf16 --repeats 3
    python -m benchmarks experiments              Stoker beside itself without a choice of ours

Let nothing else run meanwhile. Contestants run in turn, each in a fresh process.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import component, parity, training
from benchmarks.cells import CPU_CELLS, EXPERIMENTS, Cell, ComponentCell, ParityCell
from benchmarks.circumstances import ROOT, circumstances
from benchmarks.contest import say
from benchmarks.table import table

RESULTS = ROOT / "benchmarks" / "results"
GROUPS = {"cpu": CPU_CELLS, "experiments": EXPERIMENTS}


def main() -> int:
    """Hold the contests that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--cells", default="", help="names, separated by commas; default: all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    given = parser.parse_args()
    cells = {cell.name: cell for cell in GROUPS[given.group]}
    names = [name for name in given.cells.split(",") if name] or list(cells)
    if unknown := [name for name in names if name not in cells]:
        parser.error(f"no cell {', '.join(unknown)}; there are {', '.join(cells)}")
    broken = []
    for name in names:
        say(f"\n{name}")
        cell = cells[name]
        made_by = f"python -m benchmarks {given.group} --cells {name}"
        if not isinstance(cell, ParityCell):  # runs of one seed: the same losses each time
            made_by += f" --repeats {given.repeats}"
        result = circumstances(made_by) | hold(cell, given.repeats)
        directory = given.results / given.group
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
        say(table(result))
        if not result.get("parity", {"holds": True})["holds"]:
            broken.append(name)
    if broken:
        say(f"The losses do not agree in {', '.join(broken)}: this is not the same training.")
    return 1 if broken else 0


def hold(cell: Cell, repeats: int) -> dict[str, Any]:
    """Measure a cell; return its results."""
    if isinstance(cell, ComponentCell):
        return component.hold(cell, repeats)
    if isinstance(cell, ParityCell):
        return parity.hold(cell)
    return training.hold(cell, repeats)


if __name__ == "__main__":
    raise SystemExit(main())
