"""metrics.jsonl, the journal of a run: format and reader, without torch.

Lines are only appended. A run may resume from a checkpoint that is older than the last lines.
Therefore each execution of the script first appends `{"event": "started"|"resumed", "step": N}`.
This line rolls back all earlier lines with step > N, and `read_journal` leaves these lines out.

Storage faults and killed processes damage lines. `read_lines` checks the types of all fields that
Stoker uses. It leaves out damaged lines and counts them.
"""

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from utils.host.redaction import redact, redacted

FILE_NAME = "metrics.jsonl"
NOT_FINITE = "NaN", "Infinity", "-Infinity"  # JSON has no such numbers: they are written as text
STARTS = ("started", "resumed")
LATEST = 253402300799.0  # unix seconds: the end of the year 9999, the last year of Python's dates
BLOCK_BYTES = 2**16
NEAR = 4  # one of this many consecutive lines is usually a training log
LARGEST_STEP = 2**53  # float64 represents all smaller integers exactly
LARGEST_MEASURE = 1e18
LARGEST_FIGURE = 1e39  # just above the largest float32


# The first pattern that matches a field's name gives the field's kind. A measure must be finite. A
# figure may be NaN.
_KINDS = {
    "text": "event|split|slowest_host|reason",
    "step": "step|max_steps",
    "time": "time",
    "rows": "samples|memory_by_rank",
    "measure": r"mfu|epochs?|epochs/.*|slowest_rank|slowest_cost|size_bytes"
    r"|tokens_(seen|share|per_s).*|.*_(s|gib|runtime|per_second)|eval_.*tokens|gpu_utilization|gpu_power_w"
    r"|energy_kwh",
    "figure": r"(train_|aux_|last_)?loss|loss/.*|grad_norm|learning_rate"
    r"|eval_(.*_)?(loss|perplexity|accuracy)",
    "any": ".*",
}


def strict_json(value: Any, indent: int | None = None) -> str:
    """Return `value` as JSON text that every parser can read, with known secrets masked.

    Scalars of numpy and torch become plain numbers. NaN and infinity become text.
    """

    def plain(other: Any) -> Any:
        return other.item() if hasattr(other, "item") else str(other)

    numbers = json.loads(json.dumps(value, default=plain), parse_constant=str)
    return json.dumps(redacted(numbers), indent=indent, allow_nan=False)


