"""Rounds of a cell that are done, kept between commands, and the time that is left for more."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FIRST_ROUND_S = 120.0  # taken for granted while none is known


def say(text: str) -> None:
    """Write a line at once: a benchmark is watched."""
    print(text, flush=True)  # noqa: T201 - its output


class OutOfTimeError(Exception):
    """The next round would not end in time; what is done is kept."""


class Progress:
    """Keeps the rounds of one cell in a file until all are done.

    `key` says of what they are; rounds of anything else are thrown away. `deadline` is one of
    time.monotonic(), or None.
    """

    def __init__(self, path: Path, key: Mapping[str, Any], deadline: float | None = None):
        self.path = path
        self.key = json.loads(json.dumps(key))
        self.deadline = deadline
        self.longest_s = FIRST_ROUND_S
        self.begin = 0.0

    def load(self) -> dict[str, Any]:
        """Return the rounds that an earlier command left: {"rounds", "outcomes", "not_run"}."""
        if self.path.exists():
            kept = json.loads(self.path.read_text())
            if kept["key"] == self.key:
                self.longest_s = kept["longest_s"]
                say(f"resumes after round {kept['rounds']}")
                return kept
        return {"rounds": 0, "outcomes": {}, "not_run": {}}

    def begin_round(self) -> None:
        """Raise OutOfTimeError where a round as long as the longest so far would not fit."""
        self.begin = time.monotonic()
        if self.deadline is not None and self.begin + self.longest_s > self.deadline:
            raise OutOfTimeError

    def end_round(
        self, rounds: int, outcomes: Mapping[str, Any], not_run: Mapping[str, str]
    ) -> None:
        """Keep what is done so far."""
        took_s = time.monotonic() - self.begin
        self.longest_s = took_s if rounds == 1 else max(self.longest_s, took_s)
        kept = {
            "key": self.key,
            "longest_s": self.longest_s,
            "rounds": rounds,
            "outcomes": outcomes,
            "not_run": not_run,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(kept))

    def forget(self) -> None:
        """Remove what was kept: the cell is done."""
        self.path.unlink(missing_ok=True)
