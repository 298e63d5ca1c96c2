"""Runs several starts, one after the other, in the ranks of a single launch.

    rank_driver.py PLAN.json

Starts share the processes, because each launch takes seconds. Each start has its own Accelerator,
model, optimizer and loaders. PLAN has `workspace` and `starts`. A start has `run`, `cut` (null, or
[WHOLE, STEP]: the run to cut and the step) and either `case` and `changes` (settings) or the
settings of plain Trainer, see stock_trainer.py. The outcome of a start is written to RUN.json.
RUN.R.json has the sequences of each (step, micro-batch) that rank R trained on, recorded at the
model's inputs.
"""

import contextlib
import hashlib
import importlib
import json
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import stock_trainer
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from launching import run_processes
from resumed_runs import CONFIGS, Case, cut, outcome
from transformers import Trainer


def drive(
    starts: Sequence[dict[str, Any]], strategy: str, ranks: int, workspace: Path, root: Path
) -> str:
    """Run these starts in one launch (`single`: in this process); return the ranks' output."""
    if strategy == "single":
        for start in starts:
            do(start, workspace)
        return ""
    plan = root / "plan.json"
    plan.write_text(json.dumps({"workspace": str(workspace), "starts": starts}))
    done = run_processes(
        CONFIGS[strategy], Path(__file__), [str(plan)], processes=ranks, timeout_s=3600
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def found(start: dict[str, Any], rank: int | None = None) -> dict[str, Any]:
    """Return the outcome of a finished start, or the sequences that a rank trained on."""
    run = Path(start["run"])
    name = f"{run.name}.json" if rank is None else f"{run.name}.{rank}.json"
    return json.loads(run.with_name(name).read_text())


def do(item: dict[str, Any], workspace: Path) -> None:
    """Run one start to its end in this rank."""
    rank, run = int(os.environ.get("RANK", "0")), Path(item["run"])
    if item["cut"] and "case" in item and rank == 0:
        whole, step = item["cut"]
        cut(Path(whole), step, run)
    wait()
    with recorded(item.get("judge_early", False)) as seen:
        if "case" in item:
            case = Case(**item["case"])
            main = importlib.import_module(case.script).main
            code = main(case.argv(workspace, run, **item["changes"]))
            assert code == 0, f"{case.name} left with {code}"
            ended = outcome(run) if rank == 0 else None
        else:
            ended = stock_trainer.start(workspace, **item)
    wait()
    run.with_name(f"{run.name}.{rank}.json").write_text(json.dumps(seen))
    if rank == 0:
        run.with_name(f"{run.name}.json").write_text(json.dumps(ended))
        if item.get("remove"):
            shutil.rmtree(run)
    # The next run gets a new Accelerator.
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@contextlib.contextmanager
def recorded(judge_early: bool) -> Iterator[dict[int, list[list[str]]]]:
    """Record the sequences of each step.

    With `judge_early` only the first two steps can become the best step. Otherwise the last step
    would always be the best, because losses fall.
    """
    train, judge = Trainer.training_step, Trainer._determine_best_metric
    seen: dict[int, list[list[str]]] = defaultdict(list)

    def watched(trainer, model, inputs, *rest, **options):
        rows = inputs["input_ids"].long().cpu().numpy()
        names = [hashlib.sha256(row.tobytes()).hexdigest() for row in rows]
        seen[trainer.state.global_step].append(names)
        return train(trainer, model, inputs, *rest, **options)

    def judged(trainer, metrics, trial):
        early = trainer.state.global_step <= 2
        return (early or not judge_early) and judge(trainer, metrics, trial)

    with (
        mock.patch.object(Trainer, "training_step", watched),
        mock.patch.object(Trainer, "_determine_best_metric", judged),
    ):
        yield seen


def wait() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    # The process group stays for the next run.
    PartialState.destroy_process_group = lambda *_args, **_kwargs: None
    for item in plan["starts"]:
        do(item, Path(plan["workspace"]))


if __name__ == "__main__":
    main()
    # Exit as utils/launch/script.py does. In a usual exit a library's thread sometimes aborts.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
