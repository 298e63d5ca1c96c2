"""Notes of ranks that ended early."""

from utils.config.errors import ExitCode
from utils.support.notes import leave_note, leave_verdict, read_notes


def test_a_note_says_who_ended_where_and_why(tmp_path, monkeypatch):
    monkeypatch.setenv("STOKER_NOTES_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    leave_note("failed", 1, "RuntimeError: boom")
    [note] = read_notes(tmp_path)
    assert (note.kind, note.exit_code, note.text) == ("failed", 1, "RuntimeError: boom")
    assert (note.rank, note.host) == (3, "n2")


def test_the_first_note_of_a_rank_stays_and_notes_come_in_order(tmp_path, monkeypatch):
    monkeypatch.setenv("STOKER_NOTES_DIR", str(tmp_path))
    leave_note("hung", ExitCode.LOST_RANK, "in a collective", rank=1)
    leave_note("killed", ExitCode.LOST_RANK, "by SIGTERM", rank=1)
    leave_note("refused", ExitCode.REFUSED, "no data", rank=0)
    assert [(note.rank, note.text) for note in read_notes(tmp_path)] == [
        (1, "in a collective"),
        (0, "no data"),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.json", "rank-1.json"]


def test_without_a_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv("STOKER_NOTES_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    leave_note("failed", 1, "RuntimeError: boom")
    assert not leave_verdict("over", 1)
    assert list(tmp_path.iterdir()) == []


def test_the_first_verdict_of_a_job_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("STOKER_NOTES_DIR", str(tmp_path))
    assert leave_verdict("rank 1 on n2 hung", ExitCode.LOST_RANK)
    assert not leave_verdict("a rank failed", 1)
    assert (tmp_path / "verdict.txt").read_text() == "rank 1 on n2 hung\n"
    assert (tmp_path / "exit_code").read_text() == "76\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exit_code", "verdict.txt"]
