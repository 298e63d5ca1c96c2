"""A baseline's process: its environment, its last words, its time limit."""

import pytest

from benchmarks.comparisons import turns as comparison
from benchmarks.comparisons.turns import BaselineFailedError, CannotRunHereError, run_process


@pytest.fixture
def run(tmp_path):
    def run(code: str, **variables: str) -> None:
        (tmp_path / "baseline_of_test.py").write_text(code)
        variables["PYTHONPATH"] = str(tmp_path)
        run_process("baseline_of_test", ["argument"], tmp_path, variables)

    return run


def test_a_failure_ends_with_the_last_lines(run):
    with pytest.raises(BaselineFailedError, match=r"^exit code 3: two \| three \| four$"):
        run("print('one\\ntwo\\nthree\\nfour'); raise SystemExit(3)")


def test_what_a_baseline_lacks_is_told_in_its_own_words(run):
    code = "from benchmarks.recording.job import *\nwith saying_why_not():\n    "
    with pytest.raises(CannotRunHereError, match=r"^no such kernel$"):
        run(code + "raise CannotRunError('no such kernel')")


def test_who_does_not_end_is_told_so(run, monkeypatch):
    monkeypatch.setattr(comparison, "LIMIT_S", 1)
    with pytest.raises(BaselineFailedError, match=r"^no end after 1 s: waiting$"):
        run("import time; print('waiting', flush=True); time.sleep(60)")