def read_journal(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl as dicts, without rolled-back, damaged and repeated lines.

    A resumed run repeats an interrupted evaluation. So if several lines have the same event, split
    and step, only the last of these lines is returned.
    """
    return without_rolled_back(read_lines(Path(path))[0])


def without_rolled_back(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `lines` of metrics.jsonl without rolled-back or repeated lines; see `read_journal`."""
    events: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in lines:
        event, step = line["event"], line["step"]
        if event in STARTS:
            resumed_at = step if event == "resumed" else -1
            events = {key: old for key, old in events.items() if old["step"] <= resumed_at}
        else:
            events[event, line.get("split"), step] = line
    return list(events.values())


def read_lines(
    path: Path, *, first: int | None = None, last: int | None = None, ranks: bool = True
) -> tuple[list[dict[str, Any]], int]:
    """Return (lines of metrics.jsonl as dicts, number of damaged lines). Raises OSError.

    first  read only the lines that end in the first `first` bytes of the file
    last   read only the lines that end in the last `last` bytes of the file
    ranks  False leaves out the long field `memory_by_rank` and adds the line's file offset as `at`
    """
    lines, damaged = [], 0
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        at = 0 if last is None else _line_start(file, max(0, size - last))
        file.seek(at)
        for text in file:
            if first is not None and at + len(text) > first:
                break
            if (line := read_line(text)) is not None:
                if not ranks:
                    line.pop("memory_by_rank", None)
                    line["at"] = at
                lines.append(line)
            elif not text.isspace():
                damaged += 1
            at += len(text)
    return lines, damaged


def sampled_losses(path: Path, count: int) -> list[tuple[int, float]]:
    """Return [(step, loss), ...] of at most `count` training logs, spread over metrics.jsonl.

    Only a few lines at each of `count` offsets are read. Rolled-back logs are left out. Return []
    if the file cannot be read.
    """
    points: list[tuple[int, float]] = []
    with contextlib.suppress(OSError), path.open("rb") as file:
        last = file.seek(0, os.SEEK_END) - 1
        for index in range(count):
            file.seek(_line_start(file, last - last * index // count))
            lines = filter(None, (read_line(file.readline()) for _ in range(NEAR)))
            for line in (line for line in lines if line["event"] == "train" and "loss" in line):
                if not points or line["step"] < points[-1][0]:
                    points.append((line["step"], line["loss"]))
                break
    return points[::-1]


def _line_start(file: BinaryIO, offset: int) -> int:
    """Return the file offset at which the line around `offset` begins."""
    while offset > 0:
        begin = max(0, offset - BLOCK_BYTES)
        file.seek(begin)
        newline = file.read(offset - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        offset = begin
    return 0


def skipped_message(damaged: int) -> str:
    """Return a message on the number of damaged lines in metrics.jsonl.

    >>> skipped_message(1), skipped_message(2000)
    ('metrics.jsonl: 1 damaged line skipped', 'metrics.jsonl: 2,000 damaged lines skipped')
    """
    return f"{FILE_NAME}: {damaged:,} damaged line{'s' * (damaged > 1)} skipped"


def read_line(text: bytes) -> dict[str, Any] | None:
    """Parse a line of metrics.jsonl (see docs/metrics.md); return None for a damaged line.

    A line is damaged if a field has a wrong type. A loss, gradient norm or learning rate may be NaN
    or infinite. A time, size or share that is not finite is left out of the dict, and so are null
    fields. Fields that a user's hook added may have any type.
    """
    try:
        fields = json.loads(text.decode()).items()
        checked = {key: _field_value(key, value) for key, value in fields if value is not None}
        line = {key: value for key, value in checked.items() if value is not None}
        if b"\\u" in text:  # raise an error for half of a surrogate pair: UTF-8 cannot encode it
            json.dumps(line, ensure_ascii=False).encode()
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return line if line.keys() >= {"event", "step", "time"} else None


def _field_value(key: str, value: Any) -> Any:
    """Check the type of a field and return its value. A text such as "NaN" becomes a number.

    Return None for a time, size or share (a "measure" in _KINDS) that is not finite. Raises
    ValueError for a wrong type.
    """
    kind = _kind_of_field(key)
    if isinstance(value, str) and value in NOT_FINITE and kind != "text":
        value = float(value)
    if not _is_valid(kind, value):
        raise ValueError(key)
    if kind == "measure" and not -LARGEST_MEASURE < value < LARGEST_MEASURE:
        return None
    if kind in ("figure", "any") and _is_number(value) and abs(value) > LARGEST_FIGURE:
        return math.copysign(math.inf, value)
    return value


def _is_valid(kind: str, value: Any) -> bool:
    if kind == "text":
        return isinstance(value, str) and value.isprintable()
    if kind == "rows":
        return isinstance(value, list) and all(type(row) is dict for row in value)
    if kind == "step":
        return type(value) is int and 0 <= value <= LARGEST_STEP
    if kind == "time":
        return _is_number(value) and 0 <= value <= LATEST
    return kind == "any" or _is_number(value)


def _is_number(value: Any) -> bool:
    return type(value) is float or type(value) is int  # bool is a subclass of int


@lru_cache(maxsize=1000)
def _kind_of_field(key: str) -> str:
    if not key.isprintable():
        raise ValueError(key)
    return next(kind for kind, keys in _KINDS.items() if re.fullmatch(keys, key))


def duration(seconds: float) -> str:
    """Format a duration in one or two units: 41s, 4m31s, 3h05m, 2d04h.

    >>> duration(271), duration(11_100), duration(187_200)
    ('4m31s', '3h05m', '2d04h')
    """
    whole = round(seconds)
    for size, below, units in ((86400, 3600, "dh"), (3600, 60, "hm"), (60, 1, "ms")):
        if whole >= size:
            return f"{whole // size}{units[0]}{whole % size // below:02d}{units[1]}"
    return f"{whole}s"


def printable(text: str) -> str:
    r"""Return `text` for a terminal: unprintable characters are escaped, known secrets are masked.

    >>> printable("a b"), printable("line\nend \x1b[1m")
    ('a b', 'line\\nend \\x1b[1m')
    """
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode()
        for each in redact(text)
    )


def format_count(number: float | None) -> str:
    """Format a count with the suffix M, B or T (millions, billions, trillions); None as "-".

    >>> format_count(950), format_count(1_234_000_000), format_count(None)
    ('950', '1.23 B', '-')
    """
    if number is None:
        return "-"
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,.0f}"
