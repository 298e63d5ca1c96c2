"""A run of two ranks is killed again and again at random times. Each start resumes without help.

Most starts are forked from a process that has imported everything, so that kills hit the run and
not the imports. Some are started by accelerate's launcher, which is killed with its ranks.
"""

import collections
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from kernel_calls import Starts
from kill_scenes import committed, digest
from launching import (
    CPU_ENVIRONMENT,
    ROOT,
    free_port,
    launch_options,
    processes_of,
    quiet_environment,
    wait_until,
)

pytestmark = pytest.mark.slow

STEPS = 36
ALMOST_DONE = 18  # no kills after this step, because the run could end first
MOST_STEPS = 8  # between two kills
START_UP_S = 2.0
# Save at each step, so that many kills hit a save.
SETTINGS = {"max_steps": STEPS, "save_steps": 1, "save_total_limit": 2}
STEP_DELAY_S = 0.1
EXACT = [
    "final/model.safetensors",
    *(f"checkpoint-{STEPS}/{name}" for name in ("model.safetensors", "optimizer.pt")),
    *(f"checkpoint-{STEPS}/rng_state_{rank}.pth" for rank in range(2)),
]
# Number of kills of one rank or both ranks, and number of kills of a launcher with its ranks.
SAMPLED, EXHAUSTIVE = (3, 1), (50, 10)


def wait_for_steps(log: Path, steps: int, ended: Callable[[], bool]) -> None:
    """Wait until a run has logged this many more steps, or has ended."""

    def logged() -> int:
        return log.read_bytes().count(b'"train"') if log.exists() else 0

    enough = logged() + steps
    wait_until(lambda: logged() >= enough or ended(), "the run does not start")


def kill_ranks(
    starts: Starts, argv: list[str], run: Path, chance: random.Random, victims: list[int]
) -> str:
    """Start two ranks and kill `victims` at a random time, also during start-up; return the log."""
    steps = chance.randrange(-2, MOST_STEPS)
    with starts.ranks(argv, step_delay_s=STEP_DELAY_S) as ranks:
        if steps > 0:
            journal = run / "metrics.jsonl"
            wait_for_steps(journal, steps, lambda: not all(r.process.is_alive() for r in ranks))
        time.sleep(chance.uniform(0, 3 * STEP_DELAY_S if steps > 0 else START_UP_S))
        for rank in victims:
            ranks[rank].process.kill()
    killed = [rank.ending.exit_code == -signal.SIGKILL for rank in ranks]
    assert [rank for rank in range(2) if killed[rank]] == victims, ranks[0].ending.output
    return ranks[0].ending.output


def kill_launcher(argv: list[str], run: Path, steps: int) -> str:
    """Let accelerate launch the run; kill all its processes after some steps."""
    command = [
        sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch",
        *launch_options("multi_gpu", 2, free_port()), "pretrain.py", *argv,
    ]  # fmt: skip
    slow = {"STOKER_TEST_STEP_DELAY_S": str(STEP_DELAY_S)}
    environment = quiet_environment(CPU_ENVIRONMENT["multi_gpu"] | slow)
    log = run.with_suffix(".log")
    with log.open("w") as file:
        launcher = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
        wait_for_steps(run / "metrics.jsonl", steps, lambda: launcher.poll() is not None)
        for process in processes_of(run):  # ranks are in other sessions than the launcher
            os.kill(int(process.name), signal.SIGKILL)
        launcher.wait()
    return log.read_text()


def test_the_end_is_the_same_after_random_kills(pretraining, models, tmp_path, exhaustive, figures):
    starts = Starts(tmp_path)
    settings = SETTINGS | {"model_config": models / "dropout_0.1" / "config.json"}
    whole = tmp_path / "whole"
    assert ends_as(starts, pretraining(whole, **settings), whole, whole)
    kills, under_launcher = EXHAUSTIVE if exhaustive else SAMPLED
    chance = random.Random(0)
    counts: collections.Counter[str] = collections.Counter()
    failures: list[str] = []
    while counts["kills"] < kills:
        run = tmp_path / f"run-{counts['runs']}"
        argv = pretraining(run, **settings)
        before = committed(run)
        if counts["kills"] % (kills // under_launcher) == 1:
            said = kill_launcher(argv, run, chance.randrange(1, MOST_STEPS))
            counts["with_the_launcher"] += 1
        else:
            victims = chance.choice([[0], [1], [0, 1]])
            said = kill_ranks(starts, argv, run, chance, victims)
            counts["of_" + "_and_".join(f"rank_{rank}" for rank in victims)] += 1
        counts["kills"] += 1
        if re.search("(configuration|storage|cluster) error|no progress", said):
            failures.append(said)
        found = re.search(r"resuming from \S+/checkpoint-(\d+)", said)
        if found:  # this start lived until it had searched for a checkpoint
            assert [int(found[1])] == before[-1:], said
            counts["resumed"] += 1
        left = committed(run)
        assert len(left) >= min(2, len(before)), f"{before} {left} {said}"
        assert left[-1:] >= before[-1:], f"{before} {left} {said}"
        if left[-1:] >= [ALMOST_DONE] or counts["kills"] == kills:
            counts["runs"] += 1
            counts["runs_ended_as_the_undisturbed_one"] += ends_as(starts, argv, run, whole)
    figures("random_kills")["stoker"] = {**counts, "starts_that_failed": len(failures)}
    assert not failures, failures[0]
    assert counts["runs_ended_as_the_undisturbed_one"] == counts["runs"]


def ends_as(starts: Starts, argv: list[str], run: Path, whole: Path) -> bool:
    """Start a run until its end; return whether it equals the undisturbed run, bit for bit."""
    with starts.ranks(argv) as ranks:
        pass
    assert [rank.ending.exit_code for rank in ranks] == [0, 0], ranks[0].ending.output
    digests = [(digest(run / name), digest(whole / name)) for name in EXACT]
    same = all(mine == undisturbed is not None for mine, undisturbed in digests)
    return same and tiny.losses(run) == tiny.losses(whole)
