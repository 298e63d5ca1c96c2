"""The charts of the report, drawn by page.js or for --png. A series has up to about 1600 points."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from utils.config.errors import ConfigurationError
from utils.host.spikes import Spike
from utils.observe.findings import (
    DEVICE,
    PHASE_NAMES,
    Line,
    Point,
    column,
    memory_table,
    slowest,
    thinned,
)
from utils.observe.history import History

POINTS = 1600  # per series: two for each of 800 pixels. A comparison of runs has fewer.
SMOOTH_FROM = 200  # logs; the loss of a shorter run is not smoothed
SLOWEST_RANKS = 3  # slowest ranks with their own series
FULLEST = 6  # ranks with the most memory, each with its own series
DEVICE_MEMORY, HOST_MEMORY = "Device memory", "Host memory"
Chart = dict[str, Any]

# Charts of training logs: title, label of the y axis, note, labels of the series by key.
_TRAIN = (
    ("Learning rate", "learning rate", "", {"learning_rate": "learning rate"}),
    ("Gradient norm", "norm", "before clipping", {"grad_norm": "gradient norm"}),
    ("Throughput", "tokens/s", "", {"tokens_per_s": "all devices"}),
    ("Model FLOPs utilization", "share of the peak", "", {"mfu": "MFU"}),
    ("GPU utilization", "share of the time", "mean of all GPUs", {"gpu_utilization": "busy"}),
    ("GPU power", "W", "mean of all GPUs", {"gpu_power_w": "power"}),
    ("Time of a step", "s", "", {"step_time_s": "step", "data_wait_s": "waiting for data"}),
    (DEVICE_MEMORY, "GiB", "of the fullest rank", {
        "memory_peak_gib": "peak", "memory_reserved_gib": "reserved",
        "memory_allocated_gib": "allocated", "memory_free_gib": "free"}),
    (HOST_MEMORY, "GiB", "of the largest process", {
        "host_rss_gib": "resident", "host_peak_rss_gib": "peak"}),
    ("Load-balancing loss", "loss", "before its coefficient", {"aux_loss": "of experts"}),
)  # fmt: skip
_LOG_SCALE = ("Gradient norm", "Perplexity")  # charts with a log scale when the page opens
# matplotlib's settings. Text in an SVG stays text, and the same charts give the same file.
_LOST = "#c4c9d1"
_LOOK: Any = {
    "axes.prop_cycle": "cycler('color', ['#2f5fd0', '#d9480f', '#2b8a3e', '#9c36b5', '#0b7285', "
    "'#b08900', '#c2255c', '#5f3dc4', '#66740e', '#495057'])",
    "svg.fonttype": "none", "svg.hashsalt": "stoker", "axes.grid": True, "grid.color": "0.92",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "0.6",
    "xtick.color": "0.35", "ytick.color": "0.35",
}  # fmt: skip
_COMPARED = ("Learning rate", "Gradient norm", "Throughput", DEVICE_MEMORY)
# Keys without a chart. The page shows them in another place, or they are part of another number.
_NO_CHART = {
    "event", "step", "time", "hours", "lost", "at", "epoch", "loss", "tokens_seen",
    "tokens_per_s_per_device", "first_step_time_s", "total_flos", "max_steps", "graphs_compiled",
    "memory_headroom_gib", "memory_total_gib", "slowest_rank", "slowest_host", "slowest_cost",
    "recovery_s", "energy_kwh",
}  # fmt: skip


class Curves:
    """A run's logged values as series for charts. Each series keeps its extreme values.

    points: the approximate number of points in a series. colour: the index of the run's colour if
    several runs are compared.
    """

    def __init__(self, run: History, points: int = POINTS, colour: int | None = None):
        self.run, self.points, self.colour = run, points, colour
        self.trained: Sequence[Line] = run.trained
        self.evaluated: dict[str | None, list[Line]] = {}  # by split
        for line in run.lines:
            if line["event"] == "eval":
                self.evaluated.setdefault(line.get("split"), []).append(line)
        seen = np.stack([column(run.trained, key) for key in ("step", "tokens_seen")])
        self.seen = np.insert(seen[:, ~np.isnan(seen[1])], 0, 0.0, axis=1)

    def tokens(self, steps: Sequence[float]) -> list[float | None]:
        """Return the number of tokens that the run had seen at each of `steps`.

        Numbers between two logs are interpolated. Without any logged tokens, all numbers are None.
        """
        if self.seen.shape[1] == 1:
            return [None] * len(steps)
        return [_rounded(at) for at in np.interp(steps, *self.seen).tolist()]

    def series(
        self, label: str, key: str, lines: Sequence[Line] | None = None,
        style: str = "line", note: str = "",
    ) -> Chart | None:  # fmt: skip
        """Return the values of `key` in log lines as a series; None if no value is finite.

        lines: the log lines. None means all training logs. A line without the key is left out. A
        value that is not finite leaves a gap in the curve. The x axis can be steps, tokens or
        hours. label: the name in the legend. note: a text for the legend. style: how the series is
        drawn (line, faint, dots, points, marks, lost).
        """
        lines = self.trained if lines is None else lines
        values = column(lines, key)
        if not np.isfinite(values).any():
            return None
        absent = [i for i in np.flatnonzero(np.isnan(values)).tolist() if lines[i].get(key) is None]
        places = np.delete(np.arange(len(values)), absent)
        values = np.where(np.isfinite(values), values, math.nan)[places]
        indices = thinned(values, self.points)
        chosen = [lines[place] for place in places[indices].tolist()]
        steps = [line["step"] for line in chosen]
        return {
            "label": label, "style": style, "note": note, "colour": self.colour,
            "step": steps,
            "tokens": self.tokens(steps),
            "hours": [_rounded(line["hours"]) for line in chosen],
            "y": [_rounded(value) for value in values[indices].tolist()],
        }  # fmt: skip

    def evaluations(self, split: str | None, label: str, what: str = "loss") -> Chart | None:
        """Return a series of `what` (loss or accuracy) in a split's evaluations; None if empty."""
        key = f"eval_{split}_{what}" if split else f"eval_{what}"
        return self.series(label, key, self.evaluated.get(split, []), "dots")

    def perplexities(self, smooth: Sequence[Line]) -> list[Chart | None]:
        """Return series of exp(loss): the first for training, then one for each split.

        smooth: training log lines with smoothed losses
        """
        found = [self.series("train", "perplexity", _with_perplexity(smooth, "loss"))]
        for split, lines in self.evaluated.items():
            key = f"eval_{split}_loss" if split else "eval_loss"
            values = _with_perplexity(lines, key)
            found.append(self.series(f"eval {split or ''}", "perplexity", values, "dots"))
        return found

    def smoothed(self, key: str = "loss") -> tuple[list[Line], int]:
        """Return (lines with the running mean of `key`, number of training logs in each mean)."""
        count = max(10, len(self.trained) // 100) if len(self.trained) > SMOOTH_FROM else 1
        values = column(self.trained, key)
        places = np.flatnonzero(np.isfinite(values))
        sums = np.cumsum(np.insert(values[places], 0, 0.0))
        means = (sums[count:] - sums[:-count]) / count
        chosen = thinned(means, self.points)
        kept = (self.trained[index] for index in places[count - 1 :][chosen].tolist())
        return [
            {"step": line["step"], "hours": line["hours"], key: mean}
            for line, mean in zip(kept, means[chosen].tolist(), strict=True)
        ], count

    def repeated_lines(self) -> list[Line]:
        """Return the training log lines whose steps a later start of the script repeated.

        After the lines of each start comes a line with a NaN loss, which separates the curves.
        """
        found: list[Line] = []
        for start in self.run.starts:
            lines = [line for line in start.lines if line["lost"] and line["event"] == "train"]
            found += [*lines, *({**line, "loss": math.nan} for line in lines[-1:])]
        return found


def charts_of(
    run: History,
    found: Sequence[Spike],
    memory: Sequence[Point] = (),
    waited: Sequence[Any] = (),
) -> list[Chart]:
    """Return the charts of the report on a run.

    found: spikes from `spikes_in`. memory: from `memory_by_rank`. waited: from `stragglers`.
    """
    curves = Curves(run)
    trained, (smooth, count) = curves.trained, curves.smoothed()
    steps = {one.step for one in found}
    spiked = [line for line in trained if line["step"] in steps] if steps else []
    losses = [
        curves.series("train", "loss", curves.repeated_lines(), "lost", "repeated later"),
        curves.series("train", "loss", style="faint" if count > 1 else "line"),
        curves.series(f"mean of {count} logs", "loss", smooth) if count > 1 else None,
        *(curves.evaluations(split, f"eval {split or ''}") for split in curves.evaluated),
        curves.series("spike", "loss", spiked, "marks"),
    ]
    sampled = [*trained[:: len(trained) // 100 + 1], *trained[-20:]]
    keys = dict.fromkeys(key for line in sampled for key in line)
    shares = {key: key.removeprefix("tokens_share/") for key in keys if "tokens_share/" in key}
    known = {key for *_, names in _TRAIN for key in names} | _NO_CHART
    groups = [
        *_TRAIN,
        ("Mixture", "share of all tokens", "tokens seen so far", shares),
        *((key, "", "", {key: key}) for key in keys if key not in known and "/" not in key),
    ]
    source_losses = [
        curves.series(key.removeprefix("loss/"), key, curves.smoothed(key)[0])
        for key in keys if key.startswith("loss/")
    ]  # fmt: skip
    accuracies = [curves.evaluations(one, one or "eval", "accuracy") for one in curves.evaluated]
    mean = f"mean of {count} logs" if count > 1 else ""
    charts = [
        _chart("Loss", "nats per token", losses, wide=True),
        _chart("Loss of each source", "nats per token", source_losses, mean),
        _chart("Perplexity", "perplexity", curves.perplexities(smooth), mean),
        _chart("Token accuracy", "share of the tokens", accuracies, "in evaluations"),
    ]
    what = "device, peak since the last line" if DEVICE in keys else "host, resident"
    by_rank = _memory_series(curves, memory if memory_table(memory) else ())
    single_rank = len({point["rank"] for point in memory}) == 1
    if not single_rank:
        charts.append(_chart("Memory by rank and phase", "GiB", by_rank, what))
    charts.append(_waiting_chart(curves, [one["name"] for one in waited[:SLOWEST_RANKS]]))
    for title, unit, note, names in groups:
        lines = [curves.series(name, key) for key, name in names.items() if key in keys]
        if single_rank and title == (DEVICE_MEMORY if DEVICE in keys else HOST_MEMORY):
            # This chart already has the rank's memory in training.
            lines += [line for line in by_rank if line and line["style"] == "points"]
        charts.append(_chart(title, unit, lines, note))
    return [chart for chart in charts if chart["lines"]]


def _memory_series(curves: Curves, points: Sequence[Point]) -> list[Chart | None]:
    """Return series of memory: training for each of the fullest ranks, and one per other phase.

    points: from `memory_by_rank`
    """
    by_name: dict[str, list[Line]] = {}
    for point in points:
        train = point["event"] == "train"
        name = point["rank"] if train else PHASE_NAMES[point["event"]]
        by_name.setdefault(name, []).append(point)
    ranks = [name for name, own in by_name.items() if own[0]["event"] == "train"]
    highest = {name: max(point["gib"] for point in by_name[name]) for name in ranks}
    others = sorted(ranks, key=lambda name: -highest[name])[FULLEST:]
    return [
        curves.series(name, "gib", own, "line" if name in ranks else "points")
        for name, own in by_name.items()
        if name not in others
    ]


def _waiting_chart(curves: Curves, names: Sequence[str]) -> Chart:
    """Return the chart of the slowest ranks: a series for each of `names`, one for other ranks."""
    others = "other ranks"
    by_name: dict[str, list[Line]] = {name: [] for name in [*names, others]}
    for line in (line for line in curves.trained if "slowest_rank" in line):
        by_name.get(slowest(line), by_name[others]).append(line)
    lines = [curves.series(name, "slowest_cost", at, "points") for name, at in by_name.items()]
    return _chart("Slowest rank", "share of the step", lines, "how long the others wait")


def charts_of_several(runs: Sequence[History]) -> list[Chart]:
    """Return the charts that compare several runs. Each run has one colour."""
    points = max(100, 2 * POINTS // len(runs))
    each = [(run.name, Curves(run, points, index)) for index, run in enumerate(runs)]
    smooth = [curves.series(name, "loss", curves.smoothed()[0]) for name, curves in each]
    charts = [_chart("Loss", "nats per token", smooth, wide=True)]
    for split in dict.fromkeys(split for _, curves in each for split in curves.evaluated):
        lines = [curves.evaluations(split, name) for name, curves in each]
        charts.append(_chart(f"Evaluation {split or ''}", "nats per token", lines))
    for title, unit, note, names in _TRAIN:
        if title in _COMPARED:
            key = next(iter(names))
            lines = [curves.series(name, key) for name, curves in each]
            charts.append(_chart(title, unit, lines, note))
    return [chart for chart in charts if chart["lines"]]


def starts_on_axes(run: History) -> list[dict[str, Any]]:
    """Return marks for the x axes. A mark shows where training began again after a restart.

    Restarts that never trained have no mark. A mark has label, step, tokens and hours.
    """
    curves, ran, marks = Curves(run), 0.0, []
    for index, start in enumerate(run.starts):
        if index and start.trained is not None:
            step = max(start.done, 0)
            marks.append(
                {"label": f"start {index + 1}", "step": step, "tokens": curves.tokens([step])[0],
                 "hours": ran / 3600}
            )  # fmt: skip
        ran += start.ended - start.began
    return marks


def draw_picture(charts: Sequence[Chart], title: str, path: Path) -> None:
    """Draw the first five charts into a picture file, with steps on the x axis.

    The suffix of `path` selects the format (.png, .svg). Raises ConfigurationError if matplotlib is
    not installed or the file cannot be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            "--png needs matplotlib, which is not installed here: make install"
        ) from error
    heights = [3.4, *[2.6] * (len(charts[1:5]) + 1 >> 1)]
    with rc_context(_LOOK):
        figure = Figure(figsize=(10, sum(heights)), layout="constrained")
        grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
        for index, chart in enumerate(charts[:5]):
            row, side = divmod(index + 1, 2)
            _draw(figure.add_subplot(grid[row, side] if index else grid[0, :]), chart)
        if title:
            figure.suptitle(title, parse_math=False)
        try:
            figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else {})
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"--png {path} cannot be written: {error}") from error


def _draw(axes: Any, chart: Chart) -> None:
    for line in chart["lines"]:
        y = [math.nan if value is None else value for value in line["y"]]
        lost, colour = line["style"] == "lost", f"C{line['colour'] % 10}"
        axes.plot(
            line["step"], y, color=_LOST if lost else colour, linewidth=5 if lost else 1.4,
            label=line["note"] if lost else line["label"], markersize=3,
            marker={"dots": "o", "points": ".", "marks": "v"}.get(line["style"], ""),
            linestyle="none" if line["style"] in ("marks", "points") else "-",
            alpha=0.35 if line["style"] == "faint" else 1,
        )  # fmt: skip
    unit = "\n".join(filter(None, (chart["unit"], chart["note"])))
    axes.set(xlabel="step", ylabel=unit, yscale="log" if chart["log"] else "linear")
    # Without parse_math=False, a dollar sign in a name would begin a formula.
    axes.set_title(chart["title"], loc="left", fontweight="bold", parse_math=False)
    axes.margins(x=0.01)
    if len(chart["lines"]) > 1:
        for name in axes.legend(frameon=False).get_texts():
            name.set_parse_math(False)


def _with_perplexity(lines: Sequence[Line], key: str) -> list[Line]:
    """Return the lines, each with exp(`key`) as `perplexity`; infinity for losses from 690."""
    losses = column(lines, key)
    values = np.exp(np.where(losses >= 690, math.inf, losses)).tolist()
    return [{**line, "perplexity": one} for line, one in zip(lines, values, strict=True)]


def _chart(
    title: str, unit: str, lines: Sequence[Chart | None], note: str = "", *, wide: bool = False
) -> Chart:
    """Return a chart of the series in `lines` that are not None, and set their colours.

    unit: the label of the y axis. note: a remark on the chart. wide: True if the chart is as wide
    as the page.
    """
    kept = [line for line in lines if line is not None]
    own = [line for line in kept if line["colour"] is None]
    fresh = [line for line in own if line["style"] not in ("lost", "marks", "faint")]
    for line in own:
        line["colour"] = fresh.index(line) if line in fresh else 0
    positive = all(value is None or value > 0 for line in kept for value in line["y"])
    return {
        "title": title, "unit": unit, "note": note, "lines": kept, "wide": wide,
        "log": title in _LOG_SCALE and positive, "positive": positive,
    }  # fmt: skip


def _rounded(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
