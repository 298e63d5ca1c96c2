"""A run of two ranks names the rank that hangs, fails, dies or is slow, and the reason.

A refusal is printed below the traceback with which torchrun and `accelerate launch` end.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from launching import CONFIGS, ROOT, free_port, quiet_environment, start_processes
from tiny import train_lines

from utils.host.run_lock import run_owners
from utils.launch.verdict import Note, read_notes
from utils.observe.history import read_run
from utils.observe.hours import hours_of

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("troubled_run.py")
TIMEOUT_S = 8  # of the watchdog; a healthy step must take less time, on a busy machine too
HANG_LIMIT_S = 1800


@dataclass
class Ended:
    """The end of a run with trouble: exit codes by rank, and what the ranks left."""

    output: str
    codes: tuple[int, ...]
    notes: dict[int, Note]
    files: dict[str, str]
    page: str


@pytest.fixture
def run(pretraining, tmp_path) -> Callable[..., Ended]:
    """Return a function that runs ranks without an agent that ends them; one may be `stopped`."""
    notes = tmp_path / "notes"

    def start(trouble: str, stopped: int | None = None, processes: int = 2) -> Ended:
        shutil.rmtree(notes, ignore_errors=True)
        notes.mkdir()
        sizes = {"global_batch_size": 2 * processes}
        argv = pretraining(tmp_path / "run", hang_timeout_s=TIMEOUT_S, **sizes)
        env = {
            "STOKER_TEST_TROUBLE": trouble, "STOKER_NOTES_DIR": str(notes), "SLURMD_NODENAME": "n7",
        }  # fmt: skip
        ranks = start_processes("multi_gpu", SCRIPT, argv, env=env, processes=processes)
        if stopped is not None:
            ranks.processes[1 - stopped].join(HANG_LIMIT_S)
        done = ranks.wait(HANG_LIMIT_S, grace_s=HANG_LIMIT_S if stopped is None else 0)
        found = {note.rank: note for note in read_notes(notes)}
        files = {path.name: path.read_text() for path in notes.iterdir()}
        pages = [path.read_text() for path in (tmp_path / "run").glob("hang.txt")]
        return Ended(done.stdout, done.codes, found, files, "".join(pages))

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

    head, *parts = seen.page.split("\n\n")
    assert "UTC: the run hung after step 1.\n" + verdict.strip() in head
    under_way, waiting, asleep = parts
    assert "\n    ranks 0, 2 on n7: in #" in under_way, under_way
    assert "\n    rank 1 on n7: in none; completed #" in under_way
    assert "MISMATCH" not in under_way
    for part, ranks, waits, place in (
        (waiting, "ranks 0, 2", "waits for other ranks", " in all_reduce"),
        (asleep, "rank 1", "waits for no other rank", " in sleep_a_while"),
    ):
        assert part.startswith(f"{ranks} on n7: training, beat 7, {waits}\n  MainThread\n")
        assert place in part.splitlines()[-1]
    (owner,) = run_owners(tmp_path / "run")
    hung_s = owner.spent["hanging"]
    assert hung_s >= TIMEOUT_S / 2, "rank 0 waits at least half of it"
    hours = hours_of(read_run(tmp_path / "run"))
    assert hours.parts["hangs"] == pytest.approx(3 * hung_s / 3600)
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
    assert seen.files["verdict.txt"].startswith("rank 1 on n7 gave no sign of life (stopped, ")
    assert "n7 rank 0  made no progress" in seen.output
    assert list(seen.notes) == [0]
    assert "\nrank 1 on n7: no record (stopped, frozen or gone)\n" in seen.page


def test_a_rank_that_fails_ends_the_run_and_a_full_disk_with_74(run):
    seen = run("raise:1:3")
    assert 0 not in seen.codes, "the other rank loses its peer"
    assert seen.notes[1].kind == "failed"
    failure = "RuntimeError: the batch is spoilt"
    assert seen.notes[1].text.startswith(f"{failure} (tests/integration/troubled_run.py:")
    assert "n7 rank 1  Traceback (most recent call last):" in seen.output
    assert f"n7 rank 1  {failure}" in seen.output

    seen = run("full:0:0")
    assert seen.codes[0] == 74, seen.output
    assert "storage error:\n  - n7: " in seen.output
    assert (seen.notes[0].kind, seen.notes[0].exit_code) == ("refused", 74)
    assert "No space left on device, writing" in seen.notes[0].text


def test_a_slow_rank_is_named_with_what_it_costs(pretraining, tmp_path):
    """The delay of 0.8 s is far above the differences of two ranks on a busy machine."""
    steps = 3
    argv = pretraining(tmp_path / "run", max_steps=3 * steps, logging_steps=steps, save_steps=99)
    env = {"STOKER_TEST_TROUBLE": f"slow:1:{steps + 1}", "SLURMD_NODENAME": "n7"}
    shown = start_processes("multi_gpu", SCRIPT, argv, env=env).wait(HANG_LIMIT_S).succeeded()
    late, slow, equal = train_lines(tmp_path / "run")
    for line in (late, slow):
        assert (line["slowest_rank"], line["slowest_host"]) == (1, "n7")
        assert line["slowest_cost"] > 0.4, line
        assert f"the others wait {line['slowest_cost']:.0%} of a step for it" in shown
    assert late["data_wait_s"] > 0.79
    assert slow["data_wait_s"] < 0.4
    loud = sum(line["slowest_cost"] > 0.03 for line in (late, slow, equal))
    assert shown.count(" on n7 is slowest") == loud


REFUSING_SCRIPT = """
import os, sys, time
from utils.config.errors import ConfigurationError
from utils.launch.script import run_script

