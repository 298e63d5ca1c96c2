"""Write the figures of benchmarks/results/ that are about speed into the documents.

python -m benchmarks.figures.speed
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cells.cpu import CPU_CELLS
from benchmarks.cells.gpu import GPU_CELLS
from benchmarks.cells.kinds import OURS, OURS_TUNED
from benchmarks.comparisons.ratios import paired_ratio
from benchmarks.figures.marks import replace_between
from benchmarks.figures.table import component_figure, ratio_text, table, title_and_size
from benchmarks.hardware.circumstances import ROOT

# Stoker with and without one of its optimizations; their code is in the commits that they name.
EXPERIMENTS = (
    "large_tensors", "watching", "float32_products", "short_documents", "ddp_step", "low_precision",
)  # fmt: skip
OURS_COMPILED = f"{OURS}, compiled"  # a part as a GPU takes it by default
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- speed figures: make figures -->", "<!-- end of speed figures -->"


def load_results(group: str, cells: Iterable[str]) -> list[dict[str, Any]]:
    """Return the results of those cells that were measured, in the cells' order."""
    paths = [RESULTS / group / f"{cell}.json" for cell in cells]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def with_figures(document: str, figures: str) -> str:
    """Return the document with other figures between the two marks."""
    return replace_between(document, BEGIN, END, figures)


def summary(results: Sequence[Mapping[str, Any]]) -> str:
    """Write a row for each cell in which Stoker ran beside others; name every other."""
    results = [one for one in results if one.get("ratios")]
    rows = [["", "Stoker", "the fastest of the others", "Stoker / fastest", "all others measured"]]
    rows += [_component_row(one) if "sizes" in one else _training_row(one) for one in results]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|---|---|---|---|---|")
    return "\n".join(lines)


def details(results: Sequence[Mapping[str, Any]]) -> str:
    """Write the table of each cell, and how it was made."""
    return "\n".join(f"{table(one)}\n{_made(one)}\n" for one in results).rstrip()


def _training_row(result: Mapping[str, Any]) -> list[str]:
    baselines, ratios = result["compared"], result["ratios"]
    closest = min(ratios, key=lambda name: ratios[name]["median"])
    ours = baselines[OURS_TUNED if OURS_TUNED in baselines else OURS]
    return [
        result["title"],
        f"{ours['tokens_per_second']:,.0f} tokens/s",
        f"{closest}: {baselines[closest]['tokens_per_second']:,.0f}",
        ratio_text(ratios[closest]),
        _toolkits(ratios),
    ]


def _component_row(result: Mapping[str, Any]) -> list[str]:
    baselines = result["compared"]
    # The largest that somebody else did as well.
    size = max((size for ratios in result["ratios"].values() for size in ratios), key=int)
    ours = OURS_COMPILED if OURS_COMPILED in baselines else OURS
    ratios = {
        name: by_size[size] if ours == OURS else _ratio(baselines, ours, name, size)
        for name, by_size in result["ratios"].items()
        if size in by_size and not name.startswith(OURS)  # ours with other settings
    }
    closest = min(ratios, key=lambda name: ratios[name]["median"])
    unit = "s" if result["unit"] == "s" else f"{result['unit']}/s"
    title, measured = title_and_size(result)
    return [
        f"{title}; {measured} {int(size):,}",
        f"{component_figure(baselines[ours], size)} {unit}",
        f"{closest}: {component_figure(baselines[closest], size)}",
        ratio_text(ratios[closest]),
        _toolkits(ratios),
    ]


def _toolkits(names: Iterable[str]) -> str:
    """Return the toolkits of baselines, each once and without how it was tuned."""
    return ", ".join(dict.fromkeys(name.partition(", ")[0] for name in names))


def _ratio(baselines: Mapping[str, Any], ours: str, name: str, size: str) -> Mapping[str, float]:
    """Return how often faster one is than the other at a size, of runs side by side."""
    pair = (baselines[one]["repeats"][size] for one in (ours, name))
    return paired_ratio(*pair)._asdict()


def _made(result: Mapping[str, Any]) -> str:
    hardware, versions = result["hardware"], result["versions"]
    gpu = f"{hardware['gpu']}, " if "gpu" in hardware else ""
    bf16 = "AMX" if hardware["amx"] else "AVX512-BF16" if hardware.get("avx512_bf16") else ""
    return (
        f"`{result['made_by']}`, {result['date']}, commit {result['commit']}: {gpu}"
        f"{hardware['cores']} "
        f"cores, {hardware['cpu']}{bf16 and ', '}{bf16}; torch {versions['torch']}, "
        f"transformers {versions['transformers']}, trl {versions['trl']}."
    )


def on_a_gpu(figures: str) -> str:
    """Return the figures from a GPU, or that there are none."""
    return figures or "No figures from a GPU are here yet: `make bench-gpu` makes them on one."


def documents() -> dict[Path, str]:
    """Return the figures of each document that has some."""
    cpu = load_results("cpu", [cell.name for cell in CPU_CELLS])
    gpu = load_results("gpu", [cell.name for cell in GPU_CELLS])
    summaries = summary(gpu)
    tables = f"## On one GPU\n\n{on_a_gpu(details(gpu))}\n\n## On two CPU cores\n\n{details(cpu)}"
    return {
        DOCS / "performance.md": summaries,
        DOCS / "internals" / "benchmarks.md": tables,
        DOCS / "internals" / "experiments.md": details(load_results("experiments", EXPERIMENTS)),
    }


def main() -> None:
    """Rewrite the documents in place."""
    for path, figures in documents().items():
        path.write_text(with_figures(path.read_text(encoding="utf-8"), figures), encoding="utf-8")


if __name__ == "__main__":
    main()
