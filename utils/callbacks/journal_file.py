"""Reads the journal of a run, without any library: a table of many runs is made of it."""

import json
import os
from pathlib import Path
from typing import Any

FILE_NAME = "metrics.jsonl"
# JSON has no such numbers; as text they stay visible and turn back with float().
NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def read_journal(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a journal as one series: undone lines, broken lines and repeated events left out.

    Non-finite figures are floats again. Of several events of one kind, split and step the last
    counts (an evaluation that was broken off is done again, all of its splits).
    """
    events: dict[tuple[Any, ...], dict[str, Any]] = {}
    for text in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        line = _parse_line(text)
        if line is None:
            continue
        if line["event"] in ("started", "resumed"):
            kept = line["step"] if line["event"] == "resumed" else -1
            events = {key: old for key, old in events.items() if old["step"] <= kept}
            continue
        events[line["event"], line.get("split"), line["step"]] = line
    return list(events.values())


def _parse_line(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or "event" not in line or "step" not in line:
        return None
    numbers = {written: float(number) for number, written in NOT_FINITE.items()}
    return {
        key: numbers.get(value, value) if isinstance(value, str) else value
        for key, value in line.items()
    }
