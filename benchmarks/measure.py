"""Measures a cell under a command's settings and writes its result."""

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.cells.kinds import (
    Cell,
    ComponentCell,
    DurationCell,
    ProbeCell,
    SweepCell,
)
from benchmarks.comparisons import component, duration, sweep, training
from benchmarks.comparisons.turns import run_process
from benchmarks.figures.table import table
from benchmarks.hardware.circumstances import circumstances, hardware
from benchmarks.hardware.efficiency import Device, known_device
from benchmarks.progress import Progress, say

# Two results with equal values of these keys are from the same machine and code.
SAME = ("commit", "hardware", "python", "versions")


@dataclasses.dataclass(frozen=True)
class Session:
    """The settings of the command line for all cells. `deadline`: one of time.monotonic(), or None.

    `left_out` names baselines that do not take part; `sizes` are those of cells that grow.
    """

    group: str
    results: Path
    left_out: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    repeats: int = 5
    resume: bool = False
    toy: bool = False
    deadline: float | None = None

    def device(self) -> Device:
        """Return what is known of the device so far."""
        return known_device(hardware(), self._path("probes"))

    def measure(self, cell: Cell) -> bool:
        """Measure a cell and write its JSON; return whether its losses agree; a toy's need not.

        Raises BaselineFailedError when Stoker itself fails, OutOfTimeError between two rounds.
        """
        found = circumstances(self._made_by(cell)) | ({"toy": True} if self.toy else {})
        key = {name: found[name] for name in SAME} | {
            "cell": dataclasses.asdict(cell),
            "repeats": self.repeats,
            "left_out": self.left_out,
        }
        path = self._path(cell.name)
        done = json.loads(path.read_text()) if self.resume and path.exists() else {}
        if done.get("key") == _plain(key):
            say("is done already")
            return self.toy or losses_agree(done)
        rounds = path.parent / "unfinished" / path.name
        if not self.resume:
            rounds.unlink(missing_ok=True)
        kept = Progress(rounds, key, self.deadline)
        result = found | self._hold(cell, kept) | {"key": key}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n")
        kept.forget()
        say(table(result))
        return self.toy or losses_agree(result)

    def _hold(self, cell: Cell, kept: Progress) -> dict[str, Any]:
        if isinstance(cell, ProbeCell):
            kept.begin_round()
            return probe(cell)
        if isinstance(cell, DurationCell):
            kept.begin_round()
            return duration.hold(cell, self.repeats)
        if isinstance(cell, ComponentCell):
            return component.hold(cell, self.repeats, kept, self.left_out)
        if isinstance(cell, SweepCell):
            return sweep.hold(cell, self.device(), kept, self.left_out)
        return training.hold(cell, self.repeats, self.device(), kept, self.left_out)

    def _path(self, name: str) -> Path:
        return self.results / self.group / f"{name}.json"

    def _made_by(self, cell: Cell) -> str:
        command = f"python -m benchmarks {self.group} --cells {cell.name}"
        if not isinstance(cell, ProbeCell | SweepCell):  # taken once
            command += f" --repeats {self.repeats}"
        if self.sizes and isinstance(cell, ComponentCell | SweepCell):
            command += f" --sizes {','.join(map(str, self.sizes))}"
        if self.left_out:
            command += f" --without '{';'.join(self.left_out)}'"
        return command + (" --toy" if self.toy else "")


def losses_agree(result: Mapping[str, Any]) -> bool:
    """Return whether a cell's baselines trained the same; True where nobody trains."""
    return bool(result.get("parity", {"holds": True})["holds"])


def probe(cell: ProbeCell) -> dict[str, Any]:
    """Return what the device reaches at best, measured in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="stoker-benchmark-") as directory:
        outcome = Path(directory) / "outcome.json"
        arguments = [str(outcome), *(["--toy"] if cell.toy else [])]
        run_process("benchmarks.hardware.probes", arguments, Path(directory))
        probes = json.loads(outcome.read_text())
    return {"title": "Peak speeds measured on the device", "probes": probes, "not_run": {}}


def _plain(value: Any) -> Any:
    """Return it as JSON gives it back: lists for tuples."""
    return json.loads(json.dumps(value))
