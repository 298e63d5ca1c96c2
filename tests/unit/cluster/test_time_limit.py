import datetime
import logging

import pytest

from utils.cluster.time_limit import job_end_time


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """A squeue that answers as told and writes down what it was asked."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "123")

    def answers(text: str, code: int = 0):
        path = tmp_path / "squeue"
        path.write_text(
            f"#!/bin/sh\necho \"$@\" >> '{tmp_path}/asked'\necho '{text}'\nexit {code}\n"
        )
        path.chmod(0o755)
        return tmp_path / "asked"

    return answers


def test_outside_of_a_job_there_is_no_end(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert job_end_time() is None


def test_the_environment_says_it(monkeypatch, squeue):
    asked = squeue("2030-01-01T00:00:00")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1893456000")
    assert job_end_time() == 1893456000.0
    assert not asked.exists()


def test_else_squeue_is_asked(squeue):
    asked = squeue("2030-01-02T03:04:05")
    assert job_end_time() == datetime.datetime(2030, 1, 2, 3, 4, 5).timestamp()
    assert asked.read_text() == "--noheader --jobs=123 --format=%e\n"


@pytest.mark.parametrize(("text", "code"), [("N/A", 0), ("", 0), ("no such job", 1)])
def test_an_unknown_end_is_said(text, code, squeue, caplog):
    squeue(text, code)
    with caplog.at_level(logging.WARNING):
        assert job_end_time() is None
    (record,) = caplog.records
    assert "the end of the time limit is unknown" in record.message
    assert "signals and STOP still work" in record.message


def test_without_squeue_the_end_is_unknown(squeue, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert job_end_time() is None
    assert "squeue" in caplog.text


def test_nonsense_in_the_environment_is_said(squeue, monkeypatch, caplog):
    squeue("2030-01-02T03:04:05")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "soon")
    assert job_end_time() == datetime.datetime(2030, 1, 2, 3, 4, 5).timestamp()
    assert "SLURM_JOB_END_TIME is 'soon'" in caplog.text
