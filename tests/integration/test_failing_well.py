"""A run in two processes whose second one hangs, fails or dies: it ends soon and says why."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from launching import CPU_ENVIRONMENT, run_processes, start_processes

from utils.support.notes import Note, read_notes

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("troubled_run.py")
TIMEOUT_S = 4


@dataclass
class Ended:
    """How a troubled run ended, and how long after the trouble; codes by rank if it is known."""

    output: str
    seconds: float
    notes: dict[int, Note]
    codes: tuple[int, ...]
    files: dict[str, str]


@pytest.fixture
def run(pretraining, tmp_path) -> Callable[..., Ended]:
    """Run two ranks of which nothing but the run's own watch ends one; or under `torchrun`."""
    notes = tmp_path / "notes"
    notes.mkdir()

    def start(trouble: str, stopped: int | None = None, torchrun: bool = False) -> Ended:
        argv = pretraining(tmp_path / "run", hang_timeout_s=0 if torchrun else TIMEOUT_S)
        env = CPU_ENVIRONMENT["multi_gpu"] | {
            "STOKER_TEST_TROUBLE": trouble,
            "STOKER_NOTES_DIR": str(notes),
            "SLURMD_NODENAME": "n7",
        }
        if torchrun:
            done = run_processes("multi_gpu", SCRIPT, argv, env=env, torchrun=True)
        else:
            ranks = start_processes("multi_gpu", SCRIPT, argv, env=env)
            if stopped is not None:
                ranks.processes[1 - stopped].join(60)
            done = ranks.wait(timeout_s=60, grace_s=30 if stopped is None else 0)
        begins = [
            line.split()[1] for line in done.stdout.splitlines() if line.startswith("trouble")
        ]
        seconds = time.time() - float(begins[0]) if begins else 0.0
        found = {note.rank: note for note in read_notes(notes)}
        files = {path.name: path.read_text() for path in notes.iterdir()}
        return Ended(done.stdout, seconds, found, done.codes, files)

    return start


def test_a_rank_that_hangs_ends_the_run_and_is_named(run):
    seen = run("sleep:1:3")
    assert seen.codes == (76, 76), seen.output
    assert seen.files["exit_code"] == "76\n"
    verdict = seen.files["verdict.txt"]
    assert verdict.startswith("rank 1 on n7 made no progress for "), verdict
    assert ", in tests/integration/troubled_run.py:" in verdict
    assert verdict.endswith(" in sleep_a_while; the other ranks waited for it.\n")
    assert [seen.notes[rank].kind for rank in (0, 1)] == ["hung", "hung"]
    assert f"n7 rank 0  {verdict.strip()}" in seen.output
    assert "n7 rank 1    File" in seen.output, "no stack"
    assert TIMEOUT_S <= seen.seconds < TIMEOUT_S + 10


def test_a_rank_that_is_stopped_is_named_by_the_other(run):
    seen = run("stop:1:3", stopped=1)
    assert seen.codes[0] == 76, seen.output
    verdict = seen.files["verdict.txt"]
    assert verdict.startswith("rank 1 on n7 gave no sign of life (stopped, ")
    assert "n7 rank 0  made no progress" in seen.output
    assert list(seen.notes) == [0]
    assert seen.seconds < TIMEOUT_S + 10


def test_a_rank_that_fails_ends_the_run_at_once(run):
    seen = run("raise:1:3", torchrun=True)
    assert seen.notes[1].kind == "failed"
    assert seen.notes[1].text.startswith(
        "RuntimeError: the batch is spoilt (tests/integration/troubled_run.py:"
    )
    assert "n7 rank 1  Traceback (most recent call last):" in seen.output
    assert "n7 rank 1  RuntimeError: the batch is spoilt" in seen.output
    assert seen.seconds < 20


def test_a_full_disk_is_an_ending_of_its_own(run):
    seen = run("full:0:0")
    assert seen.codes[0] == 74, seen.output
    assert "storage error (1 problem):\n  - n7: " in seen.output
    assert (seen.notes[0].kind, seen.notes[0].exit_code) == ("refused", 74)
    assert "No space left on device, writing" in seen.notes[0].text
