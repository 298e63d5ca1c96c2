import datetime

import pytest

from utils.launch.slurm import job_end_time


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """A squeue that answers as told, and refuses to be asked anything else."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "123")

    def answers(text: str, code: int = 0):
        path = tmp_path / "squeue"
        path.write_text(
            '#!/bin/sh\n[ "$*" = "--noheader --jobs=123 --format=%e" ] || exit 9\n'
            f"echo '{text}'\nexit {code}\n"
        )
        path.chmod(0o755)

    return answers


def test_the_environment_knows_the_end_else_squeue_is_asked(monkeypatch, squeue, caplog):
    squeue("2030-01-02T03:04:05")
    assert job_end_time() == datetime.datetime(2030, 1, 2, 3, 4, 5).timestamp()
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1893456000")
    assert job_end_time() == 1893456000.0
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    monkeypatch.delenv("SLURM_JOB_ID")
    assert job_end_time() is None  # no job
    assert not caplog.records


@pytest.mark.parametrize(("text", "code"), [("N/A", 0), ("", 0), ("no such job", 1), ("", 127)])
def test_an_unknown_end_is_logged(text, code, squeue, caplog, monkeypatch, tmp_path):
    if code == 127:
        monkeypatch.setenv("PATH", str(tmp_path))  # no squeue at all
    else:
        squeue(text, code)
    assert job_end_time() is None
    (record,) = caplog.records
    assert "the end of the time limit is unknown (squeue" in record.message
    assert "signals and STOP still work" in record.message
