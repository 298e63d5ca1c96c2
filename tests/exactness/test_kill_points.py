"""A start killed, or refused by the storage, at any call that changes its run directory.

Every such call of three starts is gone through: one that begins a run, one that resumes, saves,
rotates and exports, and one of two ranks. The next start needs nobody and ends as the undisturbed
one; no committed checkpoint is lost but those that rotation deletes.
"""

import collections
import concurrent.futures
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import tiny
from kernel_calls import RECORDING, Event, Starts, events, other_threads_change
from kill_scenes import KEPT, LAST, SAVE_STEPS, STEPS, Scene, committed, sample

from utils.config.errors import ExitCode

pytestmark = pytest.mark.slow

AT_ONCE = 2  # starts
SAMPLED = 9


@pytest.fixture(scope="module")
def slots(tmp_path_factory):
    return tmp_path_factory.mktemp("kill_points")


@pytest.fixture(scope="module")
def starts(slots):
    trial = subprocess.run(["strace", "-o", "/dev/null", "true"], check=False)
    assert trial.returncode == 0, "strace works where processes may be traced (ptrace)"
    return Starts(slots)


@pytest.fixture(scope="module")
def command(workspace):
    def argv(output_dir: Path) -> list[str]:
        settings = {
            "train_data": workspace / "documents",
            "tokenizer_name_or_path": workspace / "tokenizer",
            "model_config": workspace / "model.json",
            "output_dir": output_dir,
            "max_steps": STEPS,
            "save_steps": SAVE_STEPS,
            "save_total_limit": KEPT,
        }
        return tiny.flags(**(tiny.RUN | settings))

    return argv


@pytest.fixture(scope="module")
def resuming(starts, command, slots):
    """Checkpoints of steps 2 and 4, killed in step 6; the start saves that, rotates, exports."""
    whole, prepared = slots / "whole", slots / "prepared"
    assert starts.run("stoker", command(whole)).exit_code == ExitCode.DONE
    assert starts.run("stoker", command(prepared), die_at=5).exit_code == -9
    assert committed(prepared) == [2, 4]
    return Scene(starts, "stoker", command, prepared, whole)


@pytest.fixture(scope="module")
def beginning(resuming):
    return Scene(resuming.starts, "stoker", resuming.argv, None, resuming.whole, first_only=True)


@pytest.fixture(scope="module")
def of_two(starts, command, slots):
    """The same with two ranks, by the rank that is disturbed."""
    whole, prepared = slots / "whole_of_two", slots / "prepared_of_two"
    with starts.ranks(command(whole)) as ranks:
        pass
    assert [rank.ending.exit_code for rank in ranks] == [0, 0], ranks[0].ending.output
    with starts.ranks(command(prepared), die_at=5) as ranks:
        pass
    assert committed(prepared) == [2, 4]
    return [Scene(starts, "stoker", command, prepared, whole, rank=rank) for rank in range(2)]


@pytest.fixture(scope="module")
def stock(starts, workspace, slots):
    """Plain Trainer in the place of `resuming`."""
    whole, prepared = slots / "stock_whole", slots / "stock_prepared"
    options = {"max_steps": STEPS, "save_steps": SAVE_STEPS}

    def argv(directory: Path) -> list[str]:
        return [str(workspace / "model.json"), str(directory)]

    done = starts.run("stock", argv(whole), **options)
    assert done.exit_code == 0, done.output
    assert starts.run("stock", argv(prepared), die_at=5, **options).exit_code == -9
    return Scene(starts, "stock", argv, prepared, whole, options)


def in_slots(slots: Path, work, items: list) -> list:
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


def unsurvived(scene: Scene, calls: list, slots: Path) -> list[str]:
    """What was wrong after a kill at each of these calls; nothing, if all is well."""

    def kill(call, directory: Path) -> list[str]:
        before = committed(scene.prepared) if scene.prepared else []
        scene.killed_at(call, directory)
        whole = committed(directory)
        wrong = []
        if len(whole) < len(before):
            wrong.append(f"{call}: of {before} only {whole} are left")
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


