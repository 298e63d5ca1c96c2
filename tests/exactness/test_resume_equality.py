"""A run cut at any step and resumed is the uninterrupted run, bit for bit, in every configuration.

What is compared, of every step: loss, gradient norm, learning rate, tokens seen, epoch; every
evaluation; the best metric and checkpoint; at the end every weight, all of the optimizer's state,
the scheduler's and the random states. Nothing is compared with a tolerance.
"""

import concurrent.futures
import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import stock_trainer
from cut_every_step import outcomes
from launching import run_processes
from resumed_runs import (
    CONFIGS,
    RANKS,
    STEPS,
    Case,
    add_models,
    covering,
    every_case,
    largest_difference,
    outcome,
)

import pretrain
from utils.config.errors import ExitCode

pytestmark = pytest.mark.slow

EVERY_CUT = tuple(range(1, STEPS))
SAMPLE = {
    "single": ([Case("single", "lora", 0.1, 4, 2)], (1, 4, 7)),
    "ddp": ([Case("ddp", "sft", 0.1, 1, 0)], (1, 4, 6)),
    "fsdp2": ([Case("fsdp2", "pretrain", 0.1, 1, 0)], (2, 5)),
    "zero2": ([Case("zero2", "pretrain", 0.0, 4, 0)], (3,)),
}
HERE = Path(__file__).parent
FIGURES = "resume_equality"


@pytest.fixture(scope="module")
def models(workspace, base_model):
    add_models(workspace, base_model)
    return workspace


def launched(strategy: str, cases, cuts, workspace: Path, root: Path) -> dict[str, dict]:
    """The outcomes of cases in several processes, by case and cut."""
    plan = {
        "workspace": str(workspace),
        "root": str(root),
        "cases": [asdict(case) for case in cases],
        "cuts": list(cuts),
    }
    (root / "plan.json").write_text(json.dumps(plan))
    done = run_processes(
        CONFIGS[strategy],
        HERE / "cut_every_step.py",
        [str(root / "plan.json")],
        processes=RANKS[strategy],
        env=driver_environment(),
        timeout_s=3600,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return {case.name: json.loads((root / f"{case.name}.json").read_text()) for case in cases}


def driver_environment() -> dict[str, str]:
    """What lets a driver in this folder import its neighbours."""
    from launching import ROOT, STRATEGIES

    folders = [STRATEGIES, ROOT, ROOT / "tests" / "integration"]
    return {"PYTHONPATH": ":".join(map(str, folders)), "TOKENIZERS_PARALLELISM": "false"}


@pytest.mark.parametrize("strategy", list(RANKS))
def test_resumed_equals_uninterrupted(strategy, models, tmp_path, exhaustive, figures):
    cases, cuts = (every_case(strategy), EVERY_CUT) if exhaustive else SAMPLE[strategy]
    if strategy == "single":
        found = {case.name: outcomes(case, models, tmp_path, cuts) for case in cases}
    else:
        found = launched(strategy, cases, cuts, models, tmp_path)
    unequal, differences = [], {"loss": 0.0, "grad_norm": 0.0}
    for name, runs in found.items():
        whole = runs.pop("whole")
        for step, run in runs.items():
            for part, values in whole.items():
                if run[part] != values:
                    unequal.append(f"{name} cut at step {step}: {part}")
            for metric, largest in differences.items():
                different = largest_difference(run, whole, metric)
                differences[metric] = max(largest, different)
    figures(FIGURES)[strategy] = {
        "configurations": len(cases),
        "cuts_of_each": len(cuts),
        "resumed_runs": len(cases) * len(cuts),
        "unequal": len(unequal),
        "largest_loss_difference": differences["loss"],
        "largest_grad_norm_difference": differences["grad_norm"],
    }
    assert not unequal


def test_the_configurations_hold_every_pair_of_values():
    """What `make test` takes one of each from, and would be enough of."""
    cases = [case for strategy in RANKS for case in covering(strategy)]
    assert len(cases) == 24
    assert set(cases) <= {case for strategy in RANKS for case in every_case(strategy)}


def test_plain_trainer_on_the_same_rows(models, tmp_path, exhaustive, figures):
    """What the same cuts do to transformers' Trainer with its own loader and its own resume."""
    choices = (
        [(dropout, accumulation, workers) for dropout in (0.0, 0.1) for accumulation in (1, 4)
         for workers in (0, 2)]
        if exhaustive
        else [(0.1, 4, 0)]
    )  # fmt: skip
    cuts = EVERY_CUT if exhaustive else (3, 6)
    found = [
        stock_trainer.differences(models, tmp_path / f"stock-{index}", cuts, STEPS, *choice)
        for index, choice in enumerate(choices)
    ]
    resumed = [difference for differences in found for difference in differences]
    assert len(resumed) == len(choices) * len(cuts)
    figures(FIGURES)["plain_trainer"] = {
        "configurations": len(choices),
        "resumed_runs": len(resumed),
        "unequal": sum(1 for difference in resumed if any(difference.values())),
        "largest_loss_difference": max(difference["loss"] for difference in resumed),
        "largest_grad_norm_difference": max(difference["grad_norm"] for difference in resumed),
    }


def pytest_generate_tests(metafunc):
    """Real processes, killed and stopped, take a minute each: all of them when exhaustive."""
    if "killed" in metafunc.fixturenames:
        strategies = list(RANKS) if metafunc.config.getoption("--exhaustive") else ["single"]
        metafunc.parametrize("killed", strategies)


def test_killed_and_then_stopped_equals_uninterrupted(killed, models, tmp_path, figures):
    """SIGKILL to one rank between two checkpoints, then STOP in the next life of the run.

    What a launcher did with one rank is what `python pretrain.py` does: the undisturbed starts of
    one rank are made here, without a launcher.
    """
    case, ranks = Case(killed, "pretrain", 0.1, 1, 0), RANKS[killed]
    whole, run = tmp_path / "whole", tmp_path / "run"

    def start(directory: Path, **env: str):
        argv = case.argv(models, directory, save_steps=3)
        config = CONFIGS[killed]
        return run_processes(config, "pretrain.py", argv, processes=ranks, env=env, timeout_s=600)

    def start_undisturbed(directory: Path) -> None:
        if ranks == 1:
            assert pretrain.main(case.argv(models, directory, save_steps=3)) == ExitCode.DONE
        else:
            done = start(directory)
            assert done.returncode == 0, done.stdout[-6000:]

    start_undisturbed(whole)
    done = start(run, STOKER_TEST_KILL_RANK_AT_STEP=f"{ranks - 1}:5")
    assert done.returncode != 0
    assert "Signal 9 (SIGKILL)" in done.stdout
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-3"]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        resumed = pool.submit(start, run, STOKER_TEST_STEP_DELAY_S="0.8")
        touch_stop_once_resumed(run)
        done = resumed.result()
    assert f"resuming from {run / 'checkpoint-3'}" in done.stdout, done.stdout[-6000:]
    assert f"exitcode  : {int(ExitCode.STOPPED)}" in done.stdout
    assert not (run / "final").exists()
    start_undisturbed(run)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    first, second = (line["step"] for line in lines if line["event"] == "resumed")
    assert first == 3 < second
    assert outcome(run) == outcome(whole)
    figures(FIGURES).setdefault("killed_and_stopped", []).append(killed)


def touch_stop_once_resumed(run: Path) -> None:
    give_up_at = time.monotonic() + 300
    journal = run / "metrics.jsonl"
    while '"event": "resumed"' not in journal.read_text():
        assert time.monotonic() < give_up_at, "the run does not go on"
        time.sleep(0.05)
    (run / "STOP").touch()
