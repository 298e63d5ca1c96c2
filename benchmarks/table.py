"""The results of a cell as a Markdown table."""

from collections.abc import Mapping
from typing import Any


def table(result: Mapping[str, Any]) -> str:
    """Write one line a contestant, or a contestant and size: speed, and Stoker's gain."""
    rows = (
        _component_rows(result)
        if "sizes" in result
        else _variant_rows(result)
        if "variants" in result
        else _training_rows(result)
    )
    rows += [[name, f"not run: {why}"] for name, why in result["not_run"].items()]
    width = len(rows[0])
    lines = ["| " + " | ".join(row + [""] * (width - len(row))) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * width)
    return f"**{result['title']}**\n\n" + "\n".join(lines) + "\n"


def _training_rows(result: Mapping[str, Any]) -> list[list[str]]:
    rows = [["", "tokens/s", "Stoker is faster by (times)", "peak memory", "first step after"]]
    for name, measured in result["contestants"].items():
        rows.append(
            [
                name,
                f"{measured['tokens_per_second']:,.0f}",
                ratio_text(result["ratios"].get(name)),
                f"{measured['peak_memory_bytes'] / 2**30:.2f} GiB",
                f"{measured['first_step_s']:.1f} s",
            ]
        )
    return rows


def _component_rows(result: Mapping[str, Any]) -> list[list[str]]:
    sizes = [str(size) for size in result["sizes"]]
    rows = [[f"{result['unit']}/s at size", *(f"{int(size):,}" for size in sizes)]]
    for name, measured in result["contestants"].items():
        speeds = measured["per_second"]
        rows.append([name, *(f"{speeds[size]:,.0f}" if size in speeds else "" for size in sizes)])
    for name, ratios in result["ratios"].items():
        rows.append([f"Stoker / {name}", *(ratio_text(ratios.get(size)) for size in sizes)])
    return rows


def _variant_rows(result: Mapping[str, Any]) -> list[list[str]]:
    parity = result["parity"]
    last = f"loss of the last {parity['last_steps']} steps"
    rows = [["", "bytes a parameter", last, "more by", "differs at each step by"]]
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


def ratio_text(ratio: Mapping[str, float] | None) -> str:
    """Write a ratio and its interval; nothing for None."""
    if ratio is None:
        return ""
    return f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"
