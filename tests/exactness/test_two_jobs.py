"""Two jobs use one run directory: the second job is refused, and neither job harms the run."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
import tiny
from kernel_calls import Starts
from killed_child import HOST_WATCH_S
from launching import wait_until

from utils.config.errors import ExitCode

pytestmark = pytest.mark.slow

FIGURES = "two_jobs"
MANIFEST_3 = "checkpoint-3/manifest.json"


@pytest.fixture
def starts(tmp_path):
    return Starts(tmp_path)


@pytest.mark.parametrize(
    ("row", "first", "second"),
    [
        pytest.param("stoker", ("n8", "n8"), ("n8", "n8"), marks=pytest.mark.exhaustive),
        # A host cannot see processes of another host, only the heartbeat of the run lock.
        ("stoker on two hosts", ("n8", "n9"), ("n6", "n7")),
    ],
)
def test_one_of_two_simultaneous_starts_trains(
    row, first, second, starts, pretraining, tmp_path, figures
):
    """Both jobs start in a directory that does not exist yet, and again in that of a killed run."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    counts = figures(FIGURES).setdefault(row, {})
    with two_at_once(starts, pretraining(run), counts, *first) as trains:
        wait_until((run / MANIFEST_3).exists, "no checkpoint")
        os.kill(trains.pid, signal.SIGKILL)
    with two_at_once(starts, pretraining(run), counts, *second) as trains:
        pass
    assert trains.ending.exit_code == ExitCode.DONE, trains.ending.output
    assert f"{run}: its last owner is gone (process" in trains.ending.output
    assert f"resuming from {run}/checkpoint-3" in trains.ending.output
    is_the_whole_run(run, whole, starts, pretraining)
    assert len(tiny.starts(run)) == 2, "refused starts are none"


@pytest.mark.parametrize(
    "end", [pytest.param(signal.SIGKILL, marks=pytest.mark.exhaustive), signal.SIGSTOP]
)
def test_the_lock_of_another_host_is_stale_once_its_heartbeat_stops(
    end, starts, pretraining, tmp_path, figures
):
    """The locking process was killed, or suspended until another job had finished the run."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    argv = pretraining(run)
    with starts.running("stoker", argv, step_delay_s=0.7, host="n8") as owner:
        wait_until((run / MANIFEST_3).exists, "no checkpoint")
        os.kill(owner.pid, end)
        named = f"process {owner.pid} on n8"
        began = time.monotonic()
        taken = starts.run("stoker", argv, host="n9")
        took_s = time.monotonic() - began
        before = contents(run)
        if end == signal.SIGSTOP:
            os.kill(owner.pid, signal.SIGCONT)
    assert taken.exit_code == ExitCode.DONE, taken.output
    assert f"{run} belongs to {named}" in taken.output
    assert f"{run}: its last owner is gone ({named}" in taken.output
    assert f"resuming from {run}/checkpoint-3" in taken.output
    assert took_s > HOST_WATCH_S
    if end == signal.SIGSTOP:
        assert owner.ending.exit_code == ExitCode.REFUSED, owner.ending.output
        assert f"{run} was taken over by process" in owner.ending.output
        assert not {path for path in contents(run) - before if "checkpoint" in path[0]}
    is_the_whole_run(run, whole, starts, pretraining)
    row = figures(FIGURES).setdefault("stale lock of another host", {"pairs": 0})
    row["pairs"] += 1


def is_the_whole_run(run: Path, whole: Path, starts: Starts, pretraining) -> None:
    assert starts.run("stoker", pretraining(whole)).exit_code == ExitCode.DONE
    tiny.assert_same_run(run, whole)


def contents(run: Path) -> set[tuple[str, int]]:
    """Return each file with its modification time."""
    files = (path for path in run.rglob("*") if path.is_file())
    return {(str(path.relative_to(run)), path.stat().st_mtime_ns) for path in files}


def test_plain_trainer_lets_both_train(starts, models, tmp_path, figures):
    """With plain Trainer neither of two jobs in one directory notices the other."""
    both = 0
    for pair in range(2):
        argv = [str(models), str(tmp_path / f"run-{pair}")]
        options = {"max_steps": 6, "save_steps": 2, "step_delay_s": 0.2}
        with contextlib.ExitStack() as stack:
            jobs = [stack.enter_context(starts.running("stock", argv, **options)) for _ in "ab"]
        both += all("'loss'" in job.ending.output for job in jobs)
    row = {"pairs": 2, "second_refused": 2 - both, "both_wrote": both}
    figures(FIGURES)["plain Trainer"] = row
    assert both, "Trainer got better: say so where these figures are quoted"


@contextlib.contextmanager
def two_at_once(starts: Starts, argv: list[str], row: dict[str, int], *hosts: str):
    """Start two jobs. Return the job that trains after the refusal of the other; count in `row`."""
    run = argv[argv.index("--output_dir") + 1]
    with contextlib.ExitStack() as stack:
        both = [
            stack.enter_context(starts.running("stoker", argv, step_delay_s=0.7, host=host))
            for host in hosts
        ]
        wait_until(lambda: not all(child.process.is_alive() for child in both), "neither ends")
        (trains,) = (child for child in both if child.process.is_alive())
        (refused,) = (child for child in both if child is not trains)
        said = refused.output.read_text()
        host = hosts[both.index(trains)]
        assert f"{run} is in use by process {trains.pid} on {host}" in said
        assert "Traceback" not in said
        yield trains
    found = {
        "pairs": 1,
        "second_refused": refused.ending.exit_code == ExitCode.REFUSED,
        "both_wrote": all("  loss " in child.ending.output for child in both),
    }
    row |= {name: row.get(name, 0) + int(value) for name, value in found.items()}
    assert (row["second_refused"], row["both_wrote"]) == (row["pairs"], 0)


def test_a_run_that_ended_has_left_its_directory(starts, pretraining, tmp_path):
    """The lock is also released in a process that continues, such as a notebook."""
    import pretrain

    run = tmp_path / "run"
    assert pretrain.main(pretraining(run)) == ExitCode.DONE
    again = starts.run("stoker", pretraining(run))
    assert again.exit_code == ExitCode.DONE, again.output
    assert f"{run} is finished: nothing is left to do" in again.output
    assert "its last owner is gone" not in again.output
