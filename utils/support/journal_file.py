"""The file metrics.jsonl: how a line is written, and how the file is read, without torch.

The file is only ever appended to, also when a run resumes from a checkpoint that is older than its
last lines: each start first appends `{"event": "started"|"resumed", "step": N}`, which says that
lines of steps after N from above it were undone. `read_journal` applies that, so its series has no
duplicates and nothing is lost.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from utils.support.redaction import redacted

FILE_NAME = "metrics.jsonl"
NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # JSON has no such numbers: they are written as text
STARTS = ("started", "resumed")


def strict_json(value: Any, indent: int | None = None) -> str:
    """Return what a log may hold as JSON: numbers of numpy and torch too, NOT_FINITE as text.

    Known secrets are masked.
    """

    def plain(other: Any) -> Any:
        return other.item() if hasattr(other, "item") else str(other)

    numbers = json.loads(json.dumps(value, default=plain), parse_constant=str)
    return json.dumps(redacted(numbers), indent=indent, allow_nan=False)


def read_journal(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a journal as one series: undone lines, broken lines and repeated events left out.

    Non-finite figures are floats again. Of several events of one kind, split and step the last
    counts (an interrupted evaluation is done again, all of its splits).
    """
    return as_series(read_lines(Path(path)))


def as_series(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what `read_journal` returns, of lines or of the last of them."""
    events: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in lines:
        event, step = line["event"], line["step"]
        if event in STARTS:
            done = step if event == "resumed" else -1
            events = {key: old for key, old in events.items() if old["step"] <= done}
        else:
            events[event, line.get("split"), step] = line
    return list(events.values())


def read_lines(path: Path, first: int = 0, count: int = -1) -> list[dict[str, Any]]:
    """Return the whole lines in `count` bytes from `first` on (below 0: from the end); OSError.

    Left out are lines that are cut off, at either end or where a process died.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        begin = max(0, size + first if first < 0 else first)
        file.seek(begin)
        texts = file.read(count).split(b"\n")
    lines = []
    for text in texts:
        try:
            line = json.loads(text)
            line["event"], line["step"] + 0  # that it has both
            line |= {key: float(value) for key, value in line.items() if value in NOT_FINITE}
            lines.append(line)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return lines


def duration(seconds: float) -> str:
    """Format a duration in its two largest units: 41s, 4m31s, 3h05m, 2d04h.

    >>> duration(271), duration(11_100), duration(187_200)
    ('4m31s', '3h05m', '2d04h')
    """
    whole = round(seconds)
    for size, below, units in ((86400, 3600, "dh"), (3600, 60, "hm"), (60, 1, "ms")):
        if whole >= size:
            return f"{whole // size}{units[0]}{whole % size // below:02d}{units[1]}"
    return f"{whole}s"


def counted(number: float | None) -> str:
    """Format a count in the unit that people say.

    >>> counted(950), counted(1_234_000_000), counted(None)
    ('950', '1.23 B', '-')
    """
    if number is None:
        return "-"
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,.0f}"
