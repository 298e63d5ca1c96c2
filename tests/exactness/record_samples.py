"""Run by every rank of a launch: starts of runs in which each rank writes down what it trains on.

    record_samples.py PLAN.json

PLAN has `workspace` and `starts`, each with `case`, `changes` (settings), `run`, and `cut`: null
for a new run or [WHOLE, STEP], the run to cut and where. RUN.json gets the outcome, RUN.R.json the
row numbers of each (step, micro-batch) that rank R trained on, taken where the model gets them.
"""

import hashlib
import json
import os
import sys
from collections import defaultdict
from pathlib import Path

from cut_every_step import keep_the_process_group, start, wait
from resumed_runs import Case, cut, outcome


def row_names(batch) -> list[str]:
    """Names of a micro-batch's rows, by their tokens."""
    rows = batch["input_ids"].long().cpu().numpy()
    return [hashlib.sha256(row.tobytes()).hexdigest() for row in rows]


class Recorder:
    """Knows rows by their tokens: which number the loader gave them, and which were trained on."""

    def __init__(self):
        from utils.data.loader import PackedDataset
        from utils.training.trainer import PackedTrainer

        self.numbers: dict[str, int] = {}
        self.seen: dict[int, list[list[int]]] = defaultdict(list)
        self._watch(PackedDataset, "__getitems__", self._assembled)
        self._watch(PackedTrainer, "training_step", self._trained_on)

    @staticmethod
    def _watch(owner, name, note):
        original = getattr(owner, name)

        def watched(self, *args, **kwargs):
            result = original(self, *args, **kwargs)
            note(self, result, *args)
            return result

        setattr(owner, name, watched)

    def _assembled(self, _dataset, batch, rows):
        for name, row in zip(row_names(batch), rows, strict=True):
            assert self.numbers.setdefault(name, row) == row, "two rows are alike"

    def _trained_on(self, trainer, _loss, _model, inputs, *_rest):
        rows = [self.numbers[name] for name in row_names(inputs)]
        self.seen[trainer.state.global_step].append(rows)


def let_an_early_step_be_the_best() -> None:
    """Judge the evaluations of the first two steps alone: losses fall, the last would be best."""
    from transformers import Trainer

    judge = Trainer._determine_best_metric

    def judge_early_ones(self, metrics, trial):
        return self.state.global_step <= 2 and judge(self, metrics, trial)

    Trainer._determine_best_metric = judge_early_ones


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ.get("RANK", "0"))
    keep_the_process_group()
    let_an_early_step_be_the_best()
    for item in plan["starts"]:
        run = Path(item["run"])
        if item["cut"] and rank == 0:
            whole, step = item["cut"]
            cut(Path(whole), step, run)
        wait()
        recorder = Recorder()
        start(Case(**item["case"]), Path(plan["workspace"]), run, **item["changes"])
        run.with_name(f"{run.name}.{rank}.json").write_text(json.dumps(recorder.seen))
        if rank == 0:
            run.with_name(f"{run.name}.json").write_text(json.dumps(outcome(run)))


if __name__ == "__main__":
    main()
