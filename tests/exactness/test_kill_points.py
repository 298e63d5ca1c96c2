"""A start killed at any call that changes its run directory, or whose storage refuses that call.

Every such call of these starts is gone through: one that begins a run, one that resumes, saves,
rotates and exports, one that first puts away what others left, one that writes in the background,
and those of two ranks. The next start needs nobody and ends as the undisturbed one; no committed
checkpoint is lost but those that rotation deletes.
"""

import collections
import json
from pathlib import Path

import pytest
from kernel_calls import RECORDING, Call, Event, changes_below, events, other_threads_change
from kill_fixtures import in_slots
from kill_scenes import STEPS, Scene, committed, lawful_states, sample

from utils.config.errors import ExitCode

pytestmark = pytest.mark.slow

# Points of a scene in `make test`.
SAMPLED = {"resuming": 6, "beginning": 3, "recovering": 3, "background": 3}
SAMPLED_REFUSALS = {"resuming": 4, "beginning": 2, "recovering": 2, "background": 2}
LAST = f"checkpoint-{STEPS}"


def unsurvived(scene: Scene, calls: list[Call], slots: Path) -> list[str]:
    """What was wrong after a kill at each of these calls; nothing, if all is well."""

    def kill(call, directory: Path) -> list[str]:
        scene.killed_at(call, directory)
        whole = committed(directory)
        wrong = [f"{call}: {loss}" for loss in scene.losses_of_checkpoints(directory)]
        again = scene.start(directory)
        if again.exit_code != ExitCode.DONE:
            wrong.append(f"{call}: {again.exit_code} {again.output[-2000:]}")
        else:
            wrong += [f"{call}: {name} differs" for name in scene.differences(directory)]
        if whole and f"resuming from {directory}/checkpoint-{whole[-1]}" not in again.output:
            wrong.append(f"{call}: it did not resume from {whole[-1]}: {again.output[-2000:]}")
        return wrong

    found = in_slots(slots, kill, calls)
    return [line for lines in found for line in lines]


@pytest.mark.parametrize("name", list(SAMPLED))
def test_a_kill_at_any_call_needs_nobody(name, request, slots, exhaustive, figures):
    scene = request.getfixturevalue(name)
    calls = scene.record(slots / "slot-0")
    chosen = calls if exhaustive else sample(calls, SAMPLED[name])
    wrong = unsurvived(scene, chosen, slots)
    kinds = collections.Counter(call.name for call in calls)
    figures("kill_points")[name] = {
        "points": len(calls),
        "tried": len(chosen),
        "survived": len(chosen) - len({line.split(":")[0] for line in wrong}),
        "calls": dict(sorted(kinds.items())),
    }
    assert not wrong, "\n".join(wrong)
    assert {"mkdir", "openat", "write", "fsync", "rename"} <= set(kinds)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "name", ["of_two", pytest.param("of_two_sharded", marks=pytest.mark.exhaustive)]
)
def test_a_kill_of_one_of_two_ranks_at_any_call_needs_nobody(
    name, rank, request, slots, exhaustive, figures
):
    scene = request.getfixturevalue(name)[rank]
    calls = scene.record(slots / "slot-0")
    chosen = calls if exhaustive else sample(calls, 3)[1:2]
    wrong = unsurvived(scene, chosen, slots)
    row = f"rank_{rank}_of_2" + (", FSDP2" if scene.config == "fsdp2" else "")
    figures("kill_points")[row] = {
        "points": len(calls),
        "tried": len(chosen),
        "survived": len(chosen) - len({line.split(":")[0] for line in wrong}),
    }
    assert not wrong, "\n".join(wrong)


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
    """A full or failing disk: exit code 74, or training continues without what it can do without.

    The next start ends as the undisturbed one; only rotation deletes a committed checkpoint.
    """
    scene = request.getfixturevalue(name)
    calls = scene.record(slots / "slot-0")
    cases = [(call, error) for call in calls for error in errors_of(call)]
    if not exhaustive:
        cases = sample(cases, SAMPLED_REFUSALS[name])

    def refuse(case, directory) -> tuple[str, list[str]]:
        call, error = case
        ending = scene.failed_at(call, directory, error)
        wrong = scene.losses_of_checkpoints(directory, ending.exit_code == ExitCode.DONE)
        ends = {ExitCode.DONE: "went_on", ExitCode.STORAGE: "ended_with_74"}
        end = ends.get(ending.exit_code, "ended_otherwise")
        if end == "ended_otherwise":
            wrong.append(f"{ending.exit_code} {ending.output[-3000:]}")
        again = scene.start(directory)
        if again.exit_code != ExitCode.DONE:
            wrong.append(f"then {again.exit_code} {again.output[-3000:]}")
        else:
            wrong += [f"{name} differs" for name in scene.differences(directory)]
        return end, [f"{call} {error}: {line}" for line in wrong]

    results = in_slots(slots, refuse, cases)
    figures("storage_refusals")[name] = {
        "cases": len(cases),
        **collections.Counter(end for end, _ in results),
        "survived": sum(not wrong for _, wrong in results),
    }
    wrong = [line for _, lines in results for line in lines]
    assert not wrong, "\n".join(wrong)


