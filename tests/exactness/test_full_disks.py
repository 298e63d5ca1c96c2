"""A run on disks of many sizes ends well, or with exit code 74 and every checkpoint intact.

With more free space the same command resumes and ends like the uninterrupted run, bit for bit. A
run that was killed in a save resumes on every disk that was large enough for the undisturbed run.
"""

import functools
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tiny
from kernel_calls import KILL, Call, Ending, Starts
from kill_scenes import Scene, committed

from utils.checkpoints.discovery import RESERVE_BYTES, numbered_checkpoints, taken_bytes
from utils.checkpoints.files import MANIFEST
from utils.config.errors import ExitCode

pytestmark = pytest.mark.slow

PLENTY_KIB, PLENTY_FILES = 65_536, 10_000
AT_ONCE = 3  # checkpoints that exist at the same time, with a limit of 2 or 3


@dataclass(frozen=True)
class Undisturbed:
    """The run on a large disk, and the space that it uses there."""

    scene: Callable[..., Scene]
    checkpoint_kib: float
    others_kib: float  # size of journal, provenance and the like

    def size_kib(self, checkpoints: float) -> int:
        """Return the size of a disk for this number of checkpoints and all other files."""
        reserve = RESERVE_BYTES / 1024
        return max(16, int(checkpoints * self.checkpoint_kib + self.others_kib + reserve))


@pytest.fixture(scope="module")
def undisturbed(pretraining, tmp_path_factory) -> Undisturbed:
    """Run six steps with a checkpoint after each and a limit of 2."""
    place = tmp_path_factory.mktemp("full_disks")
    size = {"hidden_size": 64, "intermediate_size": 256}
    model = tiny.make_model_config(place / "model.json", **size)
    starts, whole = Starts(place), place / "whole"

    def scene(keep: object = 2, **changes: object) -> Scene:
        argv = functools.partial(
            pretraining, model_config=model, save_steps=1, save_total_limit=keep, **changes
        )
        options = {"one_thread": "async_save" not in changes}
        return Scene(starts, "stoker", argv, None, whole, options)

    ending = scene().start(whole)
    assert ending.exit_code == ExitCode.DONE, ending.output
    checkpoints = [directory for _, directory in numbered_checkpoints(whole)]
    one, final, both = (
        taken_bytes(path) / 1024 for path in (checkpoints[0], whole / "final", whole)
    )
    # The finished model needs no extra space: the space for a save is free again by then.
    return Undisturbed(scene, one, both - final - len(checkpoints) * one)


def harmed(run: Path, ending: Ending) -> list[str]:
    """Return the faults of a run directory: fewer than two checkpoints, or damaged ones."""
    whole = committed(run)
    named = [step for step, path in numbered_checkpoints(run) if (path / MANIFEST).exists()]
    saved = sum(" committed (" in line for line in ending.output.splitlines())
    wrong = []
    if sorted(named) != whole:
        wrong.append(f"of {named} only {whole} are whole")
    if len(whole) < min(2, saved):
        wrong.append(f"{saved} were committed, {whole} are left")
    if ending.exit_code not in (ExitCode.DONE, ExitCode.STORAGE):
        wrong.append(f"{ending.exit_code}: {ending.output[-2000:]}")
    return wrong


def tried(scene: Scene, disk) -> tuple[str, list[str]]:
    """Start on a disk, then again on a larger disk; return the first ending and all faults."""
    run = disk.path / "run"
    ending = scene.start(run)
    wrong = harmed(run, ending)
    if ending.exit_code == ExitCode.DONE:
        return "ended well", wrong + scene.differences(run)
    before = committed(run)
    trained = re.search(r"step +\d+/\d+", ending.output)
    end = "ended with 74" if trained else "refused with 74"
    disk.resize(PLENTY_KIB, PLENTY_FILES)
    return end, wrong + scene.started_again(run, before)