def main():
    rank, trouble = os.environ.get("RANK", "0"), sys.argv[1]
    if trouble == "all":
        raise ConfigurationError(["learning_rate -1: it must be above 0", "no model"])
    if rank == trouble:
        raise {"0": KeyError("lost"), "1": OSError(28, "No space left on device", "ckpt")}[rank]
    time.sleep(3600)  # until torchrun ends this rank

sys.exit(run_script(main))
"""
REFUSED = [
    "configuration error:", "- learning_rate -1: it must be above 0", "- no model",
]  # fmt: skip
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port"]
ACCELERATE = ["-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port"]
SEVERAL = ["--config_file", str(CONFIGS / "cpu.yaml"), "--num_processes=2"]
ONE = ["--config_file", str(CONFIGS / "single_gpu.yaml")]


@pytest.mark.parametrize(
    ("launcher", "options", "trouble", "said"),
    [
        (TORCHRUN, [], "1", ["rank 1  storage error: ", "No space left on device, writing ckpt"]),
        (TORCHRUN, [], "0", ["KeyError: 'lost' ("]),
        (ACCELERATE, SEVERAL, "all", REFUSED),
        (ACCELERATE, ONE, "all", REFUSED),
    ],
    ids=["torchrun rank 1", "torchrun unforeseen", "accelerate", "accelerate of one"],
)
def test_what_went_wrong_is_in_the_last_lines(launcher, options, trouble, said, tmp_path):
    (script := tmp_path / "script.py").write_text(REFUSING_SCRIPT)
    words = [sys.executable, *launcher, str(free_port()), *options, str(script), trouble]
    done = subprocess.run(
        words, env=quiet_environment(), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, "the launchers' own code"
    lines = [line for line in done.stderr.splitlines() if set(line) != {"="}]
    last = lines[-len(said) :] if said is REFUSED else lines[-1:] * len(said)
    assert all(text in line for text, line in zip(said, last, strict=True)), done.stderr
    assert "Traceback" not in "\n".join(last)
    assert "Traceback" in "\n".join(lines[: -len(said)]), "the launcher's own is above"
