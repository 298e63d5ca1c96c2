"""A run of two ranks names the rank that hangs, fails, dies or is slow, and the reason."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from launching import CPU_ENVIRONMENT, run_processes, start_processes
from tiny import train_lines

from utils.launch.verdict import Note, read_notes

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("troubled_run.py")
TIMEOUT_S = 4


@dataclass
class Ended:
    """The end of a run with trouble: seconds since the trouble, exit codes by rank if known."""

    output: str
    seconds: float
    notes: dict[int, Note]
    codes: tuple[int, ...]
    files: dict[str, str]
    page: str


@pytest.fixture
def run(pretraining, tmp_path) -> Callable[..., Ended]:
    """Return a function that runs two ranks: without an agent that ends them, or by `torchrun`."""
    notes = tmp_path / "notes"
    notes.mkdir()

    def start(
        trouble: str, stopped: int | None = None, torchrun: bool = False, processes: int = 2
    ) -> Ended:
        timeout_s = 0 if torchrun else TIMEOUT_S
        sizes = {"global_batch_size": 2 * processes}
        argv = pretraining(tmp_path / "run", hang_timeout_s=timeout_s, **sizes)
        env = CPU_ENVIRONMENT["multi_gpu"] | {
            "STOKER_TEST_TROUBLE": trouble,
            "STOKER_NOTES_DIR": str(notes),
            "SLURMD_NODENAME": "n7",
        }
        if torchrun:
            done = run_processes("multi_gpu", SCRIPT, argv, env=env, torchrun=True)
        else:
            ranks = start_processes("multi_gpu", SCRIPT, argv, env=env, processes=processes)
            if stopped is not None:
                ranks.processes[1 - stopped].join(60)
            done = ranks.wait(timeout_s=60, grace_s=30 if stopped is None else 0)
        begins = [
            line.split()[1] for line in done.stdout.splitlines() if line.startswith("trouble")
        ]
        seconds = time.time() - float(begins[0]) if begins else 0.0
        found = {note.rank: note for note in read_notes(notes)}
        files = {path.name: path.read_text() for path in notes.iterdir()}
        page = tmp_path / "run" / "hang.txt"
        text = page.read_text() if page.exists() else ""
        return Ended(done.stdout, seconds, found, done.codes, files, text)

    return start


def test_a_rank_that_hangs_ends_the_run_and_is_named(run, tmp_path):
    seen = run("sleep:1:3", processes=3)
    assert seen.codes == (76, 76, 76), seen.output
    assert seen.files["exit_code"] == "76\n"
    verdict = seen.files["verdict.txt"]
    assert verdict.startswith("rank 1 on n7 made no progress for "), verdict
    assert ", in tests/integration/troubled_run.py:" in verdict
    assert verdict.endswith(" in sleep_a_while; the other ranks waited for it.\n")
    assert [seen.notes[rank].kind for rank in (0, 1, 2)] == ["hung"] * 3
    assert f"n7 rank 0  {verdict.strip()}" in seen.output
    assert "n7 rank 1    File" in seen.output, "no stack"
    assert f"n7 rank 0  where each rank stood: {tmp_path / 'run' / 'hang.txt'}" in seen.output
    assert TIMEOUT_S <= seen.seconds < TIMEOUT_S + 12

    head, *parts = seen.page.split("\n\n")
    assert "UTC: the run hung after step 1.\n" + verdict.strip() in head
    under_way, waiting, asleep = parts
    assert "\n    ranks 0, 2 on n7: in #" in under_way, under_way
    assert "\n    rank 1 on n7: in none; completed #" in under_way
    assert "MISMATCH" not in under_way
    assert waiting.startswith(
        "ranks 0, 2 on n7: training, beat 7, waits for other ranks\n  MainThread\n"
    )
    assert " in all_reduce" in waiting.splitlines()[-1]
    assert asleep.startswith(
        "rank 1 on n7: training, beat 7, waits for no other rank\n  MainThread\n"
    )
    assert " in sleep_a_while" in asleep.splitlines()[-1]
    record = json.loads((tmp_path / "run" / "hang" / "rank-2.json").read_text())
    assert not record["collectives"][-1]["retired"], "the one under way"


def test_ranks_in_different_collectives_are_told_apart(run):
    seen = run("part:1:3")
    assert seen.codes == (76, 76), seen.output
    head, under_way, *_ = seen.page.split("\n\n")
    assert head.endswith("in different collectives, see below: that is the cause.")
    group, first, second = under_way.splitlines()[1:4]
    assert group.endswith(": MISMATCH, ranks do different things")
    assert " all_reduce of Long [1]; completed #" in first
    assert " broadcast of Float [7]; completed #" in second


def test_a_rank_that_is_stopped_is_named_by_the_other(run):
    seen = run("stop:1:3", stopped=1)
    assert seen.codes[0] == 76, seen.output
    verdict = seen.files["verdict.txt"]
    assert verdict.startswith("rank 1 on n7 gave no sign of life (stopped, ")
    assert "n7 rank 0  made no progress" in seen.output
    assert list(seen.notes) == [0]
    assert "\nrank 1 on n7: no record (stopped, frozen or gone)\n" in seen.page
    assert seen.seconds < TIMEOUT_S + 10


def test_a_slow_rank_is_named_with_what_it_costs(pretraining, tmp_path):
    steps = 5
    env = {"STOKER_TEST_TROUBLE": f"slow:1:{steps + 1}", "STOKER_TEST_STEP_DELAY_S": "0.2"}
    argv = pretraining(tmp_path / "run", max_steps=3 * steps, logging_steps=steps, save_steps=99)
    env |= CPU_ENVIRONMENT["multi_gpu"] | {"SLURMD_NODENAME": "n7"}
    done = start_processes("multi_gpu", SCRIPT, argv, env=env).wait(timeout_s=60)
    late, slow, equal = train_lines(tmp_path / "run")
    for line in (late, slow):
        assert (line["slowest_rank"], line["slowest_host"]) == (1, "n7")
        # A step takes 0.4 s: a delay of 0.2 s on all ranks, and 0.2 s for rank 1 alone.
        assert line["slowest_cost"] == pytest.approx(0.2 / line["step_time_s"], abs=0.08), line
        assert f"the others wait {line['slowest_cost']:.0%} of a step for it" in done.stdout
    assert late["data_wait_s"] > 0.19 > 0.05 > slow["data_wait_s"]
    assert equal["slowest_cost"] < late["slowest_cost"] / 2  # this machine may be busy
    loud = sum(line["slowest_cost"] > 0.03 for line in (late, slow, equal))
    assert (
        done.stdout.count("rank 1 on n7 is slowest") + done.stdout.count("rank 0 on n7 is") == loud
    )


def test_a_rank_that_fails_ends_the_run_at_once(run):
    seen = run("raise:1:3", torchrun=True)
    assert seen.notes[1].kind == "failed"
    assert seen.notes[1].text.startswith(
        "RuntimeError: the batch is spoilt (tests/integration/troubled_run.py:"
    )
    assert "n7 rank 1  Traceback (most recent call last):" in seen.output
    assert "n7 rank 1  RuntimeError: the batch is spoilt" in seen.output
    assert seen.seconds < 20


def test_a_full_disk_ends_with_74(run):
    seen = run("full:0:0")
    assert seen.codes[0] == 74, seen.output
    assert "storage error (1 problem):\n  - n7: " in seen.output
    assert (seen.notes[0].kind, seen.notes[0].exit_code) == ("refused", 74)
    assert "No space left on device, writing" in seen.notes[0].text
