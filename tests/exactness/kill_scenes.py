"""Starts to be killed, and checks of what they leave behind and of the next start."""

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
# Files of a checkpoint that contain times, random names or the path of the run.
INEXACT = {
    *("trainer_state.json", "manifest.json", ".metadata", "training_args.bin"),
    *("config.yaml", "provenance.json"),
}
ATTEMPTS = 24
FAILED = "the next start failed:"


@dataclass
class Scene:
    """A start to be disturbed. It begins in a copy of `prepared` and should end like `whole`.

    `prepared` None means an empty directory. `argv` makes the command line for a run directory.
    `first_only`: only use calls before the first checkpoint. With two ranks one rank is disturbed.
    `threads`: use the calls of all threads.
    """

    starts: Starts
    program: str
    argv: Callable[[Path], list[str]]
    prepared: Path | None
    whole: Path
    options: dict[str, Any] = field(default_factory=dict)
    first_only: bool = False
    rank: int | None = None  # the disturbed rank of two; None if there is only one rank
    config: str = "multi_gpu"  # accelerate config of two ranks
    steps: int = STEPS
    kept: int = KEPT
    makes_room: bool = False
    threads: bool = False
    recorded: dict[str, int] = field(default_factory=dict)  # the calls' numbers

    def fresh(self, directory: Path) -> Path:
        """Make the run directory in which the start begins."""
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
        if not flags:  # the log is that of rank 0
            return Ending(max(rank.ending.exit_code for rank in ranks), ranks[0].ending.output)
        return disturbed

    def record(self, directory: Path) -> list[Call]:
        """Return all calls of the undisturbed start that change the run directory."""
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
        """KILL the start at a call, or make the call fail, and keep the start's directory.

        If the file has a random name, the call is found by counting all calls of this kind. A start
        may open one file more or less before this call, so several numbers are tried.
        """
        aim = call
        for _ in range(ATTEMPTS):
            ending = self.start(self.fresh(directory), aim.injecting(directory, what))
            if hit(call, directory, ending):
                return ending
            # How many more calls than the recording this start made before this call.
            shifts = [
                one.number - self.recorded[str(one)]
                for one in changes_below(directory, ending.trace)
                if str(one) in self.recorded
            ]
            aim = dataclasses.replace(call, number=call.number + (shifts[-1] if shifts else 1))
        raise AssertionError(f"{call} was missed: {ending}")

    def started_again(self, directory: Path, saved: Sequence[int] = ()) -> list[str]:
        """Start the same command again; return faults. It must resume at the last of `saved`."""
        again = self.start(directory)
        if again.exit_code != 0:
            return [f"{FAILED} {again.exit_code} {again.output[-3000:]}"]
        found = [f"{name} differs" for name in self.differences(directory)]
        if saved and f"resuming from {directory}/checkpoint-{saved[-1]}" not in again.output:
            found.append(f"it did not resume from {saved[-1]}: {again.output[-2000:]}")
        return found

    def differences(self, directory: Path) -> list[str]:
        """Return the files in which the end of a run differs from that of the undisturbed run."""
        last = f"checkpoint-{self.steps}"
        files = exact_files(directory / last) | exact_files(self.whole / last)
        names = [*(f"{last}/{name}" for name in sorted(files)), "final/model.safetensors"]
        found = [name for name in names if digest(directory / name) != digest(self.whole / name)]
        if self.program == "stoker" and tiny.losses(directory) != tiny.losses(self.whole):
            found.append("metrics.jsonl")
        return found

    def losses_of_checkpoints(self, directory: Path, ended: bool = False) -> list[str]:
        """Return the committed checkpoints that are missing or changed, except by rotation.

        `ended` means that the start ran to its end. It must then have left all files of a whole
        run.
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
    """Return the sets of committed checkpoints that may exist at some moment, as lists of steps.

    Every save adds a checkpoint. Then the oldest is deleted if there are more than `kept`. If
    there is no room for a save, the oldest is deleted before the save, but two always stay.
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
    """Return the files of a checkpoint that are bit-equal in all runs with the same settings."""
    return {name for name in list_files(checkpoint) if Path(name).name not in INEXACT}


def digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def committed(directory: Path) -> list[int]:
    """Return the steps of the committed checkpoints that are intact. Reads all their files."""
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
    """Return `count` calls spread over the list, with both ends, or the middle one for 1."""
    if count == 1:
        return [calls[len(calls) // 2]]
    if len(calls) <= count:
        return calls
    return [calls[round(place * (len(calls) - 1) / (count - 1))] for place in range(count)]
