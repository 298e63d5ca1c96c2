"""A run in two processes whose second one hangs, fails or dies: it ends soon and says why."""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from launching import CPU_ENVIRONMENT, ROOT, free_port, quiet_environment, run_two_processes

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
    verdict: str
    exit_code: str
    codes: list[int]


@pytest.fixture
def notes(tmp_path) -> Path:
    directory = tmp_path / "notes"
    directory.mkdir()
    return directory


def environment(trouble: str, notes: Path) -> dict[str, str]:
    return {
        "STOKER_TEST_TROUBLE": trouble,
        "STOKER_NOTES_DIR": str(notes),
        "SLURMD_NODENAME": "n7",
    }


def ended(output: str, notes: Path, codes: list[int]) -> Ended:
    end = time.time()
    begins = [float(line.split()[1]) for line in output.splitlines() if line.startswith("trouble")]
    files = {path.name: path.read_text() for path in notes.iterdir()}
    return Ended(
        output,
        end - begins[0] if begins else 0.0,
        {note.rank: note for note in read_notes(notes)},
        files.get("verdict.txt", ""),
        files.get("exit_code", ""),
        codes,
    )


@pytest.fixture
def launch(pretraining, tmp_path, notes) -> Callable[[str], Ended]:
    """Run under accelerate launch, without a hang watch that would end it too."""
    argv = pretraining(tmp_path / "run", hang_timeout_s=0)

    def run(trouble: str) -> Ended:
        env = environment(trouble, notes)
        done = run_two_processes("multi_gpu", SCRIPT, argv, env=env, timeout_s=120)
        assert done.returncode, done.stdout
        return ended(done.stdout, notes, [])

    return run


@pytest.fixture
def start_ranks(pretraining, notes, tmp_path) -> Callable[..., Ended]:
    """Run without a launcher, as tasks of srun: nothing else ends a rank."""
    command = [str(SCRIPT), *pretraining(tmp_path / "run", hang_timeout_s=TIMEOUT_S)]

    def run(trouble: str, left_over: int | None = None) -> Ended:
        port = str(free_port())
        log = tmp_path / "log"
        with log.open("w") as stream:
            ranks = [
                subprocess.Popen(
                    [sys.executable, *command],
                    env=quiet_environment(
                        environment(trouble, notes)
                        | CPU_ENVIRONMENT["multi_gpu"]
                        | {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
                        | {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
                        | {"MASTER_PORT": port}
                    ),
                    cwd=ROOT,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                )
                for rank in ("0", "1")
            ]
            codes = [
                process.wait(timeout=90) if rank != left_over else 0
                for rank, process in enumerate(ranks)
            ]
        seen = ended(log.read_text(), notes, codes)
        if left_over is not None:
            ranks[left_over].kill()
            ranks[left_over].wait()
        return seen

    return run


def test_a_rank_that_hangs_ends_the_run_and_is_named(start_ranks):
    run = start_ranks("sleep:1:3")
    assert run.codes == [76, 76], run.output
    assert run.exit_code == "76\n"
    assert run.verdict.startswith("rank 1 on n7 made no progress for "), run.verdict
    assert ", in tests/integration/troubled_run.py:" in run.verdict
    assert run.verdict.endswith(" in sleep_a_while; the other ranks waited for it.\n")
    assert [run.notes[rank].kind for rank in (0, 1)] == ["hung", "hung"]
    assert f"n7 rank 0  {run.verdict.strip()}" in run.output
    assert "n7 rank 1    File" in run.output, "no stack"
    assert TIMEOUT_S <= run.seconds < TIMEOUT_S + 10


def test_a_rank_that_is_stopped_is_named_by_the_other(start_ranks):
    run = start_ranks("stop:1:3", left_over=1)
    assert run.codes[0] == 76, run.output
    assert run.verdict.startswith("rank 1 on n7: no sign of life, while the others hang.")
    assert "rank 0 on n7 made no progress" in run.verdict
    assert list(run.notes) == [0]
    assert run.seconds < TIMEOUT_S + 10


def test_a_rank_that_fails_ends_the_run_at_once(launch):
    run = launch("raise:1:3")
    assert run.notes[1].kind == "failed"
    assert run.notes[1].text.startswith(
        "RuntimeError: the batch is spoilt (tests/integration/troubled_run.py:"
    )
    assert "n7 rank 1  Traceback (most recent call last):" in run.output
    assert "n7 rank 1  RuntimeError: the batch is spoilt" in run.output
    assert run.seconds < 20


def test_a_rank_that_is_killed_ends_the_run_at_once(launch):
    run = launch("kill:1:3")
    assert 1 not in run.notes
    assert run.seconds < 20


def test_a_full_disk_is_an_ending_of_its_own(start_ranks):
    run = start_ranks("full:0:0")
    assert run.codes[0] == 74, run.output
    assert "storage error on n7" in run.output
    assert (run.notes[0].kind, run.notes[0].exit_code) == ("refused", 74)
    assert "no space (or no inode) is left on the device, writing" in run.notes[0].text
