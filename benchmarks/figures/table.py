"""The results of a cell as a Markdown table."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.comparisons.ratios import median_interval


def table(result: Mapping[str, Any]) -> str:
    """Write one line a baseline, or a baseline and size: speed, and Stoker's gain."""
    if "probes" in result:
        rows = _probe_rows(result["probes"])
    elif "variants" in result:
        rows = _variant_rows(result)
    elif "stopped" in result:
        rows = _sweep_rows(result)
    else:
        rows = _component_rows(result) if "sizes" in result else _training_rows(result)
    width = max(len(rows[0]), 2)
    rows += [[name, f"not run: {why}"] for name, why in result["not_run"].items()]
    lines = ["| " + " | ".join(row + [""] * (width - len(row))) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * width)
    for name, by in result.get("costs", {}).items():
        parts = [
            f"by {kind} {_signed(cost['median'])} % "
            f"({_signed(cost['low'])} to {_signed(cost['high'])})"
            for kind, cost in by.items()
        ]
        lines.append(f"\nStoker's step time relative to {name}: {', '.join(parts)}.")
    for name, one in result.get("compared", {}).items():
        if "callbacks_share_of_main_thread" in (notes := one.get("notes", {})):
            share, each = notes["callbacks_share_of_main_thread"], notes["callbacks_us_a_step"]
            listed = ", ".join(f"{callback} {us}" for callback, us in each.items())
            lines.append(
                f"\nThe callbacks of {name} take {share:.2%} of a step. Microseconds: {listed}."
            )
    return f"**{title_and_size(result)[0]}**\n\n" + "\n".join(lines) + "\n"


def title_and_size(result: Mapping[str, Any]) -> tuple[str, str]:
    """Return the title of a result and what its sizes measure: "Packing", "number of documents"."""
    title, _, size = result["title"].partition(", by ")
    return title, size or "size"


def _training_rows(result: Mapping[str, Any]) -> list[list[str]]:
    worth = any(one.get("mfu") is not None for one in result["compared"].values())
    rows = [["", "tokens/s", "Stoker's speed / this speed", "peak memory", "time to first step"]]
    if worth:
        rows[0] += ["MFU", "share of roofline"]
    for name, measured in result["compared"].items():
        row = [
            name,
            speed_text(measured["tokens_per_second"], measured["repeats"]),
            ratio_text(result["ratios"].get(name)),
            f"{measured['peak_memory_bytes'] / 2**30:.2f} GiB",
            f"{measured['first_step_s']:.1f} s",
        ]
        if worth:
            row += [share_text(measured["mfu"]), share_text(measured["roofline_share"])]
        rows.append(row)
    return rows


def _component_rows(result: Mapping[str, Any]) -> list[list[str]]:
    sizes = [str(size) for size in result["sizes"]]
    waits = result["unit"] == "s"
    heading = "seconds" if waits else f"{result['unit']}/s"
    rows = [[f"{heading}, by {title_and_size(result)[1]}", *(f"{int(size):,}" for size in sizes)]]
    for name, measured in result["compared"].items():
        rows.append([name, *(component_figure(measured, size) for size in sizes)])
    for name, ratios in result["ratios"].items():
        title = f"{name} / Stoker" if waits else f"Stoker / {name}"
        rows.append([title, *(ratio_text(ratios.get(size)) for size in sizes)])
    return rows


def _variant_rows(result: Mapping[str, Any]) -> list[list[str]]:
    parity = result["parity"]
    last = f"loss of the last {parity['last_steps']} steps"
    rows = [["", "bytes per parameter", last, "minus float32", "mean difference at each step"]]
    for name, measured in result["variants"].items():
        rows.append(
            [
                name,
                f"{measured['bytes_a_parameter']:.0f}",
                f"{measured['final_loss']:.4f}",
                f"{parity['differences'][name]:+.4f}",
                f"{measured['mean_difference']:.4f}",
            ]
        )
    return rows


def _sweep_rows(result: Mapping[str, Any]) -> list[list[str]]:
    rows = _component_rows(result)
    rows[0].append("stopped by")
    for row in rows[1:]:
        row.append(result["stopped"].get(row[0], ""))
    return rows


def _probe_rows(probes: Mapping[str, Any]) -> list[list[str]]:
    matmul, copy = probes["matmul"], probes["bandwidth"]
    shape = " x ".join(f"{size:,}" for size in matmul["shape"])
    return [
        ["", "reached speed"],
        [
            f"bf16 matrix products, best shape ({shape})",
            f"{_tera(matmul['flops_per_second'])}FLOP/s",
        ],
        ["copy, bytes read and written", f"{_tera(copy['bytes_per_second'])}B/s"],
    ]


def _signed(value: float) -> str:
    return f"{round(value, 2) + 0.0:+.2f}"  # -0.00 becomes +0.00


def _tera(value: float) -> str:
    return f"{value / 1e12:,.3g} T"


def speed_text(median: float, repeats: Sequence[float]) -> str:
    """Write a median and its interval, where repeats leave one."""
    if len(repeats) < 2:
        return f"{median:,.0f}"
    low, high = median_interval(repeats)
    return f"{median:,.0f} ({low:,.0f}-{high:,.0f})"


def share_text(share: float | None) -> str:
    """Write a share in percent; nothing for None."""
    return "" if share is None else f"{100 * share:.1f} %"


def component_figure(measured: Mapping[str, Any], size: str) -> str:
    """Write what was measured at a size, a speed or a wait; nothing where nothing was."""
    if "seconds" in measured:
        return f"{measured['seconds'][size]:.2f}" if size in measured["seconds"] else ""
    if size not in measured["per_second"]:
        return ""
    speed = measured["per_second"][size]
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}"


def ratio_text(ratio: Mapping[str, float] | None) -> str:
    """Write a ratio and its interval; nothing for None."""
    if ratio is None:
        return ""
    if ratio["low"] == ratio["high"]:  # of a single repeat
        return f"{ratio['median']:.2f}"
    return f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"
