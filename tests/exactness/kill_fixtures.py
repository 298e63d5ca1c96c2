"""The scenes that are killed and failed, see test_kill_points.py."""

import concurrent.futures
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from kernel_calls import Starts
from kill_scenes import KEPT, SAVE_STEPS, STEPS, Scene, committed

from utils.checkpoints.discovery import RESERVE_BYTES
from utils.checkpoints.files import MANIFEST
from utils.config.errors import ExitCode

AT_ONCE = 2  # starts
LONGER = 8  # steps


@pytest.fixture(scope="session")
def slots(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("kill_points")


@pytest.fixture(scope="session")
def starts(slots) -> Starts:
    trial = subprocess.run(["strace", "-o", "/dev/null", "true"], check=False)
    assert trial.returncode == 0, "strace works where processes may be traced (ptrace)"
    return Starts(slots)


@pytest.fixture(scope="session")
def command(workspace) -> Callable[..., list[str]]:
    def argv(output_dir: Path, **changes: object) -> list[str]:
        settings = {
            "train_data": workspace / "documents",
            "tokenizer_name_or_path": workspace / "tokenizer",
            "model_config": workspace / "model.json",
            "output_dir": output_dir,
            "max_steps": STEPS,
            "save_steps": SAVE_STEPS,
            "save_total_limit": KEPT,
        }
        return tiny.flags(**(tiny.RUN | settings | changes))

    return argv


@pytest.fixture(scope="session")
def resuming(starts, command, slots) -> Scene:
    """Checkpoints of steps 2 and 4, killed in step 6; the start saves that, rotates, exports."""
    whole, prepared = slots / "whole", slots / "prepared"
    ending = starts.run("stoker", command(whole))
    assert ending.exit_code == ExitCode.DONE, ending.output
    assert starts.run("stoker", command(prepared), die_at=5).exit_code == -9
    assert committed(prepared) == [2, 4]
    return Scene(starts, "stoker", command, prepared, whole)


@pytest.fixture(scope="session")
def beginning(resuming) -> Scene:
    return Scene(resuming.starts, "stoker", resuming.argv, None, resuming.whole, first_only=True)


@pytest.fixture(scope="session")
def longer(starts, command, slots) -> Path:
    """An undisturbed run of 8 steps."""
    whole = slots / "whole_longer"
    assert starts.run("stoker", command(whole, max_steps=LONGER)).exit_code == ExitCode.DONE
    return whole


@pytest.fixture(scope="session")
def recovering(starts, command, longer, slots) -> Scene:
    """Checkpoints of steps 2, 4 and 6, and all that kills leave behind; step 8 not committed.

    The start has to set step 8 aside, and to delete that and step 2 before it has room to save.
    """
    prepared = slots / "prepared_to_recover"

    def argv(output_dir: Path) -> list[str]:
        return command(output_dir, max_steps=LONGER, save_total_limit=3)

    assert starts.run("stoker", argv(prepared), die_at=7).exit_code == -9
    assert committed(prepared) == [2, 4, 6]
    newest = prepared / f"checkpoint-{LONGER}"
    shutil.copytree(longer / newest.name, newest)
    (newest / MANIFEST).unlink()
    for left in ("deleting.checkpoint-1", "resharded.checkpoint-6", f"incomplete.{newest.name}"):
        (prepared / left).mkdir()
        for name in ("optimizer.pt", "scheduler.pt"):
            shutil.copy(newest / name, prepared / left)
    size = sum(path.stat().st_size for path in newest.iterdir())
    return Scene(
        starts, "stoker", argv, prepared, longer,
        options={"quota_bytes": int(3.5 * size + RESERVE_BYTES)},
        steps=LONGER, kept=3, makes_room=True,
    )  # fmt: skip


@pytest.fixture(scope="session")
def background(starts, command, longer, slots) -> Scene:
    """Checkpoints of steps 6 and 8, each staged in memory and written while training continues."""
    prepared = slots / "prepared_aside"
    options = {"staged_within": "memory"}

    def argv(output_dir: Path) -> list[str]:
        return command(output_dir, max_steps=LONGER, async_save="true")

    before = command(prepared, max_steps=LONGER)
    assert starts.run("stoker", before, die_at=5).exit_code == -9
    assert committed(prepared) == [2, 4]
    (prepared / "memory").mkdir()
    return Scene(
        starts, "stoker", argv, prepared, longer, options=options, steps=LONGER, threads=True
    )


@pytest.fixture(scope="session")
def of_two(starts, command, slots) -> list[Scene]:
    """As `resuming` with two ranks under DDP, by the rank that is disturbed."""
    return scenes_of_two(starts, command, slots, "multi_gpu")


@pytest.fixture(scope="session")
def of_two_sharded(starts, command, slots) -> list[Scene]:
    """The same under FSDP2: each rank writes shards of weights and optimizer."""
    return scenes_of_two(starts, command, slots, "fsdp2")


def scenes_of_two(starts: Starts, command, slots: Path, config: str) -> list[Scene]:
    whole, prepared = slots / f"whole_{config}", slots / f"prepared_{config}"
    with starts.ranks(command(whole), config=config) as ranks:
        pass
    assert [rank.ending.exit_code for rank in ranks] == [0, 0], ranks[0].ending.output
    with starts.ranks(command(prepared), config=config, die_at=5) as ranks:
        pass
    assert committed(prepared) == [2, 4]
    return [
        Scene(starts, "stoker", command, prepared, whole, rank=rank, config=config)
        for rank in range(2)
    ]


@pytest.fixture(scope="session")
def stock(starts, workspace, slots) -> Scene:
    """Plain Trainer in the place of `resuming`."""
    whole, prepared = slots / "stock_whole", slots / "stock_prepared"
    options = {"max_steps": STEPS, "save_steps": SAVE_STEPS}

    def argv(directory: Path) -> list[str]:
        return [str(workspace / "model.json"), str(directory)]

    done = starts.run("stock", argv(whole), **options)
    assert done.exit_code == 0, done.output
    assert starts.run("stock", argv(prepared), die_at=5, **options).exit_code == -9
    return Scene(starts, "stock", argv, prepared, whole, options)


def in_slots(slots: Path, work: Callable, items: list) -> list:
    """Do the work for each item in a directory of its own, some at once; all results."""
    free = [slots / f"slot-{number}" for number in range(AT_ONCE)]

    def do(item):
        directory = free.pop()
        try:
            return work(item, directory)
        finally:
            free.append(directory)

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(do, items))
