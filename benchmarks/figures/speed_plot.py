"""Draw how much faster Stoker trains than the fastest other toolkit, from benchmarks/results/.

python -m benchmarks.figures.speed_plot
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from benchmarks.cells.cpu import CPU_CELLS
from benchmarks.cells.gpu import GPU_CELLS
from benchmarks.figures.speed import load_results
from benchmarks.hardware.circumstances import ROOT

PICTURE = ROOT / "docs" / "images" / "speed.svg"
LEFT, WIDTH, ROW = 330, 300, 30  # pixels: where bars begin, a ratio of one, a line
STYLE = """text { font: 13px sans-serif; fill: #333 } .bar { fill: #4269d0 } .one { stroke: #666 }
.grid { stroke: #e4e7eb } .soft { fill: #666; font-size: 12px }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .soft { fill: #a0a6b0 }
.bar { fill: #7aa2ff } .grid { stroke: #30363d } .one { stroke: #a0a6b0 } }"""
TICKS = (0, 0.25, 0.5, 0.75, 1)


def drawn(measured: Sequence[Mapping[str, Any]]) -> str:
    """Return an SVG with a bar for each training workload that others ran too."""
    shown = [one for one in measured if one.get("ratios") and "sizes" not in one]
    bottom = 22 + ROW * len(shown)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {bottom + 48}">']
    parts.append(f"<style>{STYLE}</style>")
    for tick in TICKS:
        x = LEFT + WIDTH * tick
        parts.append(f'<path class="grid" d="M{x:.0f},10V{bottom}"/>')
        parts.append(f'<text class="soft" x="{x:.0f}" y="{bottom + 18}" text-anchor="middle">')
        parts.append(f"{tick:g}</text>")
    parts.append(f'<text class="soft" x="{LEFT + WIDTH * TICKS[-1] / 2}" y="{bottom + 38}" ')
    parts.append('text-anchor="middle">tokens per second of Stoker / of the toolkit named</text>')
    for number, one in enumerate(shown):
        name, ratio = min(
            ((name, ratio["median"]) for name, ratio in one["ratios"].items()),
            key=lambda pair: pair[1],
        )
        y = 18 + ROW * number
        where = one["hardware"].get("gpu", "2 CPU cores").replace("NVIDIA ", "")
        parts.append(f'<rect class="bar" x="{LEFT}" y="{y}" width="{WIDTH * ratio:.0f}" ')
        parts.append(f'height="20" rx="2"/><text x="{LEFT - 10}" y="{y + 15}" text-anchor="end">')
        parts.append(f"{escape(short(one['title']))}, {where}</text>")
        parts.append(f'<text x="{LEFT + WIDTH * ratio + 8:.0f}" y="{y + 15}">')
        parts.append(f"{ratio:.2f} ({escape(name)})</text>")
    parts.append(f'<path class="one" d="M{LEFT + WIDTH},10V{bottom}"/></svg>')
    return "".join(parts) + "\n"


def short(title: str) -> str:
    """Return what is trained: the title without sizes of batches."""
    words = title.replace(" shape", "").split(", ")
    return ", ".join(word for word in words if " x " not in word and "tokens" not in word)


def results() -> list[dict[str, Any]]:
    """Return what was measured, on a GPU first."""
    groups = {"gpu": GPU_CELLS, "cpu": CPU_CELLS}
    return [
        result
        for group, cells in groups.items()
        for result in load_results(group, [cell.name for cell in cells])
    ]


def main() -> None:
    """Write the picture."""
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(drawn(results()), encoding="utf-8")


if __name__ == "__main__":
    main()
