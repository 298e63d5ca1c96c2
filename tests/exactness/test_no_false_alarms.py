"""The hang watch raises no false alarm in a run of two ranks that uses many features.

The run takes an hour, or STOKER_WATCH_MINUTES minutes. It evaluates two splits, generates samples,
saves in the background, and stops and resumes every minute. The hang timeout is a few seconds.
"""

import os
import time

import pytest
from launching import CPU_ENVIRONMENT, start_processes, wait_until
from tiny import train_lines

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

MINUTES = float(os.environ.get("STOKER_WATCH_MINUTES", "60"))
TIMEOUT_S = 5
LIFE_S = min(60, 15 * MINUTES)  # seconds until a stop; even a short trial stops and resumes
ENVIRONMENT = CPU_ENVIRONMENT["multi_gpu"] | {"STOKER_TEST_STEP_DELAY_S": "0.5"}


def test_a_run_that_moves_is_left_alone(pretraining, workspace, tmp_path, figures):
    run = tmp_path / "run"
    argv = pretraining(
        run, max_steps=10**6, save_steps=20, save_total_limit=2, async_save=True,
        hang_timeout_s=TIMEOUT_S, eval_steps=10, eval_on_start=True, logging_steps=5,
        eval_data=[f"a={workspace / 'heldout'}", f"b={workspace / 'documents'}"],
        sample_prompts=["t1 t2"], sample_max_new_tokens=8,
    )  # fmt: skip
    until, starts, alarms = time.monotonic() + 60 * MINUTES, 0, []
    while time.monotonic() < until:
        ranks = start_processes("multi_gpu", "pretrain.py", argv, env=ENVIRONMENT)
        journal, starts = run / "metrics.jsonl", starts + 1
        steps = len(train_lines(run)) if journal.exists() else 0
        alive = lambda: all(process.is_alive() for process in ranks.processes)  # noqa: B023, E731
        wait_until(
            lambda: not alive() or (journal.exists() and len(train_lines(run)) > steps),  # noqa: B023
            "no step",
        )
        end = time.monotonic() + min(LIFE_S, max(0, until - time.monotonic()))
        while alive() and time.monotonic() < end:
            time.sleep(1)
        (run / "STOP").touch()
        done = ranks.wait(timeout_s=1800)
        if set(done.codes) != {75} or "made no progress" in done.stdout:
            alarms.append(done.stdout[-6000:])
    figures("no_false_alarms")["stoker"] = {
        "minutes": MINUTES, "hang_timeout_s": TIMEOUT_S, "starts": starts,
        "steps": train_lines(run)[-1]["step"], "alarms": len(alarms),
    }  # fmt: skip
    assert not alarms, alarms[0]
    assert not (run / "hang.txt").exists()
