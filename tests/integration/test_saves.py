"""Checkpoints that are saved outside of the step schedule, or in the background."""

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from launching import wait_until
from provoked_runs import STEPS, Provoke, assert_the_same_end, touch, trainer_state
from transformers import TrainerCallback

from utils.checkpoints.files import MANIFEST, flush_and_record, read_manifest
from utils.checkpoints.store import MEMORY, STAGED_PREFIX
from utils.config.errors import ExitCode, StorageError
from utils.host.journal_file import read_journal

pytestmark = pytest.mark.slow


def checkpoints(run: Path) -> set[int]:
    return {int(path.parent.name.split("-")[1]) for path in run.glob(f"checkpoint-*/{MANIFEST}")}


def test_a_checkpoint_that_grows_old_is_followed_by_another(start, uninterrupted, tmp_path, capsys):
    """With save_minutes near zero a save is due at every step.

    The best model is still chosen among the checkpoints of the step schedule.
    """
    run, whole = tmp_path / "run", uninterrupted()
    capsys.readouterr()
    assert start(run, save_minutes=1e-9, save_total_limit=100) == ExitCode.DONE
    shown = capsys.readouterr().out
    for step in (1, 2, 3, 5, 6, 7):
        said = f"saving at step {step}, then continuing: 1e-09 minutes since the last checkpoint"
        assert shown.count(said) == 1
    assert checkpoints(run) == set(range(1, STEPS + 1))
    assert trainer_state(run, STEPS)["stateful_callbacks"]["stoker"]["extra_saves"] == [
        1, 2, 3, 5, 6, 7,
    ]  # fmt: skip
    assert_the_same_end(run, whole)


# The held-out loss falls until step 2. The step schedule has no save there.
OVERSHOOTING = {"learning_rate": 0.3, "warmup_steps": 6, "save_best": "true"}


@pytest.mark.parametrize(
    ("event", "step", "nth", "background"),
    [("on_step_begin", 1, 1, "false"), ("on_prediction_step", 2, 3, "true")],
    ids=["evaluation owed", "evaluation broken off"],
)
def test_a_stop_at_a_new_best_changes_nothing(
    event, step, nth, background, start, uninterrupted, tmp_path
):
    """The checkpoint of the stop becomes the best one once the next start has evaluated it."""
    settings = OVERSHOOTING | {"save_total_limit": 2}
    run, whole = tmp_path / "run", uninterrupted(**settings)
    losses, weights = tiny.evaluations(whole, "first"), "model.safetensors"
    assert min(losses, key=losses.__getitem__) == 2
    assert checkpoints(whole) == {2, 4, 8}, "the best one, and the two newest"
    assert (whole / "final" / weights).read_bytes() == (
        whole / "checkpoint-2" / weights
    ).read_bytes()
    settings["async_save"] = background
    assert start(run, Provoke(event, step, touch("STOP"), nth), **settings) == ExitCode.STOPPED
    assert checkpoints(run) == {2}
    assert start(run, Provoke("on_step_begin", 6, touch("STOP")), **settings) == ExitCode.STOPPED
    assert checkpoints(run) == {2, 4, 7}
    assert start(run, **settings) == ExitCode.DONE
    assert trainer_state(run, STEPS)["best_model_checkpoint"] == str(run / "checkpoint-2")
    assert_the_same_end(run, whole)


BACKGROUND = {"async_save": "true"}


class AtEachStep(Provoke):
    """A callback that calls a function at the end of each step, before other callbacks."""

    def __init__(self, action: Callable[[int], None]):
        self.callbacks: list[TrainerCallback] = []
        self.on_step_end = lambda _args, state, _control, **_kwargs: action(state.global_step)


class Slow:
    """Copies in the background that wait for `go_on`, or for some seconds."""

    def __init__(self, monkeypatch, seconds: float = 1800):
        self.go_on, self.running, self.most = threading.Event(), 0, 0
        self.fault: OSError | None = None

        def slow(directory, names, source=None):
            if source is None:
                return flush_and_record(directory, names)
            self.running += 1
            self.most = max(self.most, self.running)
            self.go_on.wait(seconds)
            records = flush_and_record(directory, names, source)
            self.running -= 1
            if self.fault is not None:
                raise self.fault
            return records

        monkeypatch.setattr("utils.checkpoints.store.flush_and_record", slow)


