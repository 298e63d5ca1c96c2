"""A run that is interrupted at any step and resumed equals the uninterrupted run, bit for bit.

The tests compare loss, gradient norm, learning rate, tokens seen and epoch of every step; every
evaluation; the best metric and checkpoint; and at the end all weights, optimizer and scheduler
states and random states. No comparison has a tolerance.
"""

import json
import signal
from dataclasses import asdict
from pathlib import Path

import pytest
from launching import CPU_ENVIRONMENT, run_processes, start_processes, wait_until
from rank_driver import drive, found
from resumed_runs import CONFIGS, RANKS, STEPS, Case, every_case, largest_differences, outcome
from stock_trainer import METRICS

import pretrain
from utils.config.errors import ExitCode

pytestmark = pytest.mark.slow
EXHAUSTIVE = pytest.mark.exhaustive

EVERY_CUT = tuple(range(1, STEPS))
SAMPLE = {
    "single": ([Case("single", "lora", 0.1, 4, 2)], (1, 4, 7)),
    "ddp": ([Case("ddp", "sft", 0.1, 1, 0)], (4,)),
    "fsdp2": ([Case("fsdp2", "pretrain", 0.1, 1, 0)], (5,)),
    "zero2": ([Case("zero2", "pretrain", 0.0, 4, 0)], (3,)),
}
FIGURES = "resume_equality"


@pytest.mark.parametrize("strategy", list(RANKS))
def test_resumed_equals_uninterrupted(strategy, models, tmp_path, exhaustive, figures):
    cases, cuts = (every_case(strategy), EVERY_CUT) if exhaustive else SAMPLE[strategy]
    starts = [
        {"case": asdict(case), "changes": {}, "cut": None, "run": str(tmp_path / case.name)}
        for case in cases
    ]
    resumed = [
        whole | {"cut": [whole["run"], step], "run": f"{whole['run']}-cut-{step}", "remove": True}
        for whole in starts
        for step in cuts
    ]
    drive(starts + resumed, strategy, RANKS[strategy], models, tmp_path)
    pairs = [(found({"run": start["cut"][0]}), found(start)) for start in resumed]
    unequal = [
        f"{start['run']}: {part}"
        for start, (whole, run) in zip(resumed, pairs, strict=True)
        for part, values in whole.items()
        if run[part] != values
    ]
    figures(FIGURES)[strategy] = {
        "configurations": len(cases),
        "cuts_of_each": len(cuts),
        "resumed_runs": len(cases) * len(cuts),
        "unequal": len(unequal),
        **largest_differences(pairs, METRICS),
    }
    assert not unequal


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=EXHAUSTIVE)])
def test_plain_trainer_on_the_same_rows(ranks, models, tmp_path, exhaustive, figures):
    """Measure the same interruptions with transformers' Trainer, its own loader and resume."""
    cases = every_case("ddp") if exhaustive else [Case("ddp", "lora", 0.1, 4, 0)]
    cuts = EVERY_CUT if exhaustive else (3, 6)
    items = []
    for case in cases:
        whole = str(tmp_path / case.name)
        settings = {
            "max_steps": STEPS,
            "kind": case.kind,
            "dropout": case.dropout,
            "gradient_accumulation_steps": case.accumulation,
            "dataloader_num_workers": case.workers,
        }
        items.append({"run": whole, "cut": None, **settings})
        items += [{"run": f"{whole}-{cut}", "cut": [whole, cut], **settings} for cut in cuts]
    drive(items, "single" if ranks == 1 else "ddp", ranks, models, tmp_path)
    pairs = [(found({"run": item["cut"][0]}), found(item)) for item in items if item["cut"]]
    assert len(pairs) == len(cases) * len(cuts)
    differences = [largest_differences([pair], METRICS) for pair in pairs]
    unequal = [
        whole["checkpoint"] != resumed["checkpoint"] or any(different.values())
        for (whole, resumed), different in zip(pairs, differences, strict=True)
    ]
    figures(FIGURES)["plain_trainer" + (", ddp" if ranks > 1 else "")] = {
        "configurations": len(cases),
        "cuts_of_each": len(cuts),
        "resumed_runs": len(pairs),
        "unequal": sum(unequal),
        **largest_differences(pairs, METRICS),
    }


# Each case kills and stops real processes, which takes a minute.
@pytest.mark.parametrize(
    "killed", ["single", *(pytest.param(n, marks=EXHAUSTIVE) for n in RANKS if n != "single")]
)
def test_killed_and_then_stopped_equals_uninterrupted(killed, models, tmp_path, figures):
    """Send SIGKILL to one rank between two checkpoints, then STOP in the next start.

    Undisturbed starts of one rank run in this process without a launcher, because a launcher with
    one rank does the same as `python pretrain.py`.
    """
    case, ranks = Case(killed, "pretrain", 0.1, 1, 0), RANKS[killed]
    whole, run = tmp_path / "whole", tmp_path / "run"

    def start(directory: Path, **env: str):
        argv = case.argv(models, directory, save_steps=3)
        config = CONFIGS[killed]
        return run_processes(config, "pretrain.py", argv, processes=ranks, env=env)

    def start_undisturbed(directory: Path) -> None:
        if ranks == 1:
            assert pretrain.main(case.argv(models, directory, save_steps=3)) == ExitCode.DONE
        else:
            done = start(directory)
            assert done.returncode == 0, done.stdout[-6000:]

    start_undisturbed(whole)
    done = start(run, STOKER_TEST_KILL_RANK_AT_STEP=f"{ranks - 1}:5")
    assert done.returncode != 0
    assert -signal.SIGKILL in done.codes
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-3"]
    slow = {**CPU_ENVIRONMENT[CONFIGS[killed]], "STOKER_TEST_STEP_DELAY_S": "0.8"}
    argv = case.argv(models, run, save_steps=3)
    resumed = start_processes(CONFIGS[killed], "pretrain.py", argv, env=slow, processes=ranks)
    resumes = '"event": "resumed"'
    journal = run / "metrics.jsonl"
    wait_until(lambda: resumes in journal.read_text(), "the run does not resume")
    (run / "STOP").touch()
    done = resumed.wait(timeout_s=1800)
    assert f"resuming from {run / 'checkpoint-3'}" in done.stdout, done.stdout[-6000:]
    assert set(done.codes) == {ExitCode.STOPPED}
    assert not (run / "final").exists()
    start_undisturbed(run)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    first, second = (line["step"] for line in lines if line["event"] == "resumed")
    assert first == 3 < second
    assert outcome(run) == outcome(whole)
    figures(FIGURES).setdefault("killed_and_stopped", []).append(killed)
