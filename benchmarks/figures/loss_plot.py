"""Draw the README's loss curves: a run that is interrupted twice, and the same run without that.

python -m benchmarks.figures.loss_plot
"""

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.hardware.circumstances import ROOT
from utils.observe.history import History, read_run

RECORD = ROOT / "benchmarks" / "results" / "interrupted_run"
PICTURE = ROOT / "docs" / "images" / "loss.svg"
# The reason of each start that ended early: see EVENTS in examples/interrupted_run.py.
CAUSES = ("the process is killed", "the node fails")
LEFT, RIGHT = 74, 846  # pixels: the horizontal axis
LOSS, DIFFERENCE, BAR = (44, 280), (318, 376), (440, 464)  # top and bottom of each part
ROUNDING = 1e-6  # about the distance of two float32 numbers at a loss of 9
STYLE = """text { font: 13px sans-serif; fill: #333 } .soft { fill: #666; font-size: 12px }
.grid { stroke: #e4e7eb } .axis { stroke: #aaa } .mark { stroke: #888 } path { fill: none }
.whole { stroke: #f4b183; stroke-width: 7 } .run { stroke: #2f5fd0; stroke-width: 1.8 }
.lost { fill: #c4c9d1; opacity: .4 } .dot { fill: #2f5fd0 }
.kept { fill: #2f5fd0 } .again { fill: #c4c9d1 } .idle { fill: #f0f1f4 } .end { fill: #d9480f }
.on { fill: #fff }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .soft { fill: #a0a6b0 }
.grid { stroke: #30363d } .axis { stroke: #555c66 } .whole { stroke: #8f5a2f }
.run { stroke: #7aa2ff } .dot, .kept { fill: #7aa2ff } .again, .lost { fill: #5c636e }
.idle { fill: #21262d } .end { fill: #ff9a62 } .on { fill: #10131a } }"""
Points = Sequence[tuple[float, float]]


class Drawing:
    """The parts of an SVG whose horizontal axis shows steps from 0 to `steps`."""

    def __init__(self, steps: int):
        self.steps, self.parts = steps, list[str]()

    def x(self, step: float) -> float:
        """Return the horizontal pixel of a step."""
        return LEFT + (RIGHT - LEFT) * step / self.steps

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """Add a text."""
        self.parts.append(
            f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'
        )

    def label(self, top_bottom: tuple[int, int], words: str) -> None:
        """Add the label of a vertical axis."""
        middle = sum(top_bottom) / 2
        turned = f'transform="translate(14,{middle}) rotate(-90)"'
        self.parts.append(f'<text class="soft" text-anchor="middle" {turned}>{words}</text>')

    def curve(self, points: Points, kind: str) -> None:
        """Add a line through points in pixels."""
        places = "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<path class="{kind}" d="M{places}"/>')

    def rectangle(
        self, left: float, right: float, kind: str, top_bottom: tuple[int, int] = BAR
    ) -> None:
        """Add a rectangle, by default as a part of the time bar."""
        top, bottom = top_bottom
        at = f'x="{left:.1f}" y="{top}" width="{right - left:.1f}" height="{bottom - top}"'
        self.parts.append(f'<rect class="{kind}" {at}/>')

    def circle(self, x: float, y: float, radius: float, kind: str) -> None:
        """Add a point."""
        self.parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>')


def drawn(record: Path = RECORD) -> str:
    """Return the picture of the recorded runs as SVG."""
    run = read_run(record)
    whole = dict(json.loads((record / "uninterrupted.json").read_text())["losses"])
    drawing = Drawing(run.max_steps or max(whole))
    draw_losses(drawing, run, whole)
    draw_difference(drawing, run, whole)
    draw_times(drawing, run)
    size = f'viewBox="0 0 860 {BAR[1] + 48}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>'
    return "\n".join([head, *drawing.parts, "</svg>\n"])