def test_what_plain_trainer_makes_of_the_same(stock, slots, exhaustive, figures):
    """Killed at the same calls, and refused by the same storage."""
    calls = stock.record(slots / "slot-0")
    cases = [(call, error) for call in calls for error in errors_of(call)]

    def kill(call, directory: Path) -> str:
        stock.killed_at(call, directory)
        return stock.outcome(directory)

    def refuse(case, directory: Path) -> str:
        stock.failed_at(case[0], directory, case[1])
        return stock.outcome(directory)

    for name, disturb, points in (
        ("kill_points", kill, calls), ("storage_refusals", refuse, cases),
    ):  # fmt: skip
        chosen = points if exhaustive else sample(points, 2)
        outcomes = collections.Counter(in_slots(slots, disturb, chosen))
        figures(name)["plain_trainer"] = {
            "points" if name == "kill_points" else "cases": len(points),
            "tried": len(chosen),
            "survived": outcomes["same"],
            "next_start_failed": outcomes["refused"],
            "ended_with_other_weights": outcomes["different"],
        }
        if exhaustive:
            assert outcomes["refused"], "Trainer got better: say so where these figures are quoted"


@pytest.mark.parametrize(
    "name", ["resuming", pytest.param("of_two_sharded", marks=pytest.mark.exhaustive)]
)
def test_no_thread_but_the_main_one_changes_the_run_directory(name, request, slots):
    """Or a sweep over the main thread's calls would be none over all."""
    scenes = request.getfixturevalue(name)
    for scene in scenes if isinstance(scenes, list) else [scenes]:
        directory = scene.fresh(slots / "slot-0")
        ending = scene.start(directory, ["-f", *RECORDING])
        assert ending.exit_code == ExitCode.DONE
        assert changes_below(directory, ending.trace)
        assert not other_threads_change(directory, ending)


def test_all_is_on_stable_storage_before_the_manifest_is(resuming, slots):
    """What SIGKILL cannot show: a power loss finds what was brought to storage, in that order.

    In a save with all its threads: each file is flushed after its last change, the folders after
    the last entry, all of it before the manifest's name appears, that before anything is deleted.
    """
    directory = resuming.fresh(slots / "slot-0")
    argv = resuming.argv(directory)
    ending = resuming.starts.run("stoker", argv, strace=["-f", *RECORDING], one_thread=False)
    assert ending.exit_code == ExitCode.DONE, ending.output
    assert not unordered(directory, ending.trace)
    # The check itself can fail: without any one fsync it does.
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
    """What of the last checkpoint was not on stable storage when it had to be."""
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
    draft = Path(named.arguments.split('"')[1]).name  # the manifest before it has its name
    for name in [*files, draft]:
        path = checkpoint / name
        if not flushed(path, last_change(path, before), named.began):
            wrong.append(name)
    entries = [last_change(checkpoint / name, before, ENTERING) for name in files]
    if not flushed(checkpoint, max(entries), named.began):
        wrong.append("the folder of the checkpoint")
    if not flushed(run, first(made, "mkdir", LAST).ended, named.began):
        wrong.append("the folder of the run")
    if not flushed(checkpoint, named.ended, deleting.began):
        wrong.append("the manifest's name")
    return wrong


ENTERING = ("openat", "rename", "renameat")
WRITING = ("write", "writev", "pwrite64", "ftruncate", *ENTERING)


def first(made: list[Event], name: str, about: str) -> Event:
    return next(event for event in made if event.name == name and about in event.arguments)


def last_change(path: Path, made: list[Event], names: tuple[str, ...] = WRITING) -> int:
    """Where the last call ended that wrote to a file or gave it its name; it must have one."""
    return max(
        event.ended
        for event in made
        if event.name in names
        and (f'"{path}"' in event.arguments or f"<{path}>" in event.arguments)
        and (event.name != "openat" or "O_CREAT" in event.arguments)
    )