@pytest.mark.parametrize("name", ["resuming", "beginning"])
def test_a_kill_at_any_call_needs_nobody(name, request, slots, exhaustive, figures):
    scene = request.getfixturevalue(name)
    calls = scene.record(slots / "slot-0")
    chosen = calls if exhaustive else sample(calls, SAMPLED if name == "resuming" else 4)
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
def test_a_kill_of_one_of_two_ranks_at_any_call_needs_nobody(
    rank, of_two, slots, exhaustive, figures
):
    scene = of_two[rank]
    calls = scene.record(slots / "slot-0")
    chosen = calls if exhaustive else sample(calls, 3)[1:2]
    wrong = unsurvived(scene, chosen, slots)
    figures("kill_points")[f"rank_{rank}_of_2"] = {
        "points": len(calls),
        "tried": len(chosen),
        "survived": len(chosen) - len({line.split(":")[0] for line in wrong}),
    }
    assert not wrong, "\n".join(wrong)


def test_what_plain_trainer_makes_of_the_same(stock, slots, exhaustive, figures):
    calls = stock.record(slots / "slot-0")
    chosen = calls if exhaustive else sample(calls, 5)

    def kill(call, directory: Path) -> str:
        stock.killed_at(call, directory)
        return stock.outcome(directory)

    outcomes = collections.Counter(in_slots(slots, kill, chosen))
    figures("kill_points")["plain_trainer"] = {
        "points": len(calls),
        "tried": len(chosen),
        "survived": outcomes["same"],
        "next_start_failed": outcomes["refused"],
        "ended_with_other_weights": outcomes["different"],
    }
    if exhaustive:
        assert outcomes["refused"], "Trainer got better: say so where these figures are quoted"


def errors_of(call) -> list[str]:
    if call.name in ("fsync", "fdatasync"):
        return ["EIO", "ENOSPC"]
    return ["EIO"] if call.name in ("unlink", "unlinkat", "rmdir") else ["ENOSPC"]


@pytest.mark.parametrize("name", ["resuming", "beginning"])
def test_storage_that_refuses_any_call_harms_nothing(name, request, slots, exhaustive, figures):
    """The run ends with 74, or goes on where what failed was no part of what it must keep."""
    scene = request.getfixturevalue(name)
    calls = scene.record(slots / "slot-0")
    cases = [(call, error) for call in calls for error in errors_of(call)]
    if not exhaustive:
        cases = sample(cases, 6 if name == "resuming" else 2)
    before = committed(scene.prepared) if scene.prepared else []
    ends: collections.Counter[str] = collections.Counter()

    def refuse(case, directory: Path) -> list[str]:
        call, error = case
        ending = scene.failed_at(call, directory, error)
        whole = committed(directory)
        wrong = []
        if len(whole) < len(before):
            wrong.append(f"{call} {error}: of {before} only {whole} are left")
        if ending.exit_code == ExitCode.DONE:
            ends["went on"] += 1
        elif ending.exit_code == ExitCode.STORAGE:
            ends["ended with 74"] += 1
        else:
            wrong.append(f"{call} {error}: {ending.exit_code} {ending.output[-3000:]}")
        again = scene.start(directory)
        if again.exit_code != ExitCode.DONE:
            wrong.append(f"{call} {error}: then {again.exit_code} {again.output[-3000:]}")
        else:
            wrong += [f"{call} {error}: {name} differs" for name in scene.differences(directory)]
        return wrong

    wrong = [line for lines in in_slots(slots, refuse, cases) for line in lines]
    figures("storage_refusals")[name] = {"cases": len(cases), **dict(ends)}
    assert not wrong, "\n".join(wrong)


def test_no_thread_but_the_main_one_changes_the_run_directory(resuming, slots):
    """Or a sweep over the main thread's calls would be none over all."""
    directory = resuming.fresh(slots / "slot-0")
    ending = resuming.start(directory, ["-f", *RECORDING])
    assert ending.exit_code == ExitCode.DONE
    assert not other_threads_change(directory, ending.trace)


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
    for name in [*files, ".manifest.json.draft"]:
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


def test_a_save_out_of_order_would_be_seen(resuming, slots):
    """The check itself can fail: without any one fsync it does."""
    directory = resuming.fresh(slots / "slot-0")
    ending = resuming.starts.run(
        "stoker", resuming.argv(directory), strace=["-f", *RECORDING], one_thread=False
    )
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
    shutil.rmtree(directory)
