"""The starts that are killed, what must be left of them, and what a next start makes of it."""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny
from kernel_calls import RECORDING, Call, Ending, Starts, changes_below, hit

from utils.checkpoints.discovery import LEAST_KEPT, checkpoint_problems, numbered_checkpoints
from utils.checkpoints.files import list_files

STEPS, SAVE_STEPS, KEPT = 6, 2, 2
# Of a checkpoint: they hold times, random names and the path of the run.
INEXACT = {
    *("trainer_state.json", "manifest.json", ".metadata", "training_args.bin"),
    *("config.yaml", "provenance.json"),
}
ATTEMPTS = 8
FAILED = "the next start failed:"


@dataclass
class Scene:
    """A start to be disturbed: from `prepared` (None: from nothing) to the end of `whole`.

    `argv` makes the command line of a run directory. `first_only`: only the calls before the first
    checkpoint is begun. Of two ranks one is disturbed. `threads`: the calls of all threads count.
    """

    starts: Starts
    program: str
    argv: Callable[[Path], list[str]]
    prepared: Path | None
    whole: Path
    options: dict[str, Any] = field(default_factory=dict)
    first_only: bool = False
    rank: int | None = None  # of two, the one that is disturbed; None: there is one
    config: str = "multi_gpu"  # of ranks
    steps: int = STEPS
    kept: int = KEPT
    makes_room: bool = False
    threads: bool = False
    recorded: dict[str, int] = field(default_factory=dict)  # the calls' numbers

    def fresh(self, directory: Path) -> Path:
        """The run directory as the start finds it."""
        shutil.rmtree(directory, ignore_errors=True)
        if self.prepared is not None:
            shutil.copytree(self.prepared, directory)
        return directory

    def start(self, directory: Path, strace: Iterable[str] | None = None) -> Ending:
        flags = None if strace is None else [*(["-f"] if self.threads else []), *strace]
        argv = self.argv(directory)
        if self.rank is None:
            return self.starts.run(self.program, argv, strace=flags, **self.options)
        traced = {self.rank: flags} if flags else {}
        with self.starts.ranks(argv, traced, self.config, **self.options) as ranks:
            pass
        disturbed = ranks[self.rank].ending
        if not flags:  # the log is rank 0's
            return Ending(max(rank.ending.exit_code for rank in ranks), ranks[0].ending.output)
        return disturbed

    def record(self, directory: Path) -> list[Call]:
        """All calls of the undisturbed start that change something in the run directory."""
        ending = self.start(self.fresh(directory), RECORDING)
        assert ending.exit_code == 0, ending.output
        calls = changes_below(directory, ending.trace)
        self.recorded = {str(call): call.number for call in calls}
        if self.first_only:
            first = next(
                place for place, call in enumerate(calls) if call.file.startswith("checkpoint-")
            )
            calls = calls[: first + 1]
        return calls

    def disturbed_at(self, call: Call, directory: Path, what: str) -> Ending:
        """KILL the start where it enters a call, or let that fail; its directory is as it left it.

        One whose file has no name beforehand is counted among all of its kind, and a start may
        open a file more or less before it.
        """
        aim = call
        for _ in range(ATTEMPTS):
            ending = self.start(self.fresh(directory), aim.injecting(directory, what))
            if hit(call, directory, ending):
                return ending
            # How far what came before it was from where it was recorded.
            shifts = [
                one.number - self.recorded[str(one)]
                for one in changes_below(directory, ending.trace)
                if str(one) in self.recorded
            ]
            aim = dataclasses.replace(call, number=call.number + (shifts[-1] if shifts else 1))
        raise AssertionError(f"{call} was missed: {ending}")

    def started_again(self, directory: Path, saved: Sequence[int] = ()) -> list[str]:
        """Start the same command again, which resumes from the last of `saved`; what was wrong."""
        again = self.start(directory)
        if again.exit_code != 0:
            return [f"{FAILED} {again.exit_code} {again.output[-3000:]}"]
        found = [f"{name} differs" for name in self.differences(directory)]
        if saved and f"resuming from {directory}/checkpoint-{saved[-1]}" not in again.output:
            found.append(f"it did not resume from {saved[-1]}: {again.output[-2000:]}")
        return found

    def differences(self, directory: Path) -> list[str]:
        """In which files the end of a run differs from the undisturbed one's."""
        last = f"checkpoint-{self.steps}"
        files = exact_files(directory / last) | exact_files(self.whole / last)
        names = [*(f"{last}/{name}" for name in sorted(files)), "final/model.safetensors"]
        found = [name for name in names if digest(directory / name) != digest(self.whole / name)]
        if self.program == "stoker" and tiny.losses(directory) != tiny.losses(self.whole):
            found.append("metrics.jsonl")
        return found

    def losses_of_checkpoints(self, directory: Path, ended: bool = False) -> list[str]:
        """Which committed checkpoints are gone, or not as they were, but by rotation.

        With `ended` the start ran to its end: what begins has all that a whole run leaves.
        """
        before = committed(self.prepared) if self.prepared else []
        left = committed(directory)
        first = (before[-1] if before else 0) + SAVE_STEPS
        saves = range(first, self.steps + 1, SAVE_STEPS)
        lawful = lawful_states(before, saves, self.kept, self.makes_room)
        if self.first_only:
            lawful = lawful[-1:] if ended else lawful[:1]
        wrong = [] if left in lawful else [f"of {before} there are {left}"]
        for step in set(before) & set(left):
            name = f"checkpoint-{step}/manifest.json"
            if digest(directory / name) != digest(self.prepared / name):
                wrong.append(f"{name} is another")
        return wrong


def lawful_states(
    before: Iterable[int], saves: Iterable[int], kept: int, makes_room: bool
) -> list[list[int]]:
    """Which committed checkpoints may be there at any moment, each a list of steps.

    Every save adds one, and after it the oldest goes where there are more than `kept`; where there
    is no room for it that one goes before, but two stay.
    """
    states = [list(before)]

    def delete_beyond(most: int) -> None:
        while len(states[-1]) > most:
            states.append(states[-1][1:])

    for step in saves:
        if makes_room:
            delete_beyond(max(kept - 1, LEAST_KEPT))
        states.append([*states[-1], step])
        delete_beyond(kept)
    return states


def exact_files(checkpoint: Path) -> set[str]:
    """The files of a checkpoint that each run of the same settings writes alike, bit for bit."""
    return {name for name in list_files(checkpoint) if Path(name).name not in INEXACT}


def digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def committed(directory: Path) -> list[int]:
    """The steps whose checkpoints are committed and whole, by reading all of them."""
    try:
        provenance = json.loads((directory / "provenance.json").read_text())
    except FileNotFoundError:
        return []
    return sorted(
        step
        for step, path in numbered_checkpoints(directory)
        if not checkpoint_problems(path, step, provenance["run_id"])
    )


def sample(calls: list[Call], count: int) -> list[Call]:
    """Calls spread over all of them, the first and the last among them; one is from the middle."""
    if count == 1:
        return [calls[len(calls) // 2]]
    if len(calls) <= count:
        return calls
    return [calls[round(place * (len(calls) - 1) / (count - 1))] for place in range(count)]
