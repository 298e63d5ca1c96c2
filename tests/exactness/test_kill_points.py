"""Kills a start at each call that changes its run directory, or makes the storage refuse that call.

There are starts that begin a run; that resume, save, rotate and export; that first set aside the
leftovers of killed starts; that save in the background; and starts of two ranks. The next start
must need no human and must end like the undisturbed start. No committed checkpoint may be lost,
except by rotation.
"""

import collections
import concurrent.futures
import functools
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from kernel_calls import KILL, RECORDING, Call, Event, Starts, changes_below, events
from kill_scenes import FAILED, KEPT, SAVE_STEPS, STEPS, Scene, committed, lawful_states, sample

from utils.checkpoints.discovery import RESERVE_BYTES
from utils.checkpoints.files import MANIFEST
from utils.config.errors import ExitCode

pytestmark = pytest.mark.slow
EXHAUSTIVE = pytest.mark.exhaustive

# The number of calls of each scene that `make test` tries.
SAMPLED = {"resuming": 6, "beginning": 3, "recovering": 3, "background": 3}
SAMPLED_REFUSALS = {"resuming": 4, "beginning": 2, "recovering": 2, "background": 2}
LAST = f"checkpoint-{STEPS}"
LONGER = 8  # steps
AT_ONCE = 2  # starts at the same time
ENDS = ("survived", "next_start_failed", "ended_with_other_weights")


