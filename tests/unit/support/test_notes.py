"""Notes of ranks that ended early: the first one of a rank counts."""

from utils.support.notes import leave_note, leave_verdict, read_notes


def test_the_first_note_of_a_rank_stays_and_without_a_directory_there_is_none(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("STOKER_NOTES_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    leave_note("hung", 76, "in a collective", rank=1)
    leave_note("killed", 76, "by SIGTERM", rank=1)
    leave_note("failed", 1, "RuntimeError: boom")
    found = [(note.rank, note.kind, note.exit_code, note.text) for note in read_notes(tmp_path)]
    assert found == [(1, "hung", 76, "in a collective"), (3, "failed", 1, "RuntimeError: boom")]
    assert {note.host for note in read_notes(tmp_path)} == {"n2"}
    assert {path.name for path in tmp_path.iterdir()} == {"rank-1.json", "rank-3.json"}
    monkeypatch.delenv("STOKER_NOTES_DIR")
    monkeypatch.chdir(tmp_path)
    leave_note("failed", 1, "RuntimeError: boom", rank=4)
    assert not leave_verdict("over", 1)
    assert len(list(tmp_path.iterdir())) == 2