def staged(run: Path) -> list[Path]:
    run_id = json.loads((run / "provenance.json").read_text())["run_id"]
    return list(MEMORY.glob(f"{STAGED_PREFIX}{run_id}-*"))


def digests(run: Path, step: int) -> dict[str, str]:
    files = read_manifest(run / f"checkpoint-{step}").files
    # trainer_state.json and the run's record contain the directory's name, so they differ.
    names = [name for name in files if name != "trainer_state.json" and name[:4] != "run/"]
    return {name: files[name].sha256 for name in names}


def test_what_is_written_in_the_background_is_the_same(start, uninterrupted, tmp_path, capsys):
    run, whole = tmp_path / "run", uninterrupted()
    capsys.readouterr()
    assert start(run, **BACKGROUND) == ExitCode.DONE
    assert capsys.readouterr().out.count(" KiB, written in ") == 2
    for step in (4, STEPS):
        assert digests(run, step) == digests(whole, step)
        state, expected = trainer_state(run, step), trainer_state(whole, step)
        assert state.keys() == expected.keys()
        best = Path(expected["best_model_checkpoint"]).name
        assert state["best_model_checkpoint"] == str(run / best)
        assert state["stateful_callbacks"] == expected["stateful_callbacks"]
    assert_the_same_end(run, whole)
    assert not staged(run), "the memory is given back"
    events = read_journal(run / "metrics.jsonl")
    saves = [event for event in events if event["event"] == "save"]
    assert [save["step"] for save in saves] == [4, STEPS]
    assert all(save["write_s"] > 0 < save["stall_s"] and save["size_bytes"] for save in saves)
    assert events[-1]["event"] == "summary"


def test_training_continues_while_a_checkpoint_is_written(
    start, uninterrupted, tmp_path, monkeypatch
):
    run, whole = tmp_path / "run", uninterrupted()
    slow, seen = Slow(monkeypatch), {}

    def look(step: int) -> None:
        seen[step] = checkpoints(run)
        assert (len(staged(run)) == 1) == (step > 4)
        if step == 7:
            slow.go_on.set()

    assert start(run, AtEachStep(look), **BACKGROUND) == ExitCode.DONE
    assert seen[5] == seen[6] == seen[7] == set(), "checkpoint-4 was not there yet"
    assert checkpoints(run) == {4, STEPS}
    assert slow.most == 1, "never two at once"
    assert_the_same_end(run, whole)


def test_an_error_waits_for_the_checkpoint_before_it(start, tmp_path, monkeypatch):
    run = tmp_path / "run"
    Slow(monkeypatch, seconds=0.7)

    def fail(_provoke):
        raise RuntimeError("the step failed")

    with pytest.raises(RuntimeError, match="the step failed"):
        start(run, Provoke("on_step_begin", 4, fail), **BACKGROUND)
    assert checkpoints(run) == {4}


def test_storage_that_fails_in_the_background_ends_the_run(
    start, uninterrupted, tmp_path, monkeypatch, capsys
):
    """The run ends at the next step; nothing is committed, and older checkpoints are untouched."""
    settings = {"save_steps": 2}
    run, whole = tmp_path / "run", uninterrupted(**settings)
    slow, steps = Slow(monkeypatch), []
    slow.go_on.set()

    def look(step: int) -> None:
        steps.append(step)
        if step == 4:
            slow.fault = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run / "x"))
        if step == 5:
            wait_until(lambda: provoke.callbacks.stop.checkpoints.failed, "no failure is noticed")

    provoke = AtEachStep(look)
    with pytest.raises(StorageError, match=r"No space left on device, writing .*/run"):
        start(run, provoke, **settings, **BACKGROUND)
    assert steps[-1] in (4, 5), "not as late as the next save"
    assert checkpoints(run) == {2}
    monkeypatch.undo()
    assert start(run, **settings, **BACKGROUND) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert f"resuming from {run}/checkpoint-2" in shown
    assert_the_same_end(run, whole)


def test_a_node_without_room_in_memory_saves_as_ever(
    start, uninterrupted, tmp_path, monkeypatch, capsys
):
    run, whole = tmp_path / "run", uninterrupted()
    monkeypatch.setattr("utils.checkpoints.store.free_shared_memory_bytes", lambda: 2**17)
    capsys.readouterr()
    assert start(run, **BACKGROUND) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert "the checkpoint of step 4 is written before training continues: " in shown
    assert "has 128.0 KiB free in /dev/shm, its part takes " in shown
    assert_the_same_end(run, whole)