# Settings, and disk sizes in checkpoints: a few, and many with `--exhaustive`.
KINDS = {
    "limit of 2 checkpoints": ({"keep": 2}, [2.9, 3.1], np.linspace(-0.7, 4.5, 30)),
    "limit of 3 checkpoints": ({"keep": 3}, [3.1], np.linspace(-0.7, 4.5, 12)),
    "no limit of checkpoints": ({"keep": "null"}, [4.5], np.linspace(1.5, 7.3, 12)),
    "limit of 2 checkpoints, background saves": (
        {"keep": 2, "async_save": "true"}, [3.1], np.linspace(-0.7, 4.5, 12),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_of_any_size_harms_nothing(kind, undisturbed, disks, exhaustive, figures):
    settings, few, many = KINDS[kind]
    scene = undisturbed.scene(**settings)
    ends: Counter[str] = Counter()
    wrong = []
    for checkpoints in many if exhaustive else few:
        end, problems = tried(scene, disks(undisturbed.size_kib(checkpoints), PLENTY_FILES))
        ends[end] += 1
        wrong += [f"room for {checkpoints:.2f}: {problem}" for problem in problems]
        if kind.startswith("limit") and (end == "ended well") != (checkpoints > AT_ONCE):
            wrong.append(f"room for {checkpoints:.2f}: {end}")
    assert_harmless(figures, kind, ends, wrong)


@pytest.mark.parametrize("keep", [2, "null"])
def test_a_disk_with_few_files_left_harms_nothing(keep, undisturbed, disks, exhaustive, figures):
    scene = undisturbed.scene(keep=keep)
    ends: Counter[str] = Counter()
    wrong = []
    sampled = [90] if keep == "null" else []
    for files in range(10, 170, 20) if exhaustive else sampled:
        end, problems = tried(scene, disks(PLENTY_KIB, files))
        ends[end] += 1
        wrong += [f"{files} inodes: {problem}" for problem in problems]
    kind = "no limit of checkpoints" if keep == "null" else "limit of 2 checkpoints"
    assert_harmless(figures, f"few inodes, {kind}", ends, wrong)
    if exhaustive:
        assert set(ends) == {"ended well", "ended with 74"}  # the check does not predict inodes


@pytest.mark.parametrize("keep", [2, 3])
def test_a_run_continues_if_its_oldest_checkpoint_may_make_room(keep, undisturbed, disks, figures):
    """The disk has room for half a checkpoint. Only a limit of 3 allows to delete the oldest."""
    scene = undisturbed.scene(keep=keep)
    disk = disks(PLENTY_KIB, PLENTY_FILES)
    run = disk.path / "run"
    killed = scene.starts.run("stoker", scene.argv(run), die_at=keep)
    whole = list(range(1, keep + 1))
    assert (killed.exit_code, committed(run)) == (-9, whole), killed.output
    free_kib = undisturbed.checkpoint_kib / 2 + RESERVE_BYTES / 1024
    status = os.statvfs(run)
    used_kib = (status.f_blocks - status.f_bfree) * status.f_frsize // 1024
    disk.resize(used_kib + int(free_kib), PLENTY_FILES)
    end, wrong = tried(scene, disk)
    assert_harmless(
        figures,
        f"resumed with space for half a checkpoint, limit of {keep} checkpoints",
        Counter([end]),
        wrong,
    )
    assert end == ("ended well" if keep == 3 else "refused with 74")


# Kill a start in its first save, in a save while two checkpoints exist, and in their deletions.
KILLS = [
    Call("fsync", "checkpoint-1/model.safetensors", 1, 0),
    Call("mkdir", "checkpoint-3", 1, 0),
    Call("fsync", "checkpoint-3/model.safetensors", 1, 0),
    Call("rename", "checkpoint-4/.manifest.json.*.tmp", 1, 0),
    Call("fsync", "checkpoint-5/optimizer.pt", 1, 0),
]


@pytest.mark.parametrize("keep", [2, 3])
def test_a_run_killed_in_a_save_resumes_on_the_same_disk(
    keep, undisturbed, disks, exhaustive, figures
):
    scene = undisturbed.scene(keep=keep)
    ends: Counter[str] = Counter()
    wrong = []
    for checkpoints in np.linspace(3.1, 3.9, 3) if exhaustive else [3.1]:
        for call in KILLS if exhaustive else KILLS[-1:]:
            disk = disks(undisturbed.size_kib(checkpoints), PLENTY_FILES)
            run = disk.path / "run"
            killed = scene.start(run, call.injecting(run, KILL))
            assert killed.exit_code == -9, killed.output
            problems = [line for line in harmed(run, killed) if not line.startswith("-9")]
            problems += scene.started_again(run)
            ends["failed" if problems else "resumed unattended"] += 1
            wrong += [f"{call}, room for {checkpoints:.2f}: {problem}" for problem in problems]
    assert_harmless(figures, f"killed in a save, limit of {keep} checkpoints", ends, wrong)


def assert_harmless(figures, kind: str, ends: Counter[str], wrong: list[str]) -> None:
    if ends:
        figures("full_disks")[kind] = {"disks": ends.total(), **ends, "wrong": len(wrong)}
    assert not wrong, "\n".join(wrong)