def draw_losses(drawing: Drawing, run: History, whole: dict[int, float]) -> None:
    """Draw both runs, the steps that were repeated, and where the run was interrupted."""
    top, bottom = LOSS
    low, high = 5.0, 9.5

    def y(loss: float) -> float:
        return bottom - (bottom - top) * (loss - low) / (high - low)

    for start in run.starts[:-1]:
        back = start.last_step - start.lost_steps
        drawing.rectangle(drawing.x(back), drawing.x(start.last_step), "lost", LOSS)
    for level in (5, 6, 7, 8, 9):
        drawing.curve([(LEFT, y(level)), (RIGHT, y(level))], "grid" if level > low else "axis")
        drawing.text(LEFT - 8, y(level) + 4, f"{level}", "soft", "end")
    drawing.label(LOSS, "loss, nats per token")
    drawing.curve([(drawing.x(step), y(loss)) for step, loss in whole.items()], "whole")
    trained = [(drawing.x(line["step"]), y(line["loss"])) for line in run.trained]
    drawing.curve(trained, "run")
    for number, start in enumerate(run.starts[:-1]):
        lines = [line for line in start.lines if line["lost"]]
        x, height = drawing.x(lines[-1]["step"]), y(lines[-1]["loss"])
        drawing.curve([(x, height - 8), (x, height - 74 - 4 * number)], "mark")
        drawing.circle(x, height, 5, "end")
        back = start.last_step - start.lost_steps
        drawing.text(x + 8, height - 66, f"step {start.last_step}: {CAUSES[number]};")
        drawing.text(x + 8, height - 49, f"start {number + 2} resumes from step {back}")
    legend = (
        (LEFT, "whole", f"never interrupted, last {list(whole.values())[-1]:.4f}"),
        (LEFT + 275, "run", f"interrupted twice, last {run.trained[-1]['loss']:.4f}"),
    )
    for x, kind, words in legend:
        drawing.curve([(x, 22), (x + 28, 22)], kind)
        drawing.text(x + 36, 26, words)
    drawing.rectangle(LEFT + 538, LEFT + 566, "lost", (15, 29))
    drawing.text(LEFT + 574, 26, "steps repeated later")


def draw_difference(drawing: Drawing, run: History, whole: dict[int, float]) -> None:
    """Draw the difference of the two runs' losses at each logged step."""
    top, bottom = DIFFERENCE
    logged = [line for start in run.starts for line in start.lines if "loss" in line]
    differences = [(line["step"], line["loss"] - whole[line["step"]]) for line in logged]
    largest = max(abs(value) for _, value in differences)
    middle, half = (top + bottom) / 2, (bottom - top) / 2
    reach = max(ROUNDING, largest)
    for part in (-1, 0, 1):
        height = middle - half * part
        drawing.curve([(LEFT, height), (RIGHT, height)], "grid" if part >= 0 else "axis")
        drawing.text(LEFT - 8, height + 4, f"{part * reach:.0e}" if part else "0", "soft", "end")
    drawing.label(DIFFERENCE, "difference")
    for step, value in differences:
        drawing.circle(drawing.x(step), middle - half * value / reach, 2.2, "dot")
    words = f"largest difference of {len(differences)} logged losses: {largest:g}"
    drawing.text(RIGHT, top - 8, words, "", "end")
    for step in range(0, drawing.steps + 1, 60):
        drawing.text(drawing.x(step), bottom + 18, f"{step}", "soft", "middle")
    drawing.text((LEFT + RIGHT) / 2, bottom + 36, "step", "soft", "middle")


def draw_times(drawing: Drawing, run: History) -> None:
    """Draw when each start ran, and which part of its work counts."""
    begin, end = run.starts[0].began, run.starts[-1].ended

    def x(time: float) -> float:
        return LEFT + (RIGHT - LEFT) * (time - begin) / (end - begin)

    drawing.rectangle(LEFT, RIGHT, "idle")
    for number, start in enumerate(run.starts, 1):
        kept = [line["time"] for line in start.lines if not line["lost"]]
        until = start.ended if start is run.starts[-1] else max(kept)
        drawing.rectangle(x(start.began), x(until), "kept")
        drawing.rectangle(x(until), x(start.ended), "again")
        drawing.text(x(start.began) + 8, BAR[0] + 17, f"start {number}", "on")
    for minute in range(int((end - begin) / 60) + 1):
        drawing.text(x(begin + 60 * minute), BAR[1] + 18, f"{minute}", "soft", "middle")
    words = "minutes; blue: work that counts, grey: repeated later, gap: back in the queue"
    drawing.text((LEFT + RIGHT) / 2, BAR[1] + 36, words, "soft", "middle")


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(drawn(), encoding="utf-8")


if __name__ == "__main__":
    main()
