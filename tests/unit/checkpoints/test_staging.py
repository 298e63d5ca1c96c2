"""Checkpoints staged in memory: private, freed, and not deleted while their process lives."""

import os
import stat
from pathlib import Path

import pytest

from utils.checkpoints import store
from utils.checkpoints.store import STAGED_PREFIX, BackgroundWriter, remove_leftovers


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "MEMORY", tmp_path)
    return tmp_path


def test_a_directory_is_for_its_user_alone_as_long_as_its_process_lives(memory, caplog):
    own = BackgroundWriter("run-1", 3)
    directory = own.make_directory()
    assert directory.parent == memory
    assert directory.name.startswith(f"{STAGED_PREFIX}run-1-3-")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    (directory / "checkpoint-2").mkdir()
    assert own.make_directory() == directory
    assert not list(directory.iterdir()), "what was staged before is gone"
    remove_leftovers()
    assert directory.exists(), "its process lives"
    own.close()
    assert not list(memory.iterdir())
    own.close()
    directory = own.make_directory()
    os.close(own.lock)  # like a kill
    own.directory = None
    remove_leftovers()
    assert not directory.exists()
    assert caplog.text.count("was left in memory by a run that was killed: removed") == 1


def test_what_is_not_ours_is_left_alone(memory, tmp_path, monkeypatch):
    """Another user's directory, a link to one, a file and another program's directory stay."""
    target = tmp_path.parent / f"{tmp_path.name}-target"
    (target / "inner").mkdir(parents=True)
    (memory / f"{STAGED_PREFIX}link").symlink_to(target)
    (memory / f"{STAGED_PREFIX}file").write_text("x")
    (memory / "stoker-42-abc").mkdir()
    remove_leftovers()
    assert (target / "inner").exists()
    assert len(list(memory.iterdir())) == 3
    (memory / f"{STAGED_PREFIX}theirs").mkdir()
    monkeypatch.setattr(store.os, "getuid", lambda: 4242)
    remove_leftovers()
    assert (memory / f"{STAGED_PREFIX}theirs").exists()
    monkeypatch.setattr(store, "memory_room_bytes", lambda: 17)
    assert store.free_shared_memory_bytes() == 17, "the job's memory, not the node's"
    monkeypatch.setattr(store, "MEMORY", Path("/no/such/directory"))
    assert store.free_shared_memory_bytes() == 0
    remove_leftovers()


def test_each_staged_file_is_copied_by_one_rank(monkeypatch):
    """Several ranks may stage a file of one name: its owner copies it, else the first of them."""
    staged = [
        ["model.safetensors", "rng_state_0.pth", "rng_state_1.pth"],
        ["model.safetensors", "rng_state_1.pth", "extra"],
        ["rng_state_0.pth", "extra", "own"],
    ]
    expected = [["model.safetensors", "rng_state_0.pth"], ["rng_state_1.pth", "extra"], ["own"]]
    monkeypatch.setattr(store, "on_every_rank", lambda _action, _group: staged)
    writers = [BackgroundWriter("run-1", rank) for rank in range(3)]
    assert [writer.own_files(Path()) for writer in writers] == expected


@pytest.mark.parametrize(
    ("rooms", "short_of_room"),
    [
        (
            [("n1", 1000, 1021), ("n2", 1000, 1021)],
            None,
        ),  # the size of a rank's files is not known yet
        ([("n1", 400, 900), ("n1", 500, 900), ("n2", 90, 100)], "n1"),
        ([("n1", 400, 900), ("n2", 100, 101)], "n2"),  # a checkpoint may grow a little
    ],
)
def test_each_node_needs_room_for_what_its_own_ranks_write(
    rooms, short_of_room, monkeypatch, caplog
):
    answers = iter([rooms, ["rank 0's directory", *rooms[1:]]])
    monkeypatch.setattr(store, "on_every_rank", lambda _: next(answers))
    directory = BackgroundWriter("run-1", 0).open(7, rooms[0][1], 1000)
    assert directory == ("rank 0's directory" if short_of_room is None else None)
    said = f"is written before training continues: {short_of_room} has "
    assert (said in caplog.text) == (short_of_room is not None)
