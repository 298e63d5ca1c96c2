import errno
import shutil

import pytest
from made import RUN, commit, names, write_files

from utils.checkpoints.discovery import resume_point
from utils.config.errors import ConfigurationError, StorageError


def damage(directory, name="optimizer.pt"):
    path = directory / name
    content = bytearray(path.read_bytes())
    content[5] ^= 4
    path.write_bytes(content)


def test_the_newest_committed_one_is_taken_by_its_number(tmp_path):
    """Older ones are not read; names that only look alike are left alone."""
    commit(tmp_path, 9, 10, 2)
    damage(tmp_path / "checkpoint-9")
    write_files(tmp_path, 18).rename(tmp_path / "checkpoint-18-backup")
    (tmp_path / "checkpoint-19").write_text("a file")
    (tmp_path / "checkpoint-20").symlink_to(tmp_path / "checkpoint-2")
    before = names(tmp_path)
    assert resume_point(tmp_path, RUN) == tmp_path / "checkpoint-10"
    assert names(tmp_path) == before


def test_what_was_not_committed_is_set_aside_with_a_log_line(tmp_path, caplog):
    commit(tmp_path, 2, 4)
    write_files(tmp_path, 6)
    write_files(tmp_path, 3)
    assert resume_point(tmp_path, RUN) == tmp_path / "checkpoint-4"
    assert names(tmp_path) == [
        "checkpoint-2", "checkpoint-4", "incomplete.checkpoint-3", "incomplete.checkpoint-6",
    ]  # fmt: skip
    assert f"{tmp_path}/checkpoint-6 was not committed" in caplog.text
    assert "set aside as incomplete.checkpoint-6" in caplog.text


def test_a_run_killed_in_its_first_save_starts_afresh(tmp_path):
    assert resume_point(tmp_path, RUN) is None
    write_files(tmp_path, 6)
    assert resume_point(tmp_path, RUN) is None
    write_files(tmp_path, 6)
    assert resume_point(tmp_path, RUN) is None
    assert names(tmp_path) == ["incomplete.checkpoint-6"]


def test_a_damaged_one_is_set_aside_and_the_one_before_is_taken(tmp_path, caplog):
    for _ in range(2):
        commit(tmp_path, 4, 6)
        damage(tmp_path / "checkpoint-6")
        assert resume_point(tmp_path, RUN) == tmp_path / "checkpoint-4"
    assert names(tmp_path) == [
        "checkpoint-4", "damaged.2.checkpoint-6", "damaged.checkpoint-6",
    ]  # fmt: skip
    assert "checkpoint-6 is damaged (optimizer.pt has other contents)" in caplog.text
    commit(tmp_path, 6)
    (tmp_path / "checkpoint-6").rename(tmp_path / "checkpoint-9")
    assert resume_point(tmp_path, RUN) == tmp_path / "checkpoint-4"
    assert "manifest.json is of step 6" in caplog.text


def test_a_dry_run_reads_small_files_and_moves_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("utils.checkpoints.files.SMALL_BYTES", 100)
    commit(tmp_path, 4, 6)
    write_files(tmp_path, 8)
    damage(tmp_path / "checkpoint-6")
    assert resume_point(tmp_path, RUN, dry_run=True) == tmp_path / "checkpoint-6"
    damage(tmp_path / "checkpoint-6", "trainer_state.json")
    assert resume_point(tmp_path, RUN, dry_run=True) == tmp_path / "checkpoint-4"
    assert f"{tmp_path}/checkpoint-4 is used instead" in caplog.text
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-6", "checkpoint-8"]


def test_all_damaged_is_for_a_person_to_decide(tmp_path):
    commit(tmp_path, 4, 6)
    write_files(tmp_path, 8)
    damage(tmp_path / "checkpoint-4", "model.safetensors")
    (tmp_path / "checkpoint-6" / "manifest.json").write_text("")
    with pytest.raises(StorageError, match=r"(?s)checkpoint-6: .*checkpoint-4: .*step 0") as error:
        resume_point(tmp_path, RUN)
    assert len(error.value.problems) == 3
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-6", "checkpoint-8"], "nothing moved"


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    commit(tmp_path, 4)
    with pytest.raises(ConfigurationError, match=r"checkpoint of another run \(run-1, not run-2\)"):
        resume_point(tmp_path, "run-2")


@pytest.mark.parametrize("prefix", ["deleting.", "resharded."])
def test_a_leftover_that_cannot_be_deleted_ends_no_start(prefix, tmp_path, monkeypatch, caplog):
    commit(tmp_path, 4)
    write_files(tmp_path, 2).rename(tmp_path / f"{prefix}checkpoint-2")
    monkeypatch.setattr(shutil, "rmtree", refuse)
    for _ in range(2):
        caplog.clear()
        assert resume_point(tmp_path, RUN) == tmp_path / "checkpoint-4"
        assert "checkpoint-2 could not be deleted: [Errno 5] Input/output error" in caplog.text
    monkeypatch.undo()
    assert resume_point(tmp_path, RUN) == tmp_path / "checkpoint-4"
    assert names(tmp_path) == ["checkpoint-4"]


def refuse(*_args, **_options):
    raise OSError(errno.EIO, "Input/output error")