@pytest.fixture(scope="module")
def slots(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("kill_points")


@pytest.fixture(scope="module")
def starts(slots) -> Starts:
    trial = subprocess.run(["strace", "-o", "/dev/null", "true"], check=False)
    assert trial.returncode == 0, "strace works where processes may be traced (ptrace)"
    return Starts(slots)


@pytest.fixture(scope="module")
def command(pretraining) -> Callable[..., list[str]]:
    return functools.partial(
        pretraining, max_steps=STEPS, save_steps=SAVE_STEPS, save_total_limit=KEPT
    )


@pytest.fixture(scope="module")
def resuming(starts, command, slots) -> Scene:
    """Prepare a run with checkpoints of steps 2 and 4 that was killed in step 6.

    The start resumes, saves, rotates and exports.
    """
    whole, prepared = slots / "whole", slots / "prepared"
    ending = starts.run("stoker", command(whole))
    assert ending.exit_code == ExitCode.DONE, ending.output
    assert starts.run("stoker", command(prepared), die_at=5).exit_code == -9
    assert committed(prepared) == [2, 4]
    return Scene(starts, "stoker", command, prepared, whole)


@pytest.fixture(scope="module")
def beginning(resuming) -> Scene:
    return Scene(resuming.starts, "stoker", resuming.argv, None, resuming.whole, first_only=True)


@pytest.fixture(scope="module")
def longer(starts, command, slots) -> Path:
    """Run 8 undisturbed steps."""
    whole = slots / "whole_longer"
    assert starts.run("stoker", command(whole, max_steps=LONGER)).exit_code == ExitCode.DONE
    return whole


@pytest.fixture(scope="module")
def recovering(starts, command, longer, slots) -> Scene:
    """Prepare checkpoints of steps 2, 4 and 6, an uncommitted step 8, and leftovers of kills.

    The start must set step 8 aside, and delete steps 8 and 2 to have room for a save.
    """
    prepared = slots / "prepared_to_recover"
    argv = functools.partial(command, max_steps=LONGER, save_total_limit=3)
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


@pytest.fixture(scope="module")
def background(starts, command, longer, slots) -> Scene:
    """Prepare a start whose checkpoints of steps 6 and 8 are staged in memory and written later."""
    prepared = slots / "prepared_aside"
    argv = functools.partial(command, max_steps=LONGER, async_save="true")
    before = command(prepared, max_steps=LONGER)
    assert starts.run("stoker", before, die_at=5).exit_code == -9
    assert committed(prepared) == [2, 4]
    (prepared / "memory").mkdir()
    return Scene(
        starts, "stoker", argv, prepared, longer,
        options={"staged_within": "memory"}, steps=LONGER, threads=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def of_two(starts, command, slots) -> Callable[[str], list[Scene]]:
    """Prepare `resuming` for two ranks under an accelerate config; return scenes by rank."""

    @functools.cache
    def scenes(config: str) -> list[Scene]:
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

    return scenes


@pytest.fixture(scope="module")
def stock(starts, models, slots) -> Scene:
    """Prepare `resuming` for plain Trainer."""
    whole, prepared = slots / "stock_whole", slots / "stock_prepared"
    options = {"max_steps": STEPS, "save_steps": SAVE_STEPS}

    def argv(directory: Path) -> list[str]:
        return [str(models), str(directory)]

    done = starts.run("stock", argv(whole), **options)
    assert done.exit_code == 0, done.output
    assert starts.run("stock", argv(prepared), die_at=5, **options).exit_code == -9
    return Scene(starts, "stock", argv, prepared, whole, options)


def in_slots(slots: Path, work: Callable, items: list) -> list:
    """Do the work for each item in a directory of `slots`, in parallel; return all results."""
    free = [slots / f"slot-{number}" for number in range(AT_ONCE)]

    def do(item):
        directory = free.pop()
        try:
            return work(item, directory)
        finally:
            free.append(directory)

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(do, items))


def swept(scene: Scene, most: int, exhaustive: bool, slots: Path) -> tuple[list[Call], dict, list]:
    """Kill the start of a scene at all calls or a sample; return calls, figures and faults."""
    calls = scene.record(slots / "slot-0")
    chosen = calls if exhaustive else sample(calls, most)

    def kill(call, directory: Path) -> list[str]:
        scene.disturbed_at(call, directory, KILL)
        wrong = scene.losses_of_checkpoints(directory)
        wrong += scene.started_again(directory, committed(directory))
        return [f"{call}: {line}" for line in wrong]

    wrong = [lines for lines in in_slots(slots, kill, chosen) if lines]
    survived = len(chosen) - len(wrong)
    found = {"points": len(calls), "tried": len(chosen), "survived": survived}
    return calls, found, wrong


@pytest.mark.parametrize("name", list(SAMPLED))
def test_a_kill_at_any_call_needs_nobody(name, request, slots, exhaustive, figures):
    scene = request.getfixturevalue(name)
    calls, found, wrong = swept(scene, SAMPLED[name], exhaustive, slots)
    kinds = collections.Counter(call.name for call in calls)
    figures("kill_points")[name] = {**found, "calls": dict(sorted(kinds.items()))}
    assert not wrong
    assert {"mkdir", "openat", "write", "fsync", "rename"} <= set(kinds)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("config", ["multi_gpu", pytest.param("fsdp2", marks=EXHAUSTIVE)])
def test_a_kill_of_one_of_two_ranks_at_any_call_needs_nobody(
    config, rank, of_two, slots, exhaustive, figures
):
    _, found, wrong = swept(of_two(config)[rank], 1, exhaustive, slots)
    row = f"rank_{rank}_of_2" + (", FSDP2" if config == "fsdp2" else "")
    figures("kill_points")[row] = found
    assert not wrong


def test_the_checkpoints_that_may_be_there():
    assert lawful_states([2, 4], [6], 2, False) == [[2, 4], [2, 4, 6], [4, 6]]
    assert lawful_states([2, 4], [6], 2, True) == [[2, 4], [2, 4, 6], [4, 6]]
    assert lawful_states([2, 4, 6], [8], 3, True) == [[2, 4, 6], [4, 6], [4, 6, 8]]
    assert [2, 6] not in lawful_states([2, 4], [6, 8], 2, False)


def errors_of(call: Call) -> list[str]:
    if call.name in ("fsync", "fdatasync"):
        return ["EIO", "ENOSPC"]
    return ["EIO"] if call.name in ("unlink", "unlinkat", "rmdir") else ["ENOSPC"]


@pytest.mark.parametrize("name", list(SAMPLED_REFUSALS))
def test_storage_that_refuses_any_call_harms_nothing(name, request, slots, exhaustive, figures):
    """If storage refuses a call, the start ends with 74, or continues if it can.

    The next start ends like the undisturbed start. Only rotation deletes a committed checkpoint.
    """
    scene = request.getfixturevalue(name)
    calls = scene.record(slots / "slot-0")
    cases = [(call, error) for call in calls for error in errors_of(call)]
    if not exhaustive:
        cases = sample(cases, SAMPLED_REFUSALS[name])

    def refuse(case, directory) -> tuple[str, list[str]]:
        call, error = case
        ending = scene.disturbed_at(call, directory, error)
        wrong = scene.losses_of_checkpoints(directory, ending.exit_code == ExitCode.DONE)
        ends = {ExitCode.DONE: "continued", ExitCode.STORAGE: "ended_with_74"}
        end = ends.get(ending.exit_code, "ended_otherwise")
        if end == "ended_otherwise":
            wrong.append(f"{ending.exit_code} {ending.output[-3000:]}")
        wrong += scene.started_again(directory)
        return end, [f"{call} {error}: {line}" for line in wrong]

    results = in_slots(slots, refuse, cases)
    figures("storage_refusals")[name] = {
        "cases": len(cases),
        **collections.Counter(end for end, _ in results),
        "survived": sum(not wrong for _, wrong in results),
    }
    assert not [wrong for _, wrong in results if wrong]


def test_what_plain_trainer_makes_of_the_same(stock, slots, exhaustive, figures):
    """Kill plain Trainer at the same calls, and make its storage refuse them."""
    calls = stock.record(slots / "slot-0")
    points = {
        "kill_points": [(call, KILL) for call in calls],
        "storage_refusals": [(call, error) for call in calls for error in errors_of(call)],
    }

    def disturb(case, directory: Path) -> str:
        stock.disturbed_at(case[0], directory, case[1])
        wrong = stock.started_again(directory)
        if not wrong:
            return "survived"
        return "next_start_failed" if FAILED in wrong[0] else "ended_with_other_weights"

    for name, cases in points.items():
        chosen = cases if exhaustive else sample(cases, 2)
        outcomes = collections.Counter(in_slots(slots, disturb, chosen))
        figures(name)["plain_trainer"] = {
            "points" if name == "kill_points" else "cases": len(cases),
            "tried": len(chosen),
            **{end: outcomes[end] for end in ENDS},
        }
        if exhaustive:
            assert outcomes[ENDS[1]], "Trainer got better: say so where these figures are quoted"


@pytest.mark.parametrize("config", [None, pytest.param("fsdp2", marks=EXHAUSTIVE)])
def test_no_thread_but_the_main_one_changes_the_run_directory(config, resuming, of_two, slots):
    """If other threads changed it too, the tests of the main thread's calls would be incomplete."""
    for scene in of_two(config) if config else [resuming]:
        directory = scene.fresh(slots / "slot-0")
        ending = scene.start(directory, ["-f", *RECORDING])
        assert ending.exit_code == ExitCode.DONE
        calls = changes_below(directory, ending.trace)
        assert calls
        assert not [call for call in calls if call.aside]


def test_all_is_on_stable_storage_before_the_manifest_is(resuming, slots):
    """Check the order of writes, which matters after a power loss but not after SIGKILL.

    In all threads of a save, each file is flushed after its last change, and each folder after its
    last new entry. Only then does the manifest get its name. Deletions come last.
    """
    directory = resuming.fresh(slots / "slot-0")
    argv = resuming.argv(directory)
    ending = resuming.starts.run("stoker", argv, strace=["-f", *RECORDING], one_thread=False)
    assert ending.exit_code == ExitCode.DONE, ending.output
    assert not unordered(directory, ending.trace)
    # Check the check itself: it must fail if any fsync is left out.
    lines = ending.trace.splitlines()
    flushes = [
        place
        for place, line in enumerate(lines)
        if "fsync" in line and LAST in line and "resumed" not in line
    ]
    assert len(flushes) > len(list((directory / LAST).iterdir()))
    for place in flushes:
        without = "\n".join([*lines[:place], "1 gone()", *lines[place + 1 :]])
        assert unordered(directory, without), lines[place]


def unordered(run: Path, trace: str) -> list[str]:
    """Return the files of the last checkpoint that were not flushed in time."""
    checkpoint = run / LAST
    files = json.loads((checkpoint / "manifest.json").read_text())["checkpoint"]["files"]
    made = [event for event in events(trace) if str(run) in event.arguments]
    named = first(made, "rename", f'"{checkpoint}/manifest.json"')
    deleting = first(made, "rename", "deleting.")
    before = [event for event in made if event.began < named.began]

    def flushed(path: Path, after: int, until: int) -> bool:
        return any(
            event.name == "fsync"
            and f"<{path}>" in event.arguments
            and after < event.began
            and event.ended < until
            for event in made
        )

    wrong = []
    draft = Path(named.arguments.split('"')[1]).name  # the manifest's name before its rename
    for name in [*files, draft]:
        path = checkpoint / name
        if not flushed(path, last_change(path, before), named.began):
            wrong.append(name)
    paths = [checkpoint / name for name in files]
    for folder in {path.parent for path in paths}:
        own = [path for path in paths if path.parent == folder]
        entries = [last_change(path, before, ENTERING) for path in own]
        if not flushed(folder, max(entries), named.began):
            wrong.append(f"the folder {folder}")
    if not flushed(run, first(made, "mkdir", LAST).ended, named.began):
        wrong.append("the folder of the run")
    journal = run / "metrics.jsonl"
    if not flushed(journal, last_change(journal, before), named.began):
        wrong.append("the lines of the journal")
    if not flushed(checkpoint, named.ended, deleting.began):
        wrong.append("the manifest's name")
    return wrong


ENTERING = ("openat", "rename", "renameat")
WRITING = ("write", "writev", "pwrite64", "ftruncate", *ENTERING)


def first(made: list[Event], name: str, about: str) -> Event:
    return next(event for event in made if event.name == name and about in event.arguments)


def last_change(path: Path, made: list[Event], names: tuple[str, ...] = WRITING) -> int:
    """Return the place in `made` of the last call that wrote or renamed a file."""
    return max(
        event.ended
        for event in made
        if event.name in names
        and (f'"{path}"' in event.arguments or f"<{path}>" in event.arguments)
        and (event.name != "openat" or "O_CREAT" in event.arguments)
    )
